"""The all-to-all of Ulysses: from a piece of the sequence with all heads to the whole of it with a part of the heads.

Several tensors travel in one message. Note [Head and tail] in `hp_styles.context.plan` says what order they are put in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard
from hp_platform import get_platform
from hp_platform.extend import share_numbers
from hp_styles.context.plan import ContextRanks, UlyssesAxes, chunk_order, chunks_of, divided

# ---- a sequence over the ranks of a context axis ----
T = torch.Tensor


class SequenceGroup(ContextRanks):
    """The ranks that a sequence is sharded over, with what they hold of it."""

    def cuts(self, x: DTensor) -> list[bool]:
        """Return for each axis of a DTensor's mesh whether the sequence is sharded over it."""
        return [x.device_mesh._line(axis) == self.ranks for axis in range(x.device_mesh.ndim)]

    def places(self, length: int, device: torch.device) -> T:
        """Return the places of this rank's ``length`` tokens in the full sequence."""
        chunks = chunks_of(self.place, self.size, self.load_balance)
        size = length // len(chunks)
        runs = [torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in chunks]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def check_layout(self, x: DTensor, name: str, seq_dim: int, others: Collection[int], called: str) -> None:
        """Refuse a layout whose local part is not this rank's part of the sequence.

        Args:
            x: a DTensor.
            name: of the tensor, for the error.
            seq_dim: the dim of its sequence.
            others: dims that may be sharded over other axes.
            called: their name in the error.

        Raises:
            ValueError: such a layout, or a length that does not divide.
        """
        spec = x._spec
        for placement, ours, axis in zip(spec.placements, self.cuts(x), range(spec.mesh.ndim), strict=True):
            line = spec.mesh._line(axis)
            if ours:
                fits = placement == Shard(seq_dim) or (self.size == 1 and not placement.is_partial())
                expected = f"Shard({seq_dim}), its sequence dim,"
                divided(spec.shape[seq_dim], self.size, self.load_balance, spec.shape, seq_dim)
            else:
                other = isinstance(placement, Shard) and placement.dim in others
                fits = len(set(line) & set(self.ranks)) == 1 and (placement.is_replicate() or other)
                expected = f"Replicate(){called},"
            if not fits:
                raise ValueError(
                    f"{self.style}: {name} of shape {spec.shape} is placed {spec.placements} on {spec.mesh}; over"
                    f" ranks {line} it must be {expected} with the sequence sharded over ranks {self.ranks}:"
                    " redistribute it first"
                )

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather the numbers of every rank."""
        return share_numbers(numbers, self.mesh.get_group())


def like(out: T, q: T) -> T:
    """Lay out a rank's part of attention's output as its queries are; the head size may differ."""
    if not isinstance(q, DTensor):
        return out
    shape = [n * whole // part for n, whole, part in zip(out.shape, q.shape, q.local_shape, strict=False)]
    shape += out.shape[len(shape) :]
    return DTensor.from_local(out, q.device_mesh, q.placements, shape=shape)


CUT = "_context_parallel_cut"
"""The attribute of a part that says how it was sharded: the mesh and ``load_balance``."""


def shard(whole: torch.Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank holds in full."""
    size, dim = mesh.size(), seq_dim % whole.dim()
    divided(whole.shape[dim], size, load_balance, whole.shape, dim)
    order = chunks_of(mesh.get_local_rank(), size, load_balance)
    chunks = whole.chunk(2 * size if load_balance else size, dim)
    part = torch.cat([chunks[chunk] for chunk in order], dim)
    setattr(part, CUT, (mesh, load_balance))
    return part


def unshard(local: torch.Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> torch.Tensor:
    """Gather the full tensor, in the sequence's own order."""
    size, dim = mesh.size(), seq_dim % local.dim()
    gathered = DTensor.from_local(local, mesh, [Shard(dim)]).redistribute(placements=[Replicate()]).to_local()
    if not load_balance:
        return gathered
    chunks, order = gathered.chunk(2 * size, dim), chunk_order(size, load_balance)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(2 * size)], dim)


Pair = tuple[torch.Tensor, torch.Tensor]


