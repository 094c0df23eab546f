"""MicroBatchSums: a bucket's gradients, micro-batch by micro-batch, summed alike for any number of ranks.

Note [The sum is returned]
    Until the last backward pass before an optimizer's step a rank keeps the unsharded gradients of each of its
    micro-batches, because the order of their sum depends on their number: `hp_platform.values`. Gradients are
    returned, so the sum over the ranks is formed in the backward of the function that unshards
    (`hp_fsdp.mindspore.groups.gradients`): of the last of the Cell's calls in the last micro-batch. The others return
    zeros. The last call is the last of the recorded ones; so a call whose output the loss does not use must not be kept
    alive, and a group must be used in the last micro-batch if it was in an earlier one. Otherwise the backward pass
    raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hp_fsdp.groups.layout import FlatLayout
from hp_fsdp.groups.micro_batches import OwnMicroBatches, TreeSum, subtrees
from hp_fsdp.ranks.axes import DataAxes
from hp_platform import get_platform


class MicroBatchSums:
    """A bucket's gradients of the micro-batches since the last step.

    Ranks hold consecutive micro-batches, equally many, in the order of the mesh's ranks, row by row.

    Args:
        axes: the axes of data parallelism.
        layout: offsets of the parameters in a flat gradient.

    Attributes:
        current: the sum over the Cell's calls in the backward pass under way; None if there was none.
        used: some micro-batch since the last step had a gradient.
    """

    def __init__(self, axes: DataAxes, layout: FlatLayout) -> None:
        self.axes = axes
        self.layout = layout
        replica = axes.mesh.get_local_rank(0) if axes.mesh.ndim == 2 else 0
        self.row = replica * axes.shard_size  # the first rank of this rank's line along the shard axis
        self.ranks = axes.shard_size * axes.replicate_size
        self.current: Tensor | None = None
        self.used = False
        self.own: OwnMicroBatches[Tensor] = OwnMicroBatches(self.row + axes.shard_rank, _add)

    def add(self, flat: Tensor) -> None:
        """Add the flat gradient of one call."""
        self.current = _add(self.current, flat)
        self.used = True

    def end_micro_batch(self, number: int) -> None:
        """End a micro-batch: its gradients are complete.

        Args:
            number: number of micro-batches before it on this rank since the last step.
        """
        self.own.keep(number, self.current)
        self.current = None

    def forget(self) -> None:
        """Drop all gradients."""
        self.current = None
        self.used = False
        self.own.clear()

    def reduce(self, count: int, op: str) -> Tensor:
        """Return this rank's piece of the sum over all micro-batches, by an all-to-all and a gather over replicas.

        Args:
            count: number of micro-batches a rank.
            op: ``"avg"`` or ``"sum"``.
        """
        values = self.own.take(count)
        reference = next(value for value in values if value is not None)
        sent = [_minus_zeros(reference) if value is None else value for value in values]
        self.forget()
        tree = self._sum_row(sent, count)
        if self.axes.replicate_group is not None:
            tree = self._sum_replicas(tree.values, count)
        total: Any = tree.total()
        return total / self.ranks if op == "avg" and self.ranks > 1 else total

    def _sum_row(self, sent: list[Tensor], count: int) -> TreeSum[Any]:
        """Sum this rank's piece over the ranks of this line, as far as subtrees are complete."""
        size, piece = self.axes.shard_size, self.layout.piece
        trees = [subtrees((self.row + rank) * count, count) for rank in range(size)]
        slots: list[list[Tensor | None]] = [list(sent)] if size == 1 else []
        if size > 1:
            slots = [[] for _ in range(size)]
            for slot in range(max(map(len, trees))):
                splits = [piece if slot < len(each) else 0 for each in trees]
                mine = slot < len(sent)
                output = mint.empty((sum(splits),), dtype=sent[0].dtype)
                get_platform().collectives.all_to_all(
                    output,
                    sent[slot] if mine else mint.empty((0,), dtype=output.dtype),
                    splits,
                    [piece if mine else 0] * size,
                    group=self.axes.shard_group,
                )
                at = 0
                for rank, length in enumerate(splits):
                    slots[rank].append(mint.narrow(output, 0, at, length) if length else None)
                    at += length
        tree: TreeSum[Any] = TreeSum(_add)
        for each, received in zip(trees, slots):
            for (start, number), value in zip(each, received):
                tree.push(start, number, value)
        return tree

    def _sum_replicas(self, own: list[Tensor], count: int) -> TreeSum[Any]:
        size, row, piece = self.axes.replicate_size, self.axes.shard_size, self.layout.piece
        trees = [subtrees(replica * row * count, row * count) for replica in range(size)]
        received = []
        for slot in range(max(map(len, trees))):
            value = own[min(slot, len(own) - 1)].copy()  # all-gathers are even: padding is not read
            output = mint.empty((size * piece,), dtype=value.dtype)
            get_platform().collectives.all_gather(output, value, group=self.axes.replicate_group)
            received.append(output)
        tree: TreeSum[Any] = TreeSum(_add)
        for replica, each in enumerate(trees):
            for slot, (start, number) in enumerate(each):
                tree.push(start, number, mint.narrow(received[slot], 0, replica * piece, piece))
        return tree


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _minus_zeros(like: Tensor) -> Tensor:
    """Return the summand of a micro-batch without a gradient: -0.0 + x is x for every x, also for +0.0 and -0.0."""
    return Tensor(np.full(tuple(like.shape), -0.0, np.float32)).astype(like.dtype)
