"""MicroBatchBuffer: a bucket's gradients, micro-batch by micro-batch, summed alike for any number of ranks.

Note [Gradients kept until the last micro-batch]
    The order of a sum over micro-batches depends on their number, which is known at the last backward pass before the
    optimizer's step. Until then a rank keeps the unsharded gradients of each of its micro-batches (the numbers of the
    first rank start at 0, so it adds them up at once), without communication. At the last one it adds up its complete
    subtrees, sends each rank its pieces of them by all-to-all, and sums the received ones; see
    `hp_platform.values`. With one micro-batch on each rank nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import local_view
from hp_fsdp.steps.order import OwnMicroBatches, TreeSum, skip_none, subtrees
from hp_fsdp.torch.groups.gradients import GradientBuffer
from hp_platform import collectives
from hp_platform.extend import attribute_to
from hp_platform.torch.internals import get_grad


class MicroBatchBuffer(GradientBuffer):
    """A `GradientBuffer` whose sums don't depend on the number of ranks.

    Ranks hold consecutive micro-batches, equally many, in the order of the mesh's ranks, row by row.
    """

    in_order = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        axes = self.axes
        self.row, self.ranks = axes.row, axes.ranks
        self.handed: dict[int, tuple[int, int]] = {}
        self.had: set[int] = set()
        self.own: OwnMicroBatches[torch.Tensor] = OwnMicroBatches(self.row + axes.shard_rank, _add)

    def _forget(self) -> None:
        self.had = set()
        self.own.clear()

    def collect(self) -> None:
        """Move the gradients that autograd left on the unsharded parameters into the buffer.

        Raises:
            RuntimeError: the gradients of a step that is over were neither dropped nor zeroed.
        """
        if not self.had and not self.filled:
            self._check_cleared()
        super().collect()

    @property
    def used(self) -> bool:
        """True if there is a gradient to reduce."""
        return bool(self.had)

    def end_micro_batch(self, number: int, *, keeps: bool) -> None:
        """End a micro-batch: its gradients are complete.

        Args:
            number: number of micro-batches before it on this rank since the last step.
            keeps: it is not the last one, so its gradients must survive the next one.
        """
        current: torch.Tensor | None = None
        if self.filled:
            # A zero that is a gradient must not be minus zero, which stands for no gradient.
            torch._foreach_add_([self.views[index] for index in self.filled], 0.0)
            for index, view in enumerate(self.views):
                if index not in self.filled:
                    view.fill_(-0.0)
            current = self.buffer
        self.had |= self.filled
        self.filled.clear()
        if current is not None and keeps:
            current = current.clone()
            self.storage.resize_(0)
        self.own.keep(number, current)

    def take(self, count: int) -> tuple[list[torch.Tensor | None], list[int]]:
        """Return the micro-batches, and drop them.

        Args:
            count: number of micro-batches on each rank.

        Returns:
            The sums of this rank's subtrees, None for minus zeros, and the parameters that had no gradient.
        """
        missing = [i for i, parameter in enumerate(self.parameters) if parameter.trains and i not in self.had]
        self.had = set()
        return self.own.take(count), missing

    def release(self) -> None:
        """Drop collected gradients."""
        super().release()
        self._forget()

    def assign(self, reduced: torch.Tensor, missing: Sequence[int]) -> None:
        """Give the sharded parameters their gradients, and record these tensors."""
        super().assign(reduced, missing)
        self.handed = {}
        for index, parameter in enumerate(self.parameters):
            gradient = get_grad(parameter.sharded)
            if gradient is not None and gradient.numel():
                self.handed[index] = _state(gradient)

    def _check_cleared(self) -> None:
        for index, state in self.handed.items():
            parameter = self.parameters[index]
            gradient = get_grad(parameter.sharded)
            if gradient is not None and _state(gradient) == state:
                raise RuntimeError(
                    f"fully_shard(deterministic=True): {parameter.name!r} still has the gradient that the last backward"
                    " pass reduced, and the sum with this pass's would depend on the number of ranks. To accumulate"
                    " over micro-batches, call model.set_requires_gradient_sync(False) before all backward passes but"
                    " the last of a step and (True) before that one; else call optimizer.zero_grad() after each step"
                )


class Exchange:
    """The reduction of a bucket's micro-batches: an all-to-all of pieces; on two axes a gather from the replicas.

    Args:
        gradients: of the micro-batches; it gets the result.
        count: number of micro-batches a rank.
        op: ``"avg"`` or ``"sum"``.
        modules: the modules that this communicates for, for observers; see `attribute_to`.
    """

    def __init__(self, gradients: MicroBatchBuffer, count: int, op: str, modules: Sequence[Any]) -> None:
        self.gradients = gradients
        self.divisor = gradients.divisor
        self.count = count
        values, self.missing = gradients.take(count)
        self.op = op
        self.modules = modules
        self.scattered = self.handed = False
        self.handles: list[Any] = []
        self.sent = [gradients.minus_zeros() if value is None else value for value in values]
        self.received: list[Any] = []
        axes = gradients.axes
        if axes.shard_size > 1:
            self._scatter(axes.shard_size, axes.shard_group)

    def _scatter(self, size: int, group: Any) -> None:
        piece = self.gradients.layout.piece
        lengths = [len(self._subtrees(self.gradients.row + rank, 1)) for rank in range(size)]
        for slot in range(max(lengths)):
            own = slot < len(self.sent)
            value = self.sent[slot] if own else self.sent[0][:0]
            output_splits = [piece if slot < length else 0 for length in lengths]
            output = value.new_empty(sum(output_splits))
            handle = collectives.all_to_all(
                output, value, output_splits, [piece if own else 0] * size, group=group, async_op=True
            )
            self.handles.append(handle)
            self.received.append(output.split_with_sizes(output_splits))

    def _subtrees(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        return subtrees(rank * self.count, ranks * self.count)

    def advance(self) -> bool:
        """Wait for the collectives under way and start the next ones; return True when the gradients are assigned."""
        if self.handed:
            return self.gradients.arrive()
        self.abandon()
        gradients, axes = self.gradients, self.gradients.axes
        if not self.scattered:
            self.scattered = True
            tree = self._sum_row(axes.shard_size)
            if axes.replicate_group is not None:
                attribute_to(self.modules, self._gather, tree, axes.replicate_size, axes.replicate_group)
                self._release(gradients)
                return False
            self._release(gradients)
            return self._finish(tree)
        tree = TreeSum(_add)
        for replica in range(axes.replicate_size):
            for slot, (start, size) in enumerate(self._subtrees(replica * axes.shard_size, axes.shard_size)):
                tree.push(start, size, self.received[slot][replica])
        return self._finish(tree)

    def _sum_row(self, size: int) -> TreeSum[torch.Tensor | None]:
        """Sum this rank's piece over the ranks of this line, as far as subtrees are complete."""
        tree: TreeSum[torch.Tensor | None] = TreeSum(_add)
        for rank in range(size):
            for slot, (start, number) in enumerate(self._subtrees(self.gradients.row + rank, 1)):
                value = self.sent[slot].clone() if size == 1 else self.received[slot][rank]
                tree.push(start, number, value)
        return tree

    def _gather(self, tree: TreeSum[Any], size: int, group: Any) -> None:
        values = tree.values
        row = self.gradients.axes.shard_size
        slots = max(len(self._subtrees(replica * row, row)) for replica in range(size))
        self.received = []
        for slot in range(slots):
            value = values[slot] if slot < len(values) else values[0]  # all-gathers are even: padding is not read
            output = value.new_empty(size * value.numel())
            self.handles.append(collectives.all_gather(output, value, group=group, async_op=True))
            self.received.append(output.chunk(size))
        self.sent = values  # lives until the gather is over

    def _release(self, gradients: MicroBatchBuffer) -> None:
        if not gradients.filled:
            gradients.storage.resize_(0)

    def _finish(self, tree: TreeSum[Any]) -> bool:
        total = tree.total()
        ranks = self.gradients.ranks
        # Not a view of the received buffer, which would live as long as the gradient.
        reduced = total / ranks if self.op == "avg" and ranks > 1 else total.clone()
        self.sent, self.received = [], []
        self.handed = True
        return self.gradients.assign_gradients(reduced, self.missing, self.divisor)

    def abandon(self) -> None:
        """Wait for the collectives under way."""
        for handle in self.handles:
            if handle is not None:
                handle.wait()
        self.handles = []


_add = skip_none(torch.Tensor.add_)


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    view = local_view(gradient)
    return view.data_ptr(), view._version
