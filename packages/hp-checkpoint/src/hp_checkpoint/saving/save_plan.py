"""The plan of a save: files, headers, and the pieces that each rank writes, agreed by all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hp_checkpoint.disk.files import LIMIT, File, Kind, lay_out
from hp_checkpoint.disk.manifest import as_json
from hp_checkpoint.layout.state import Address, State, merge
from hp_checkpoint.layout.tensors import holding_of, kind_of
from hp_checkpoint.recovery.ranks import Ranks
from hp_checkpoint.saving.shard_assignment import Holding, Tensor, shards_of, writers
from hp_dtensor import Placement, RaggedShard, Replicate, Shard, StridedShard


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


def plan_save(
    state: State,
    target: str,
    step: int | None,
    ranks: Ranks,
    *,
    metric: float | None = None,
    limit: int = LIMIT,
    layout: str = "files",
) -> SavePlan:
    """Plan a save; all ranks call it together and get the same plan.

    Ranks may have different tensors, as the stages of a pipeline do, and different JSON values under different keys.

    Args:
        state: of this rank.
        target: the checkpoint's folder, which has to be the same on all ranks.
        step: of the training; the same on all ranks.
        ranks: who saves.
        metric: of the model; the same on all ranks.
        limit: bytes of a file, unless one tensor alone has more; the same on all ranks.
        layout: of the files; the same on all ranks.

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
        return json.dumps({"tensors": tensors, "aliases": aliases}, ensure_ascii=False).encode()

    same = {"target": target, "step": step, "metric": as_json(metric), "limit": limit, "layout": layout}
    what = {**same, "tree": state.tree}
    everyones = ranks.agree(lambda: json.dumps(what, ensure_ascii=False).encode(), "save")
    described = ranks.agree(describe, "save")
    of_meshes = ranks.agree(lambda: json.dumps(meshes).encode(), "save")
    # What follows is the same on all ranks, errors as well. A rank that is lost says nothing.
    trees = {text: json.loads(text) for text in dict.fromkeys(everyones) if text}
    for key in same:
        if len({json.dumps(tree[key]) for tree in trees.values()}) > 1:
            values = [f"rank {rank}: {trees[text][key]!r}" for rank, text in enumerate(everyones) if text]
            raise ValueError(f"save: the ranks save different {key}s: {', '.join(values[:8])}; all save one checkpoint")
    pairs = list(zip(described, of_meshes, strict=True))
    different = tuple(dict.fromkeys(pairs))
    number = {pair: at for at, pair in enumerate(different)}
    files, chosen, aliases = _joined(different, tuple(number[pair] for pair in pairs), limit)
    return SavePlan(files, chosen, merge([tree["tree"] for tree in trees.values()]), aliases)


@lru_cache(maxsize=4)
def _joined(
    different: tuple[tuple[bytes, bytes], ...], of_ranks: tuple[int, ...], limit: int
) -> tuple[Mapping[str, Sequence[File]], Mapping[Address, frozenset[int]], Mapping[Address, Address]]:
    """Return files, writers and aliases of a `SavePlan`; a run saves the same tensors many times.

    Args:
        different: descriptions of tensors and of their meshes, as JSON texts, each once.
        of_ranks: the number of each rank's among them.
        limit: bytes of a file.
    """
    union = _Union()
    for number, (tensors_text, meshes) in enumerate(different):
        if tensors_text:
            members = [rank for rank, own in enumerate(of_ranks) if own == number]
            _add(union, json.loads(tensors_text), json.loads(meshes), members)
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
    files = {part: lay_out(part, kinds, limit=limit) for part, kinds in sorted(parts.items())}
    order = {address: tensors[address] for address in sorted(tensors)}
    return files, writers(order, len(of_ranks)), union.aliases


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
            inside = set(holding.ranks).intersection(members)  # a rank off the mesh has no part of the tensor
            union.placed.setdefault(address, {}).setdefault(holding, []).extend(sorted(inside))
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
