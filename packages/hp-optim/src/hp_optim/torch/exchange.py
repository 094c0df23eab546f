"""What `hp_optim.ownership.Exchange` plans, done: pieces to their owners and results back, two collectives.

Note [Heads of messages]
    Each message begins with bits of its sender: which parameters have gradients on it, and which of these are not
    finite. So all ranks know with no further collective which parameters to leave as they are, or that none may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hp_optim.ownership import OwnerPlan
from hp_optim.pieces import Region
from hp_platform import collectives, get_platform

__all__ = ["Arrived", "Exchanger", "Flags"]


@dataclass(frozen=True)
class Flags:
    """Of each parameter, whether any rank has a gradient, and whether any has one that is not finite.

    Attributes:
        present: booleans.
        broken: booleans.
    """

    present: np.ndarray
    broken: np.ndarray


@dataclass(frozen=True)
class Arrived:
    """What the owners got.

    Attributes:
        batches: the matrices of each batch, ``[matrices, rows, columns]``.
        flags: of all ranks.
    """

    batches: list[torch.Tensor]
    flags: Flags


class Exchanger:
    """One rank's part of a plan, for local tensors of given shapes.

    Args:
        plan: the owners.
        rank: of this process.
        shapes: of the local tensors, one for each parameter.
        dtype: of what is exchanged.
        device: where it is exchanged.
    """

    def __init__(
        self,
        plan: OwnerPlan,
        rank: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.exchange = plan.exchange(rank)
        self.shapes = shapes
        self.dtype, self.device = dtype, device
        self.group = get_platform().groups.new_group(plan.world) if len(plan.world) > 1 else None
        parameters = len(shapes)
        self.head = 0 if self.group is None else -(-2 * -(-parameters // 8) // dtype.itemsize)
        there = self.exchange
        self.sent = _Message(there.sent, there.send_sizes, self.head, device)
        self.received = _Message(there.received, there.receive_sizes, self.head, device)
        self.whole_shapes = {number: (shape, torch.Size(shape).numel()) for number, shape in enumerate(shapes)}

    def to_owners(self, tensors: Mapping[int, torch.Tensor], flags: Flags) -> Arrived:
        """Bring the matrices together; a collective, if there are other ranks.

        Args:
            tensors: this rank's part of each parameter, of those of which it has one; contiguous.
            flags: of this rank.
        """
        batches = [torch.empty(b.elements, dtype=self.dtype, device=self.device) for b in self.exchange.batches]
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, own, batch, region in self.exchange.kept:
            _pair(view(batches[batch], region), view(tensors[number], own), targets, sources)
        if self.group is not None:
            stream = torch.empty(self.sent.elements, dtype=self.dtype, device=self.device)
            pieces = self.sent.pieces(stream)
            if pieces:
                torch._foreach_copy_(
                    pieces, [view(tensors[number], region).reshape(-1) for number, region in self.exchange.sent]
                )
            stream[self.sent.heads] = self._packed(flags).repeat(len(self.plan.world))
            arrived = torch.empty(self.received.elements, dtype=self.dtype, device=self.device)
            collectives.all_to_all(arrived, stream, self.received.sizes, self.sent.sizes, group=self.group)
            flags = self._unpacked(arrived[self.received.heads])
            for piece, (batch, region) in zip(self.received.pieces(arrived), self.exchange.received):
                _pair(view(batches[batch], region), piece, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        shaped = [
            flat.view(len(batch.members), batch.rows, batch.columns)
            for flat, batch in zip(batches, self.exchange.batches)
        ]
        return Arrived(shaped, flags)

    def to_holders(self, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return this rank's part of each parameter's results, by number; a collective, if there are other ranks.

        Args:
            results: of each batch, contiguous, in the dtype of the exchange.
        """
        tensors: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, own, batch, region in self.exchange.kept:
            self._place(tensors, number, own, view(results[batch], region), targets, sources)
        if self.group is not None:
            there = self.exchange
            pieces = [view(results[batch], region).reshape(-1) for batch, region in there.results_sent]
            stream = torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype, device=self.device)
            arrived = torch.empty(sum(there.results_receive_sizes), dtype=self.dtype, device=self.device)
            collectives.all_to_all(
                arrived, stream, there.results_receive_sizes, there.results_send_sizes, group=self.group
            )
            sizes = [region.elements for _, region in there.results_received]
            for piece, (number, region) in zip(arrived.split(sizes) if sizes else (), there.results_received):
                self._place(tensors, number, region, piece, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        return tensors

    def _place(
        self,
        tensors: dict[int, torch.Tensor],
        number: int,
        region: Region,
        piece: torch.Tensor,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:
        """Take a piece as the local tensor where it is all of it; else note to copy it there."""
        shape, elements = self.whole_shapes[number]
        if region.elements == elements:
            tensors[number] = piece.reshape(shape)
            return
        if number not in tensors:
            tensors[number] = torch.empty(shape, dtype=self.dtype, device=self.device)
        _pair(view(tensors[number], region), piece, targets, sources)

    def _packed(self, flags: Flags) -> torch.Tensor:
        """See Note [Heads of messages]."""
        raw = np.zeros(self.head * self.dtype.itemsize, dtype=np.uint8)
        bits = [np.packbits(each) for each in (flags.present, flags.broken)]
        raw[: sum(map(len, bits))] = np.concatenate(bits)
        return torch.from_numpy(raw).view(self.dtype).to(self.device)

    def _unpacked(self, heads: torch.Tensor) -> Flags:
        raw = heads.cpu().view(torch.uint8).numpy().reshape(len(self.plan.world), -1)
        bits = np.bitwise_or.reduce(raw, axis=0)
        count = len(self.shapes)
        size = -(-count // 8)
        present, broken = (np.unpackbits(each, count=count).astype(bool) for each in (bits[:size], bits[size:]))
        return Flags(present, broken)


class _Message:
    """Where heads and pieces lie in what is sent to all places, or comes from them."""

    def __init__(
        self, regions: Sequence[tuple[int, Region]], sizes: Sequence[int], head: int, device: torch.device
    ) -> None:
        self.sizes = [head + size for size in sizes]
        self.elements = sum(self.sizes)
        left = [region.elements for _, region in reversed(regions)]
        self.runs: list[tuple[int, int]] = []
        heads: list[int] = []
        at = 0
        for size in sizes:
            heads.append(at)
            at += head
            while size:
                elements = left.pop()
                self.runs.append((at, elements))
                at += elements
                size -= elements
        starts = torch.tensor(heads, dtype=torch.int64)
        self.heads = (starts[:, None] + torch.arange(head)).reshape(-1).to(device)

    def pieces(self, stream: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces' views of a stream."""
        return [stream.narrow(0, start, elements) for start, elements in self.runs]


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a region of a contiguous tensor, a view: of one dim, or a box."""
    if region.dim is None:
        tensor = tensor.view(-1)
    dim = region.dim or 0
    if region.length != tensor.shape[dim]:
        tensor = tensor.narrow(dim, region.start, region.length)
    if region.block is None:
        return tensor
    tensor = tensor.unflatten(dim, region.block)
    for at, (offset, size) in enumerate(zip(region.offsets, region.sizes)):
        if size != tensor.shape[at]:
            tensor = tensor.narrow(at, offset, size)
    return tensor


def _pair(target: torch.Tensor, source: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Note to copy a region to another; one of them may be flat."""
    if target.dim() > source.dim():
        source = source.view(target.shape)
    elif source.dim() > target.dim():
        target = target.view(source.shape)
    targets.append(target)
    sources.append(source)
