"""Gathering the sequence: every rank sees the whole of tensors of which each holds a part.

Several tensors travel in one message, and come in the sequence's own order (Note [Head and tail] in
`hp_styles.context.plan` says in which they are held). Backward, every rank's gradients of the whole are summed, and
each rank gets its part of that.

Note [Blocks]
    Keys may be sent as soon as they have been projected, before the module that reads them runs. A style of this kind
    is on the module that holds both. A hook before its forward opens a block, projections inside put their outputs
    into it, and the core takes the keys out; a hook after it, which is called on an error as well, closes it. A core
    that runs with no block open (recomputed alone, under activation checkpointing) sends its keys itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hp_dtensor import DTensor
from hp_platform import get_platform
from hp_styles.inputs import hook
from hp_styles.torch.context.call import refuse_compiled

T = torch.Tensor


@dataclass(frozen=True)
class Whole:
    """Between which ranks, on which dim.

    Attributes:
        group: the process group.
        size: its ranks.
        seq_dim: the dim that has the sequence.
        load_balance: each rank holds a chunk of the head and one of the tail.
    """

    group: Any
    size: int
    seq_dim: int
    load_balance: bool

    def shape(self, part: torch.Size) -> list[int]:
        """Return the full shape of a tensor whose part on each rank has shape ``part``."""
        return [n * self.size if dim == self.seq_dim else n for dim, n in enumerate(part)]

    def pairs(self, whole: T, pieces: T) -> Iterator[tuple[T, T]]:
        """Pair the parts of a full tensor and of its pieces, [rank, ...], that hold the same elements."""
        view, parts = whole.movedim(self.seq_dim, 0), pieces.movedim(self.seq_dim + 1, 1)
        if not self.load_balance:
            yield view.unflatten(0, (self.size, -1)), parts
            return
        halves, ends = view.unflatten(0, (2, self.size, -1)), parts.unflatten(1, (2, -1))
        yield halves[0], ends[:, 0]
        for rank in range(self.size):
            yield halves[1, self.size - 1 - rank], ends[rank, 1]

    def is_message(self, parts: Sequence[torch.Size]) -> bool:
        """Return True if the message of all ranks, unchanged, is the full tensor of these parts."""
        return len(parts) == 1 and not self.load_balance and prod(parts[0][: self.seq_dim]) == 1

    def rows(self, flat: T, parts: Sequence[torch.Size]) -> list[T]:
        """View a message of all ranks as pieces, [rank, ...], of each tensor."""
        split = flat.view(self.size, -1).split([part.numel() for part in parts], 1)
        return [row.unflatten(1, part) for row, part in zip(split, parts, strict=True)]


class Gathering:
    """Tensors of one dtype on their way, forward, or the sum of their gradients on the way back.

    Two autograd nodes, made at the two ends: the later one's backward starts the sum, the earlier one's, which autograd
    runs after all nodes between, waits for it. What flows between the two is a message of this rank's parts: forward
    the one that was sent, backward the one that is being received.

    Args:
        plan: between which ranks, on which dim.
        tensors: this rank's parts; they are sent.
    """

    def __init__(self, plan: Whole, tensors: Sequence[T]) -> None:
        self.plan = plan
        self.parts = [x.shape for x in tensors]
        self.under_way: Any = None
        self.kept: T | None = None  # what a collective that is under way reads
        self.received: T | None = None
        self._sent: T | None = _Start.apply(self, *tensors)

    def finish(self) -> tuple[T, ...]:
        """Wait for the full tensors and return them; call it once."""
        sent, self._sent = self._sent, None  # its node holds this
        return _Finish.apply(self, sent)

    def wait(self) -> None:
        """Until what is under way has arrived."""
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.kept = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *tensors: T) -> T:
        ctx.gathering, plan = gathering, gathering.plan
        sent = torch.cat([x.reshape(-1) for x in tensors])
        gathering.kept, gathering.received = sent, sent.new_empty(plan.size * sent.numel())
        all_gather = get_platform().collectives.all_gather
        gathering.under_way = all_gather(gathering.received, sent, group=plan.group, async_op=True)
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed: T) -> Any:
        ctx.gathering.wait()
        parts = ctx.gathering.parts
        split = summed.split([part.numel() for part in parts])
        return None, *(x.view(part) for x, part in zip(split, parts, strict=True))


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, sent: T) -> tuple[T, ...]:
        ctx.gathering, plan = gathering, gathering.plan
        gathering.wait()
        received, gathering.received = gathering.received, None
        assert received is not None  # finish is called once
        if plan.is_message(gathering.parts):
            return (received.view(plan.shape(gathering.parts[0])),)
        gathered = tuple(sent.new_empty(plan.shape(part)) for part in gathering.parts)
        for whole, pieces in zip(gathered, plan.rows(received, gathering.parts), strict=True):
            for into, piece in plan.pairs(whole, pieces):
                into.copy_(piece)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: T) -> Any:
        gathering, plan = ctx.gathering, ctx.gathering.plan
        width = sum(prod(part) for part in gathering.parts)
        if plan.is_message(gathering.parts):
            sent = grads[0].contiguous().view(-1)
        else:
            sent = grads[0].new_empty(plan.size * width)
            for grad, pieces in zip(grads, plan.rows(sent, gathering.parts), strict=True):
                for part, into in plan.pairs(grad, pieces):
                    into.copy_(part)
        summed = sent.new_empty(width)
        reduce_scatter = get_platform().collectives.reduce_scatter
        gathering.kept = sent
        gathering.under_way = reduce_scatter(summed, sent, group=plan.group, async_op=True)
        return None, summed


def gather(plan: Whole, tensors: Sequence[T]) -> list[T]:
    """Gather each tensor; one message per dtype for tensors that need a gradient, one for those that do not.

    A tensor that is given twice is sent once.

    Args:
        plan: between which ranks, on which dim.
        tensors: this rank's parts.
    """
    kinds: dict[Any, dict[int, T]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.requires_grad), {})[id(x)] = x
    under_way = [(same, Gathering(plan, list(same.values()))) for same in kinds.values()]
    gathered = {key: whole for same, sent in under_way for key, whole in zip(same, sent.finish(), strict=True)}
    return [gathered[id(x)] for x in tensors]


@dataclass
class _Block:
    """A module that runs.

    Attributes:
        sources: by the name of a projection, its output, and the version of that, which tells of writes.
        arriving: those on their way.
        arrived: those whose whole was taken.
        done: the core has run.
    """

    sources: dict[str, tuple[T, int]] = field(default_factory=dict)
    arriving: dict[str, Gathering] = field(default_factory=dict)
    arrived: dict[str, T] = field(default_factory=dict)
    done: bool = False


class Blocks(threading.local):
    """The blocks that are open on this thread, of one style on one module, and what they take and give.

    Args:
        plan: between which ranks, on which dim.
        style: the name of the style, for errors.
        projections: for keys, the name of the submodule whose output it is.
    """

    def __init__(self, plan: Whole, style: str, projections: Mapping[str | int, str]) -> None:
        self.plan, self.style, self.projections = plan, style, projections
        self.open: list[_Block] = []

    def close(self) -> None:
        """Leave the innermost block, with nothing under way."""
        if self.open:  # there is none after an error in a hook before
            for gathering in self.open.pop().arriving.values():
                gathering.wait()

    def send(self, path: str, x: T) -> None:
        """Send the output of a projection."""
        block = self.open[-1]
        if path in block.sources:
            raise RuntimeError(f"{self.style}: {path}, of projections={self.projections}, ran twice before the core")
        block.sources[path] = x, _version(x)
        block.arriving[path] = Gathering(self.plan, [x])

    def check(self, parts: Mapping[str | int, T]) -> bool:
        """Check whether keys are on their way.

        Raises:
            RuntimeError: the core's keys are not the tensors that were sent.
        """
        if not self.open:
            return False
        block = self.open[-1]
        if block.done:
            raise RuntimeError(f"{self.style}: the core runs twice in one forward; use {self.style[len('Async') :]}")
        for key, path in self.projections.items():
            if path not in block.sources:
                raise RuntimeError(
                    f"{self.style}: the core runs before {path}, the projection of {key!r}: leave it out"
                )
            sent = block.sources[path]
            if not _same(parts[key], *sent, self.plan.seq_dim):
                raise RuntimeError(
                    f"{self.style}: the key {key!r}, of shape {tuple(parts[key].shape)}, is not the output of {path},"
                    f" of shape {tuple(sent[0].shape)}, nor a view of it that splits or joins the dims after the"
                    " sequence: something in between (rotary positions, a norm) changes it. Name the last module"
                    " before the core, or leave it out: the key is then sent when the core runs"
                )
        block.done = True
        return True

    def take(self, key: str | int, part: T) -> T:
        """Take the gathered key that was sent early."""
        block, path = self.open[-1], self.projections[key]
        if path in block.arriving:
            (block.arrived[path],) = block.arriving.pop(path).finish()
        whole = block.arrived[path]
        shape = self.plan.shape(part.shape)
        return whole if list(whole.shape) == shape else whole.view(shape)


def _version(x: T) -> int:
    return 0 if x.is_inference() else x._version


def _same(key: T, sent: T, version: int, seq_dim: int) -> bool:
    if key.data_ptr() != sent.data_ptr() or key.dtype != sent.dtype or _version(key) != version:
        return False
    if key.requires_grad != sent.requires_grad:  # detached
        return False
    if key.shape == sent.shape:
        return key.stride() == sent.stride()
    start = seq_dim + 1
    return key.shape[:start] == sent.shape[:start] and key.is_contiguous() and sent.is_contiguous()


def register(module: nn.Module, projections: Mapping[str, nn.Module], blocks: Blocks, check: Any) -> None:
    """Register the hooks on the module that holds the projections, and on these.

    Args:
        module: the module.
        projections: those whose outputs are keys, by name.
        blocks: where the keys go.
        check: ``(name, output)``: refuses an output that can't be sent.
    """

    def enter(module: nn.Module, args: Any) -> None:
        refuse_compiled(blocks.style)
        blocks.open.append(_Block())

    module.register_forward_pre_hook(hook(enter))
    module.register_forward_hook(hook(lambda mod, args, output: blocks.close()), always_call=True)

    def sender(path: str) -> Any:
        def send(module: nn.Module, args: Any, output: Any) -> None:
            if blocks.open and not blocks.open[-1].done:
                check(path, output)
                blocks.send(path, output.to_local() if isinstance(output, DTensor) else output)

        return send

    for path, projection in projections.items():
        projection.register_forward_hook(hook(sender(path)))
