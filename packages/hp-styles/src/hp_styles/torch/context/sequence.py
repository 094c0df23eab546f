"""Cutting a sequence over the ranks of a context axis, and putting it together again."""

from __future__ import annotations

import torch

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard
from hp_styles.context_plan import chunk_order, chunks_of, divided

__all__ = ["CUT", "shard", "unshard"]

CUT = "_context_parallel_cut"
"""The attribute of a part that says how it was cut: the mesh and ``load_balance``."""


def shard(whole: torch.Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole."""
    size, dim = mesh.size(), seq_dim % whole.dim()
    divided(whole.shape[dim], size, load_balance, whole.shape, dim)
    order = chunks_of(mesh.get_local_rank(), size, load_balance)
    chunks = whole.chunk(2 * size if load_balance else size, dim)
    part = torch.cat([chunks[chunk] for chunk in order], dim)
    setattr(part, CUT, (mesh, load_balance))
    return part


def unshard(local: torch.Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> torch.Tensor:
    """The whole tensor, in the sequence's own order."""
    size, dim = mesh.size(), seq_dim % local.dim()
    made = DTensor.from_local(local, mesh, [Shard(dim)]).redistribute(placements=[Replicate()]).to_local()
    if not load_balance:
        return made
    chunks, order = made.chunk(2 * size, dim), chunk_order(size, load_balance)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(2 * size)], dim)
