"""A sequence that is sharded over the ranks of a context axis: the group of ranks, sharding and unsharding."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard
from hp_platform import get_platform
from hp_styles.context.group import ContextRanks
from hp_styles.context.plan import chunk_order, chunks_of, divided

__all__ = ["CUT", "SequenceGroup", "like", "shard", "unshard"]

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

    def gathered(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather the numbers of every rank."""
        mine = torch.tensor(numbers, device=device)
        rows = mine.new_empty(self.size * len(numbers))
        get_platform().collectives.all_gather(rows, mine, group=self.mesh.get_group())
        return rows.view(self.size, -1).tolist()


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