class Exchange(UlyssesAxes):
    """An exchange of heads for parts of the sequence, on this framework's tensors."""

    def pieces(self, x: torch.Tensor, *, to_heads: bool) -> tuple[int, ...]:
        """Return the shape in which ``x`` is sent: a piece per rank, its heads, its part of the sequence, the rest."""
        heads, length, *rest = x.movedim((self.head_dim, self.seq_dim), (0, 1)).shape
        if to_heads:
            return (self.size, heads // self.size, length, *rest)
        return (self.size, heads, length // self.size, *rest)

    def received(self, x: torch.Tensor, *, to_heads: bool) -> torch.Tensor:
        """Allocate the result of exchanging ``x``."""
        shape = list(x.shape)
        grows, shrinks = (self.seq_dim, self.head_dim) if to_heads else (self.head_dim, self.seq_dim)
        shape[grows] *= self.size
        shape[shrinks] //= self.size
        return x.new_empty(shape)

    def pairs(self, x: torch.Tensor, pieces: torch.Tensor, *, many_heads: bool) -> Iterator[Pair]:
        """Pair the parts of ``x`` and of the pieces that hold the same elements.

        Args:
            x: a tensor with all heads and a part of the sequence, or the other way round.
            pieces: [rank, heads, sequence, ...].
            many_heads: ``x`` is the former.
        """
        view = x.movedim((self.head_dim, self.seq_dim), (0, 1))
        if many_heads:
            yield view.unflatten(0, (self.size, -1)), pieces
        elif not self.load_balance:
            yield view.unflatten(1, (self.size, -1)).movedim(1, 0), pieces
        else:
            halves, ends = view.unflatten(1, (2, self.size, -1)), pieces.unflatten(2, (2, -1))
            yield halves[:, 0].movedim(1, 0), ends[:, :, 0]
            for rank in range(self.size):
                yield halves[:, 1, self.size - 1 - rank], ends[rank, :, 1]

    def pack(self, x: torch.Tensor, into: torch.Tensor, *, to_heads: bool) -> None:
        """Write the pieces to send of ``x``."""
        for part, piece in self.pairs(x, into, many_heads=to_heads):
            piece.copy_(part)

    def unpack(self, pieces: torch.Tensor, into: torch.Tensor, *, to_heads: bool) -> torch.Tensor:
        """Write the received pieces into the result, and return it."""
        for part, piece in self.pairs(into, pieces, many_heads=not to_heads):
            part.copy_(piece)
        return into


def _run(plan: Exchange, to_heads: bool, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    shapes = [plan.pieces(x, to_heads=to_heads) for x in tensors]
    widths = [prod(shape[1:]) for shape in shapes]
    sent = tensors[0].new_empty(plan.size, sum(widths))
    for x, shape, row in zip(tensors, shapes, sent.split(widths, 1), strict=True):
        plan.pack(x, row.unflatten(1, shape[1:]), to_heads=to_heads)
    received = torch.empty_like(sent)
    get_platform().collectives.all_to_all(received, sent, group=plan.group)
    return tuple(
        plan.unpack(row.unflatten(1, shape[1:]), plan.received(x, to_heads=to_heads), to_heads=to_heads)
        for x, shape, row in zip(tensors, shapes, received.split(widths, 1), strict=True)
    )


class _Exchange(torch.autograd.Function):
    """One all-to-all forward, one backward, whatever the number of tensors."""

    @staticmethod
    def forward(ctx: Any, plan: Exchange, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.to_heads = plan, to_heads
        return _run(plan, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *_Exchange.apply(ctx.plan, not ctx.to_heads, *grads)


def exchange(plan: Exchange, *tensors: torch.Tensor, to_heads: bool) -> tuple[torch.Tensor, ...]:
    """Exchange all tensors at once; differentiable.

    Args:
        plan: between which ranks, on which dims.
        tensors: of one dtype; their heads (``to_heads``) or their sequence divide over the ranks.
        to_heads: from a piece of the sequence to a part of the heads; else back.
    """
    return _Exchange.apply(plan, to_heads, *tensors)


@dataclass
class Transfer:
    """One tensor on its way to a part of its heads, forward, or its gradient on the way back.

    Two autograd nodes, made at the two ends: the later one's backward starts the gradient's exchange, the earlier
    one's, which autograd runs after all nodes between, waits for it. What flows between the two is a buffer that is
    being written.

    Attributes:
        plan: between which ranks, on which dims.
        pieces: the received pieces.
        under_way: the exchange, until it has been waited for.
        sent: the tensor that is sent.
    """

    plan: Exchange
    pieces: torch.Tensor | None = None
    under_way: Any = None
    sent: torch.Tensor | None = None

    def start(self, x: torch.Tensor) -> None:
        """Send a tensor."""
        self.pieces = _Start.apply(self, x)

    def finish(self) -> torch.Tensor:
        """Wait for the exchanged tensor and return it."""
        pieces, self.pieces = self.pieces, None  # its node holds this
        return _Finish.apply(self, pieces)

    def _send(self, sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        all_to_all = get_platform().collectives.all_to_all
        self.sent, self.under_way = sent, all_to_all(received, sent, group=self.plan.group, async_op=True)
        return received

    def _wait(self) -> None:
        if self.under_way is not None:
            self.under_way.wait()
        self.sent = self.under_way = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, x: torch.Tensor) -> torch.Tensor:
        ctx.transfer, ctx.shape = transfer, x.shape
        sent = x.new_empty(transfer.plan.pieces(x, to_heads=True))
        transfer.plan.pack(x, sent, to_heads=True)
        return transfer._send(sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pieces: torch.Tensor) -> Any:
        ctx.transfer._wait()
        into = pieces.new_empty(ctx.shape)
        return None, ctx.transfer.plan.unpack(pieces, into, to_heads=False)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, pieces: torch.Tensor) -> torch.Tensor:
        ctx.transfer = transfer
        transfer._wait()
        _, heads, length, *rest = pieces.shape
        plan = transfer.plan
        shape = [heads, plan.size * length, *rest]
        result = pieces.new_empty(shape).movedim((0, 1), (plan.head_dim, plan.seq_dim))
        return plan.unpack(pieces, result, to_heads=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        plan = ctx.transfer.plan
        sent = grad.new_empty(plan.pieces(grad, to_heads=False))
        plan.pack(grad, sent, to_heads=False)
        return None, ctx.transfer._send(sent)
