"""Tell whether all ranks exchange the same parameters, asked once before the first exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hp_optim.options import different_parameters
from hp_optim.ownership import OwnerPlan
from hp_platform import collectives, get_platform

__all__ = ["check_alike"]


def check_planned(failure: ValueError | None, world: Sequence[int], device: torch.device) -> None:
    """Raise on all ranks where one can't plan; a small collective.

    Args:
        failure: this rank's.
        world: the ranks that exchange.
        device: where they communicate.

    Raises:
        ValueError: this rank's, or which ranks have one.
    """
    failed = torch.tensor([failure is not None], dtype=torch.int64, device=device)
    everyone = failed.clone()
    if len(world) > 1:
        everyone = torch.empty(len(world), dtype=torch.int64, device=device)
        collectives.all_gather(everyone, failed, group=get_platform().groups.new_group(list(world)))
    if failure is not None:
        raise failure
    ranks = [rank for rank, flag in zip(world, everyone.tolist()) if flag]
    if ranks:
        raise ValueError(f"Muon: ranks {ranks[:8]} can't tell where parameters are; their errors say why")


def check_alike(plan: OwnerPlan, device: torch.device) -> None:
    """Raise on all ranks alike where their parameters differ; two small collectives where they don't.

    Args:
        plan: this rank's.
        device: where ranks communicate.

    Raises:
        ValueError: with the first parameter that differs.
    """
    if len(plan.world) == 1:
        return
    group = get_platform().groups.new_group(plan.world)
    told = [
        f"{each.name!r} of shape {each.shape}, placed {each.placements} on {each.mesh_shape}"
        for each in plan.parameters
    ]
    digests = [_number(f"{text} {each.matrices} {each.settings}") for text, each in zip(told, plan.parameters)]
    world = len(plan.world)
    counts = torch.empty(world, dtype=torch.int64, device=device)
    collectives.all_gather(counts, torch.tensor([len(digests)], device=device), group=group)
    most = int(counts.max())
    own = torch.tensor([*digests, *[-1] * (most - len(digests))], dtype=torch.int64, device=device)
    gathered = torch.empty(world * most, dtype=torch.int64, device=device)
    collectives.all_gather(gathered, own, group=group)
    table = gathered.view(world, most).cpu()
    different = (table != table[:1]).any(0).nonzero().flatten().tolist()
    if not different:
        return
    first = different[0]
    mine = own[first].item()
    others = [rank for rank, number in zip(plan.world, table[:, first].tolist()) if number != mine]
    raise different_parameters("Muon", told[first] if first < len(told) else "no more parameters", others)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
