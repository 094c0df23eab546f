"""Weights and optimizer states that several ranks hold, compared by their bits and mended from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hp_dtensor.extend import boxes
from hp_dtensor.torch.extend import DTensor, local_view
from hp_pipeline import PipelinedModel
from hp_pipeline.extend import shared_weights
from hp_plan.checks.sdc.copies import WEIGHT, SharedColumns, Unequal
from hp_plan.torch.training.monitor import sum_of_bits
from hp_platform import collectives, get_platform
from hp_platform.extend import share_bytes

_LEAST = torch.iinfo(torch.int64).min  # of a copy that this rank does not hold, for maxima


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter's part on this rank: its name, what identifies it on all ranks, and the parameter."""

    name: str
    identity: int
    parameter: torch.Tensor


class Replicas:
    """What `[sdc] replicas` compares after a step, on this rank.

    A parameter's part is the boxes of its elements, so whoever holds the same ones has a copy, over whatever axis. The
    padding of uneven shards is no part of them.

    Args:
        model: under the plan.
        optimizer: of its parameters.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._optimizer = optimizer
        shared = shared_weights(model.schedule.stages) if isinstance(model, PipelinedModel) else {}
        named = model.named_parameters()
        self._pieces = [_Piece(name, _identity(name, each, shared.get(id(each))), each) for name, each in named]
        self._copies: SharedColumns | None = None

    def _find_copies(self) -> SharedColumns:
        """Find out who holds what; all ranks call it, when the optimizer has its states."""
        keys = {key for piece in self._pieces for key, _ in self._states(piece)}
        own = "\n".join([" ".join(str(piece.identity) for piece in self._pieces), *sorted(keys)])
        everyone = [each.decode().split("\n") for each in share_bytes(own.encode(), _world())]
        held = [tuple(map(int, first.split())) for first, *_ in everyone]
        states = sorted({key for _, *rest in everyone for key in rest})
        names = {piece.identity: piece.name for piece in self._pieces}
        return SharedColumns(held, (WEIGHT, *states), names, rank=get_platform().groups.rank())

    def _states(self, piece: _Piece) -> Iterator[tuple[str, torch.Tensor]]:
        for key, state in self._optimizer.state.get(piece.parameter, {}).items():
            if isinstance(state, torch.Tensor):
                yield key, state

    def _tensor(self, piece: _Piece, key: str) -> torch.Tensor | None:
        tensor = piece.parameter if key == WEIGHT else self._optimizer.state.get(piece.parameter, {}).get(key)
        return local_view(tensor).detach() if isinstance(tensor, torch.Tensor) else None

    def compare(self) -> list[Unequal]:
        """Compare the copies of this rank with those of others, which call it together; return what differs."""
        if self._copies is None:
            self._copies = self._find_copies()
        copies = self._copies
        if not copies.columns:
            return []
        sums, places = self._sums(copies)
        joint = torch.full((2, len(copies.columns)), _LEAST, dtype=torch.int64, device=sums.device)
        index = torch.tensor(places, device=sums.device)
        joint[0, index], joint[1, index] = sums, ~sums  # the complement has its maximum where the sum has its minimum
        collectives.all_reduce(joint, "max", group=get_platform().groups.new_group(copies.ranks))
        unequal = (joint[0] != ~joint[1]).nonzero().flatten().tolist()
        if not unequal:
            return []
        own = dict(zip(places, sums.tolist(), strict=True))
        record = np.array([[number in own, own.get(number, 0)] for number in unequal], np.int64)
        group = get_platform().groups.new_group(copies.ranks)
        everyone = [np.frombuffer(each, np.int64).reshape(-1, 2) for each in share_bytes(record.tobytes(), group)]
        return [
            Unequal(
                copies.columns[number],
                {rank: int(rows[at, 1]) for rank, rows in zip(copies.ranks, everyone, strict=True) if rows[at, 0]},
            )
            for at, number in enumerate(unequal)
        ]

    def _sums(self, copies: SharedColumns) -> tuple[torch.Tensor, list[int]]:
        """Return the sums of bits of what this rank holds copies of, and the numbers of their columns."""
        sums, places = list[torch.Tensor](), list[int]()
        device = get_platform().devices.current_device()
        with torch.no_grad():
            for piece in self._pieces:
                for key, number in copies.numbers(piece.identity):
                    tensor = self._tensor(piece, key)
                    bits = torch.zeros((), dtype=torch.int64) if tensor is None else sum_of_bits(tensor.contiguous())
                    sums.append(bits.to(device))
                    places.append(number)
        return torch.stack(sums), places

    def mend(self, unequal: Sequence[Unequal]) -> None:
        """Overwrite the copies that few ranks have by that of most; all ranks that compared call it.

        Args:
            unequal: what `compare` returned, each with a majority.
        """
        rank, pieces = get_platform().groups.rank(), {piece.identity: piece for piece in self._pieces}
        for each in unequal:
            if rank not in each.sums or each.column.identity not in pieces:
                continue
            tensor = self._tensor(pieces[each.column.identity], each.column.key)
            assert tensor is not None
            holders = sorted(each.sums)
            plain = tensor.contiguous()
            source = holders.index(next(holder for holder in holders if holder not in each.wrong))
            collectives.broadcast(plain, source, group=get_platform().groups.new_group(holders))
            if rank in each.wrong:
                tensor.copy_(plain)


def _world() -> Any:
    return get_platform().groups.default_group()


def _identity(name: str, parameter: torch.Tensor, weight: Any) -> int:
    """Return a number that parts of parameters have alike where they hold the same elements."""
    spec = parameter._spec if isinstance(parameter, DTensor) else None
    place: Any = tuple(parameter.shape)
    if spec is not None:
        mesh = spec.mesh
        held = boxes(spec.shape, spec.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
        place = [(box.offsets, box.sizes) for box in held]
    what = f"shared {weight}" if weight is not None else name
    return int.from_bytes(blake2b(f"{what} {place}".encode(), digest_size=7).digest(), "little")
