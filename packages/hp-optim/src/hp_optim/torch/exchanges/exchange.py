"""What `hp_optim.muon.ownership.Exchange` plans, done: pieces to their owners and results back, two collectives.

Note [Heads of messages]
    Messages begin with what their senders know: which parameters have gradients, which of these are not finite, whether
    a rank has another plan by now or can't take the step, and a digest of hyperparameters, each bit of it and its
    opposite: where ranks differ in a bit, both are set in the end. So after both exchanges all ranks know, with no
    further collective, which parameters to leave as they are, or that none may change; see Note [Relays] in
    `metadata_exchange`. A rank that has another plan sends the heads of the old one with nothing behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hp_optim.muon.ownership import OwnerPlan, Relays
from hp_optim.muon.pieces import Region
from hp_platform import collectives, get_platform

_DIGEST = 4
_TOLD = 1 + 16 * _DIGEST
"""Bytes of a head that are not of one parameter."""


@dataclass(frozen=True)
class Flags:
    """What ranks know; see Note [Heads of messages].

    Attributes:
        present: of each parameter, whether any rank has a gradient.
        broken: of each parameter, whether any rank has a gradient that is not finite.
        alarm: a rank can't go on with this plan; of all ranks: or they have different digests.
        digest: of this rank's hyperparameters, 4 bytes.
    """

    present: np.ndarray
    broken: np.ndarray
    alarm: bool = False
    digest: bytes = bytes(_DIGEST)


@dataclass(frozen=True)
class Arrived:
    """What the owners got.

    Attributes:
        batches: the matrices of each batch, ``[matrices, rows, columns]``.
        flags: of the ranks that this one has heard from, a byte for each flag; None where there are no other ranks.
    """

    batches: list[torch.Tensor]
    flags: torch.Tensor | None


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
        self.head = -(-(2 * len(shapes) + _TOLD) // dtype.itemsize)
        there, relays = self.exchange, Relays.of(plan.world.index(rank), len(plan.world))

        def message(regions: Sequence[tuple[int, Region]], sizes: Sequence[int], speaks: Sequence[bool]) -> _Message:
            return _Message(regions, sizes, [self.head if each else 0 for each in speaks], device)

        self.sent = message(there.sent, there.send_sizes, relays.first_to)
        self.received = message(there.received, there.receive_sizes, relays.first_from)
        self.results_sent = message(there.results_sent, there.results_send_sizes, relays.second_to)
        self.results_received = message(there.results_received, there.results_receive_sizes, relays.second_from)
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
        told: torch.Tensor | None = None
        if self.group is not None:
            pieces = [view(tensors[number], region) for number, region in self.exchange.sent]
            arrived, told = self._exchanged(self.sent, self.received, pieces, self._packed(flags))
            for piece, (batch, region) in zip(self.received.pieces(arrived), self.exchange.received):
                _pair(view(batches[batch], region), piece, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        shaped = [
            flat.view(len(batch.members), batch.rows, batch.columns)
            for flat, batch in zip(batches, self.exchange.batches)
        ]
        return Arrived(shaped, told)

    def to_holders(
        self, results: Sequence[torch.Tensor], arrived: Arrived, flags: Flags
    ) -> tuple[dict[int, torch.Tensor], Flags]:
        """Return this rank's part of each parameter's results, by number, and all ranks' flags.

        A collective, if there are other ranks.

        Args:
            results: of each batch, contiguous, in the dtype of the exchange.
            arrived: see `to_owners`.
            flags: of this rank.
        """
        tensors: dict[int, torch.Tensor] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, own, batch, region in self.exchange.kept:
            self._place(tensors, number, own, view(results[batch], region), targets, sources)
        if self.group is not None:
            assert arrived.flags is not None
            parts = [view(results[batch], region) for batch, region in self.exchange.results_sent]
            stream, told = self._exchanged(self.results_sent, self.results_received, parts, arrived.flags)
            flags = self._unpacked(told)
            for piece, (number, region) in zip(self.results_received.pieces(stream), self.exchange.results_received):
                self._place(tensors, number, region, piece, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        return tensors, flags

    def alarm(self, flags: Flags) -> Flags:
        """Take part in both exchanges without tensors, and return all ranks' flags; collectives.

        Args:
            flags: of this rank.
        """
        _, told = self._exchanged(self.sent, self.received, (), self._packed(flags))
        _, told = self._exchanged(self.results_sent, self.results_received, (), told)
        return self._unpacked(told)

    def _exchanged(
        self, out: _Message, into: _Message, pieces: Sequence[torch.Tensor], flags: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send pieces behind heads; return what arrives, and the flags with those of its heads."""
        stream = (torch.empty if pieces else torch.zeros)(out.elements, dtype=self.dtype, device=self.device)
        if pieces:
            torch._foreach_copy_(out.pieces(stream), [piece.reshape(-1) for piece in pieces])
        stream[out.heads] = flags.view(self.dtype).repeat(out.speakers)
        arrived = torch.empty(into.elements, dtype=self.dtype, device=self.device)
        collectives.all_to_all(arrived, stream, into.sizes, out.sizes, group=self.group)
        if into.speakers:
            heads = arrived[into.heads].view(torch.uint8).view(into.speakers, -1)
            flags = torch.cat([heads, flags[None]]).any(0).to(torch.uint8)
        return arrived, flags

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
        count = 2 * len(self.shapes)
        bits = np.unpackbits(np.frombuffer(flags.digest, dtype=np.uint8))
        raw = np.zeros(self.head * self.dtype.itemsize, dtype=np.uint8)
        raw[: count + _TOLD] = np.concatenate([flags.present, flags.broken, [flags.alarm], bits, 1 - bits])
        return torch.from_numpy(raw).to(self.device)

    def _unpacked(self, flags: torch.Tensor) -> Flags:
        raw, count = flags.cpu().numpy().astype(bool), len(self.shapes)
        ones, zeros = raw[2 * count + 1 :][: 16 * _DIGEST].reshape(2, -1)
        return Flags(raw[:count], raw[count : 2 * count], bool(raw[2 * count] or (ones & zeros).any()))


class _Message:
    """Where heads and pieces lie in what is sent to all places, or comes from them."""

    def __init__(
        self, regions: Sequence[tuple[int, Region]], sizes: Sequence[int], heads: Sequence[int], device: torch.device
    ) -> None:
        self.sizes = [head + size for head, size in zip(heads, sizes)]
        self.speakers = sum(map(bool, heads))
        self.elements = sum(self.sizes)
        left = [region.elements for _, region in reversed(regions)]
        self.runs: list[tuple[int, int]] = []
        places: list[torch.Tensor] = []
        at = 0
        for head, size in zip(heads, sizes):
            if head:
                places.append(torch.arange(at, at + head))
            at += head
            while size:
                elements = left.pop()
                self.runs.append((at, elements))
                at += elements
                size -= elements
        self.heads = torch.cat(places).to(device) if places else torch.empty(0, dtype=torch.int64, device=device)

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
