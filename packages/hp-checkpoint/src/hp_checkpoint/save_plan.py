"""The plan of a save: files, headers, and the pieces that each rank writes, agreed by all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_checkpoint.files import LIMIT, File, Kind, lay_out
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.state import Address, State, merge
from hp_checkpoint.tensors import holding_of, kind_of
from hp_checkpoint.writers import Holding, Tensor, shards_of, writers
from hp_dtensor import Placement, RaggedShard, Replicate, Shard, StridedShard

__all__ = ["SavePlan", "plan_save"]


@dataclass(frozen=True)
class SavePlan:
    """The same on all ranks.

    Attributes:
        files: of all parts, by part.
        writers: ranks that write their shard of a tensor, by its address.
        tree: of the state's JSON values, of all ranks.
        aliases: other addresses of tensors.
    """

    files: Mapping[str, Sequence[File]]
    writers: Mapping[Address, frozenset[int]]
    tree: Any
    aliases: Mapping[Address, Address]


@dataclass
class _Union:
    """The tensors of all ranks: what each has described, joined."""

    kinds: dict[Address, Kind] = field(default_factory=dict)
    complete: dict[Address, list[int]] = field(default_factory=dict)
    placed: dict[Address, dict[Holding, list[int]]] = field(default_factory=dict)
    aliases: dict[Address, Address] = field(default_factory=dict)


def plan_save(state: State, target: str, step: int | None, ranks: Ranks, *, limit: int = LIMIT) -> SavePlan:
    """Plan a save; all ranks call it together and get the same plan.

    Ranks may have different tensors, as the stages of a pipeline do, and different JSON values under different keys.

    Args:
        state: of this rank.
        target: the checkpoint's folder, which has to be the same on all ranks.
        step: of the training; the same on all ranks.
        ranks: who saves.
        limit: bytes of a file, unless one tensor alone has more; the same on all ranks.

    Raises:
        CheckpointError: ranks disagree, or one has a tensor that can't be saved.
    """
    meshes: list[tuple[int, ...]] = []

    def describe() -> bytes:
        tensors = []
        for (part, name), value in state.tensors.items():
            kind, holding = kind_of(name, value), holding_of(name, value, ranks.rank, ranks.size)
            placed = None
            if holding.mesh_shape:
                if holding.ranks not in meshes:
                    meshes.append(holding.ranks)
                mesh = meshes.index(holding.ranks)
                placed = [mesh, list(holding.mesh_shape), [_packed(each) for each in holding.placements]]
            tensors.append([part, name, kind.dtype, list(kind.shape), placed])
        aliases = [[*one, *other] for one, other in state.aliases.items()]
        described = {
            "target": target,
            "step": step,
            "limit": limit,
            "tensors": tensors,
            "aliases": aliases,
            "tree": state.tree,
        }
        return json.dumps(described, ensure_ascii=False).encode()

    described = ranks.agree(describe, "save")
    everyones_meshes = ranks.agree(lambda: json.dumps(meshes).encode(), "save")
    plan: list[SavePlan] = []

    def join() -> bytes:
        plan.append(_joined(described, everyones_meshes, ranks.size))
        return b""

    ranks.agree(join, "save")
    return plan[0]


def _joined(described: Sequence[bytes], meshes: Sequence[bytes], world_size: int) -> SavePlan:
    texts = {text: json.loads(text) for text in dict.fromkeys(described) if text}  # a rank that is lost says nothing
    trees = list(texts.values())
    for key in ("target", "step", "limit"):
        if len({json.dumps(tree[key]) for tree in trees}) > 1:
            values = [f"rank {rank}: {texts[text][key]!r}" for rank, text in enumerate(described) if text]
            raise ValueError(f"save: the ranks save different {key}s: {', '.join(values[:8])}; all save one checkpoint")
    union = _Union()
    for group in dict.fromkeys(zip(described, meshes, strict=True)):
        members = [rank for rank, own in enumerate(zip(described, meshes, strict=True)) if own == group]
        if not group[0]:
            continue
        _add(union, texts[group[0]], json.loads(group[1]), members)
    tensors: dict[Address, Tensor] = {}
    for address, kind in union.kinds.items():
        placed = union.placed.get(address, {})
        if not placed:
            own = union.complete[address]
            complete = Holding(tuple(own), (len(own),), (Replicate(),))
            tensors[address] = Tensor(kind.shape, kind.itemsize, (complete,))
        elif all(len(members) == len(holding.ranks) for holding, members in placed.items()):
            tensors[address] = Tensor(kind.shape, kind.itemsize, tuple(placed))
        else:
            shards = shards_of(kind.shape, placed, address[1])
            tensors[address] = Tensor(kind.shape, kind.itemsize, shards=shards)
    parts: dict[str, dict[str, Kind]] = {}
    for (part, name), kind in union.kinds.items():
        parts.setdefault(part, {})[name] = kind
    files = {part: lay_out(part, kinds, limit=trees[0]["limit"]) for part, kinds in sorted(parts.items())}
    order = {address: tensors[address] for address in sorted(tensors)}
    chosen = writers(order, world_size)
    return SavePlan(files, chosen, merge([tree["tree"] for tree in trees]), union.aliases)


def _add(union: _Union, tree: Mapping[str, Any], meshes: Sequence[Sequence[int]], members: Sequence[int]) -> None:
    for part, name, dtype, shape, placed in tree["tensors"]:
        address, kind = (part, name), Kind(dtype, tuple(shape))
        known = union.kinds.setdefault(address, kind)
        if known != kind:
            raise ValueError(
                f"save: {name!r} is {known.dtype} of shape {list(known.shape)} on one rank, and {dtype} of shape"
                f" {shape} on rank {members[0]}"
            )
        if placed is None:
            union.complete.setdefault(address, []).extend(members)
        else:
            mesh, mesh_shape, placements = placed
            holding = Holding(tuple(meshes[mesh]), tuple(mesh_shape), tuple(_unpacked(each) for each in placements))
            union.placed.setdefault(address, {}).setdefault(holding, []).extend(members)
    for part, name, of_part, of_name in tree["aliases"]:
        union.aliases[part, name] = (of_part, of_name)


def _packed(placement: Placement) -> list[Any]:
    if isinstance(placement, Shard):
        return ["Shard", placement.dim]
    if isinstance(placement, StridedShard):
        return ["StridedShard", placement.dim, placement.split_factor]
    if isinstance(placement, RaggedShard):
        return ["RaggedShard", list(placement.dims), list(placement.units), list(placement.owners)]
    return ["Replicate"]


def _unpacked(packed: Sequence[Any]) -> Placement:
    kind, *arguments = packed
    if kind == "RaggedShard":
        return RaggedShard(*map(tuple, arguments))
    return {"Shard": Shard, "StridedShard": StridedShard, "Replicate": Replicate}[kind](*arguments)
