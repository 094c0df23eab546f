"""Bucket: a group's parameters of one dtype: gathered as one, reduced as one, or summed by micro-batch.

Note [Two copies]
    On MindSpore a write into a view does not reach its base (on CPU it is lost without an error), so sharded
    parameters cannot be views of a flat shard that an optimizer then writes: the shards are concatenated before a
    gather. Reading through views works, so the gathered buffer needs no copy out: the unsharded parameters are views of
    it. Gradients are concatenated before the reduction and copied out after it, because they may be written in place.

Note [Memory that comes and goes]
    The gathered buffer is one tensor for good, whose storage is emptied by ``resize_(0)``. The tensors that autograd
    saved in forward are views of it; they have their values again when it is gathered anew for backward. Collectives
    write through an alias with a version counter of its own, since autograd must not take a gather for a change of a
    saved value.

Note [The sum is returned]
    Until the last backward pass before an optimizer's step a rank keeps the unsharded gradients of each of its
    micro-batches, because the order of their sum depends on their number: `hp_platform.values`. Gradients are
    returned, so the sum over the ranks is formed in the backward of the function that unshards
    (`hp_fsdp.mindspore.groups.group`): of the last of the Cell's calls in the last micro-batch. The others return
    zeros. The last call is the last of the recorded ones; so a call whose output the loss does not use must not be kept
    alive, and a group must be used in the last micro-batch if it was in an earlier one. Otherwise the backward pass
    raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common import dtype as mstype

from hp_dtensor.mindspore.extend import autograd, local_mode, local_view, set_local
from hp_fsdp.axes import DataAxes
from hp_fsdp.grad_norm import mark_in_blocks
from hp_fsdp.groups.bucket import FlatBucket
from hp_fsdp.groups.managed_params import FlatLayout
from hp_fsdp.mindspore.groups.parameter import ManagedParameter, copy_range, itemsize, to_device, to_host
from hp_fsdp.options import BucketPlan, GroupOptions
from hp_fsdp.steps.order import OwnMicroBatches, TreeSum, skip_none, subtrees
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
        self.row, self.ranks = axes.row, axes.ranks
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


_add: Any = skip_none(lambda left, right: left + right)


def _minus_zeros(like: Tensor) -> Tensor:
    """Return the summand of a micro-batch without a gradient: -0.0 + x is x for every x, also for +0.0 and -0.0."""
    return Tensor(np.full(tuple(like.shape), -0.0, np.float32)).astype(like.dtype)


class Bucket(FlatBucket):
    """A bucket whose shards are concatenated before a gather: Note [Two copies]."""

    parameters: list[ManagedParameter]

    def __init__(self, plan: BucketPlan, axes: DataAxes, device: None, options: GroupOptions, owner: str) -> None:
        super().__init__(plan, axes, device, options, owner)
        if get_platform().devices.kind == "cpu":  # where the host is the device, shards are there anyway
            self.offload = None
        self.sums = MicroBatchSums(axes, self.layout) if options.deterministic else None
        self.has_inner = any(parameter.inner is not None for parameter in self.parameters)
        self.full: Any = None
        self.accumulated: Tensor | None = None
        self.accumulated_piece: Tensor | None = None
        self.divisor: float | None = None

    @staticmethod
    def itemsize(dtype: Any) -> int:
        return itemsize(dtype)

    def is_floating(self) -> bool:
        return self.dtype in mstype.float_type

    def shard_originals(self) -> None:
        """Shard the parameters."""
        for index, (parameter, spec) in enumerate(zip(self.parameters, self.specs)):
            start, stop = self.layout.part(index, self.axes.shard_rank)
            parameter.shard(start, stop, spec, f"{parameter.name!r} of {self.owner}")
            if self.sums is not None:
                mark_in_blocks(parameter.parameter)
        self.come_home()

    @property
    def gathered_bytes(self) -> int:
        """Current memory of the gathered buffer."""
        return 0 if self.full is None else self.storage.size()

    # ---- gathering ----
    def check(self) -> None:
        """Raise if a parameter has no values yet.

        Raises:
            RuntimeError: it was built by ``init_empty_weights`` and not initialised.
        """
        for parameter in self.parameters:
            if parameter.parameter.has_init:
                raise RuntimeError(
                    f"fully_shard: parameter {parameter.name!r} of {self.owner} has no values yet. Give it some before"
                    " the first forward: hp_dtensor.init_parameters(model)"
                )

    def _prepare(self) -> None:
        self.full = mint.empty((self.layout.total,), dtype=self.compute_dtype)
        self.target = ops.stop_gradient(self.full)
        self.storage = self.full.untyped_storage()
        self.bytes = self.storage.size()

    def piece(self) -> Tensor:
        """Return the rank's piece: its shards one after the other, with the padding between them."""
        sizes, indices = self.layout.splits(self.axes.shard_rank)
        at = dict(zip(indices, self.parameters))
        parts = [
            local_view(at[index].parameter).reshape(-1) if index in at else ops.zeros((size,), self.dtype)
            for index, size in enumerate(sizes)
            if size
        ]
        if self.offload is not None:
            parts = [to_device(part) for part in parts]
        return parts[0].copy() if len(parts) == 1 else ops.concat(parts)

    def come_home(self) -> None:
        """Move offloaded shards that are on the device to the host: Note [Optimizers bring parameters back]."""
        if self.offload is not None:
            for parameter in self.parameters:
                if not parameter.parameter.has_init:
                    local = local_view(parameter.parameter)
                    moved = to_host(local, self.offload.pin_memory)
                    if moved is not local:
                        set_local(parameter.parameter, moved)

    def gather(self) -> Any:
        """Start to fill the gathered buffer from all ranks' shards; return a handle, or None if it is filled."""
        if self.full is None:
            self._prepare()
        self.storage.resize_(self.bytes)
        if self.has_inner:
            autograd.forget()  # its copies of the unsharded parameters may have older values
        if self.post_forward_shard is not None:
            return get_platform().collectives.all_gather(
                self.target, self.post_forward_shard, group=self.post_forward_group, async_op=True
            )
        self.come_home()
        source = self.piece()
        if self.compute_dtype != self.dtype:
            source = source.astype(self.compute_dtype)
        if self.axes.shard_size == 1:
            self.target.copy_(source)
            return None
        self.source = source  # it must live until the gather is done
        return get_platform().collectives.all_gather(self.target, source, group=self.axes.shard_group, async_op=True)

    def views(self) -> list[Tensor]:
        """Return the unsharded parameters as plain views of the gathered buffer."""
        return [
            mint.narrow(self.full, 0, offset, parameter.numel).reshape(parameter.shape)
            for parameter, offset in zip(self.parameters, self.layout.offsets)
        ]

    @property
    def owns_full(self) -> bool:
        return self.full is not None

    def piece_of_full(self, place: int, size: int) -> Tensor:
        length = self.layout.total // size
        return mint.narrow(self.target, 0, place * length, length).copy()

    def free(self) -> None:
        self.storage.resize_(0)
        if self.has_inner:
            autograd.forget()

    # ---- gradients ----
    def collect(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return one flat buffer of the gradients, with those of earlier backward passes."""
        parts: list[Tensor] = []
        end = 0
        for gradient, offset, numel in zip(gradients, self.layout.offsets, self.layout.numels):
            if offset > end:
                parts.append(ops.zeros((offset - end,), self.reduce_dtype))
            if numel:
                parts.append(gradient.reshape(-1).astype(self.reduce_dtype))
            end = offset + numel
        if end < self.layout.total:
            parts.append(ops.zeros((self.layout.total - end,), self.reduce_dtype))
        flat = parts[0].copy() if len(parts) == 1 else ops.concat(parts)
        if self.accumulated is not None:
            flat = flat + self.accumulated
            self.accumulated = None
        return flat

    def reduce(self, flat: Tensor, op: str, *, over_replicas: bool) -> list[Tensor]:
        """Return each parameter's shard of the gradient, reduced over the ranks.

        Args:
            flat: the result of `collect`.
            op: ``"avg"`` or ``"sum"``.
            over_replicas: on two axes, all-reduce the shards as well; else they wait for a later call that does, and
                zeros are returned.
        """
        axes, collectives = self.axes, get_platform().collectives
        piece = flat
        if axes.shard_size > 1:
            piece = mint.empty((self.layout.piece,), dtype=self.reduce_dtype)
            collectives.reduce_scatter(piece, flat, op, group=axes.shard_group)
        if axes.replicate_group is not None:
            if self.accumulated_piece is not None:
                piece = piece + self.accumulated_piece
                self.accumulated_piece = None
            if not over_replicas:
                self.accumulated_piece = piece
                return self.zeros()
            collectives.all_reduce(piece, op, group=axes.replicate_group)
        return self.shards(piece)

    def reduce_in_order(self, count: int, op: str) -> list[Tensor]:
        """Return each parameter's shard of the sum over micro-batches, in deterministic mode.

        Args:
            count: number of micro-batches a rank.
            op: ``"avg"`` or ``"sum"``.
        """
        assert self.sums is not None
        return self.shards(self.sums.reduce(count, op))

    def shards(self, piece: Tensor) -> list[Tensor]:
        """Split this rank's piece of a reduced gradient into a shard for each parameter, 1-d, in memory of its own."""
        if self.divisor is not None:
            piece = piece / self.divisor
        shards = []
        for index in range(len(self.parameters)):
            start, stop = self.layout.place(index, self.axes.shard_rank)
            shard = copy_range(piece, start, stop).astype(self.dtype)
            shards.append(shard if self.offload is None else to_host(shard, self.offload.pin_memory))
        return shards

    def zeros(self) -> list[Tensor]:
        """Return zeros in place of gradients that a later backward pass returns."""
        rank = self.axes.shard_rank
        return [ops.zeros((self.layout.units(index)[rank],), self.dtype) for index in range(len(self.parameters))]

    def forget_gradients(self) -> None:
        """Drop accumulated gradients."""
        self.accumulated = self.accumulated_piece = None
        if self.sums is not None:
            self.sums.forget()
        with local_mode():
            for parameter in self.parameters:
                parameter.parameter._grad = None
