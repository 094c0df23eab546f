"""The plan of a save: files, headers, the ranks that write each shard, and their pieces, agreed by all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeVar

import numpy as np

from hp_checkpoint.disk.files import LIMIT, File, Kind, lay_out
from hp_checkpoint.disk.manifest import as_json
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import Address, State, merge
from hp_checkpoint.layout.tensors import Holding, Piece, holding_of, kind_of, pieces
from hp_dtensor import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.extend import cut_dim, intervals

Name = TypeVar("Name", bound=Any)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape, size of an element, and where a tensor is.

    Attributes:
        shape: the global shape.
        itemsize: bytes of an element.
        holdings: layouts, each of which covers the tensor and is that of all its ranks. Several are replicas: the same
            tensor on the sub-meshes of several tensor-parallel groups.
        shards: instead of layouts, the different shards, as (number of elements, the ranks that have it).
    """

    shape: tuple[int, ...]
    itemsize: int
    holdings: tuple[Holding, ...] = ()
    shards: tuple[tuple[int, tuple[int, ...]], ...] = ()


def writers(tensors: Mapping[Name, Tensor], world_size: int) -> dict[Name, frozenset[int]]:
    """Choose for each tensor the ranks that write their shard of it, so that each shard is written once.

    Shards without replicas are written where they are. The others go, the largest first, to the rank with the fewest
    bytes among those that have it. It is a pure function: all ranks compute the same.

    Example:
        >>> writers({"w": Tensor((4,), 4, (Holding((0,)), Holding((1,))))}, 2)
        {'w': frozenset({0})}

    Args:
        tensors: by name, or by another key that can be sorted.
        world_size: the number of ranks.
    """
    load = np.zeros(world_size, dtype=np.int64)
    chosen: dict[Name, list[int]] = {}
    replicated: list[tuple[int, Name, np.ndarray]] = []
    for name, tensor in tensors.items():
        if not tensor.holdings:
            chosen[name] = []
            replicated += [(size * tensor.itemsize, name, np.array(ranks)) for size, ranks in tensor.shards]
            continue
        sizes, ranks = _shards(tensor)
        sizes = sizes * tensor.itemsize
        if ranks.shape[1] == 1:
            own = ranks[sizes > 0, 0]
            np.add.at(load, own, sizes[sizes > 0])
            chosen[name] = own.tolist()
        else:
            chosen[name] = []
            replicated += [(int(sizes[shard]), name, ranks[shard]) for shard in np.flatnonzero(sizes)]
    replicated.sort(key=lambda each: (-each[0], each[1]))
    for size, name, ranks in replicated:
        rank = int(ranks[load[ranks].argmin()])
        load[rank] += size
        chosen[name].append(rank)
    return {name: frozenset(ranks) for name, ranks in chosen.items()}


def shards_of(
    shape: tuple[int, ...], members: Mapping[Holding, Iterable[int]], name: str, what: str
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """List a tensor's different shards and the ranks that have each, where each rank knows its own shard only.

    Ranks have different placements where tensor parallelism is uneven: the units of a ``RaggedShard`` divide what a
    rank has. And some ranks lack the tensor, as an optimizer's state of a shard without elements.

    Args:
        shape: the global shape.
        members: the ranks that have the tensor in this layout.
        name: the tensor's.
        what: the action's name, for the error.

    Raises:
        ValueError: the shards don't cover the tensor once.
    """
    ranks: dict[tuple[Piece, ...], list[int]] = {}
    for holding, own in members.items():
        for rank, shard in _pieces_on(own, holding, shape):
            if shard:
                ranks.setdefault(shard, []).append(rank)
    sizes = [sum(piece.size for piece in shard) for shard in ranks]
    if sum(sizes) != prod(shape):
        raise ValueError(
            f"{what}: the ranks' shards of {name!r} have {sum(sizes)} of its {prod(shape)} elements, shape"
            f" {list(shape)}: its layout is not the same on all ranks, or a rank lacks it"
        )
    return tuple((size, tuple(own)) for size, own in zip(sizes, ranks.values(), strict=True))


def shard_sizes(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> np.ndarray:
    """Return the number of elements on each rank of a mesh, as an array of the mesh's shape.

    ``shard_sizes((5, 2), (Shard(0),), (2,)).tolist() == [6, 4]``
    """
    sizes = np.ones(tuple(mesh_shape), dtype=np.int64)
    for dim, size in enumerate(shape):
        axes = [axis for axis, placement in enumerate(placements) if cut_dim(placement) == dim]
        lengths = _lengths(size, tuple((placements[axis], mesh_shape[axis]) for axis in axes))
        sizes *= lengths.reshape([mesh_shape[axis] if axis in axes else 1 for axis in range(len(mesh_shape))])
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            units = np.array(placement.units, dtype=np.int64)
            along = [len(units) if other == axis else 1 for other in range(len(mesh_shape))]
            sizes = sizes * units.reshape(along) // max(int(units.sum()), 1)
    return sizes


@lru_cache(maxsize=4096)
def _lengths(size: int, shards: tuple[tuple[Placement, int], ...]) -> np.ndarray:
    """Return the length of a dim on each rank of the axes that shard it."""
    lengths = [
        sum(
            length
            for _, length in intervals(size, [(each, n, at) for (each, n), at in zip(shards, coordinate, strict=True)])
        )
        for coordinate in product(*(range(n) for _, n in shards))
    ]
    return np.array(lengths, dtype=np.int64)


def _shards(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the different shards, and the ranks that have each, as a row of an array."""
    first = tensor.holdings[0]
    sizes = shard_sizes(tensor.shape, first.placements, first.mesh_shape)
    cut = [axis for axis, placement in enumerate(first.placements) if not placement.is_replicate()]
    kept = [axis for axis in range(len(first.mesh_shape)) if axis not in cut]
    count = prod(first.mesh_shape[axis] for axis in cut)
    by_mesh = [
        np.array(each.ranks).reshape(first.mesh_shape).transpose(cut + kept).reshape(count, -1)
        for each in _alike(tensor.holdings)
    ]
    flat = sizes.transpose(cut + kept).reshape(count, -1)
    return flat[:, 0], np.concatenate(by_mesh, axis=1)


def _alike(holdings: Iterable[Holding]) -> list[Holding]:
    """Return the layouts that differ from the first one in their ranks only."""
    first, *others = holdings
    same = [each for each in others if (each.mesh_shape, each.placements) == (first.mesh_shape, first.placements)]
    return [first, *same]


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


@dataclass(frozen=True)
class Described:
    """What all ranks say of their tensors, the same on all ranks.

    Attributes:
        different: descriptions of tensors and of their meshes, as JSON texts, each once.
        of_ranks: the number of each rank's among them.
    """

    different: tuple[tuple[bytes, bytes], ...]
    of_ranks: tuple[int, ...]


def describe_tensors(state: State, ranks: Ranks, what: str) -> Described:
    """Tell all ranks which tensors this one has, in which layouts; all ranks call it together.

    Args:
        state: of this rank.
        ranks: who takes part.
        what: the action's name, for the error.

    Raises:
        CheckpointError: a rank has a tensor whose dtype or layout is not known.
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

    described = ranks.agree(describe, what)
    of_meshes = ranks.agree(lambda: json.dumps(meshes).encode(), what)
    pairs = list(zip(described, of_meshes, strict=True))
    different = tuple(dict.fromkeys(pairs))
    number = {pair: at for at, pair in enumerate(different)}
    return Described(different, tuple(number[pair] for pair in pairs))


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
    same = {"target": target, "step": step, "metric": as_json(metric), "limit": limit, "layout": layout}
    what = {**same, "tree": state.tree}
    everyones = ranks.agree(lambda: json.dumps(what, ensure_ascii=False).encode(), "save")
    described = describe_tensors(state, ranks, "save")
    # What follows is the same on all ranks, errors as well. A rank that is lost says nothing.
    trees = {text: json.loads(text) for text in dict.fromkeys(everyones) if text}
    for key in same:
        if len({json.dumps(tree[key]) for tree in trees.values()}) > 1:
            values = [f"rank {rank}: {trees[text][key]!r}" for rank, text in enumerate(everyones) if text]
            raise ValueError(f"save: the ranks save different {key}s: {', '.join(values[:8])}; all save one checkpoint")
    files, chosen, aliases = _joined(described, limit)
    return SavePlan(files, chosen, merge([tree["tree"] for tree in trees.values()]), aliases)


@dataclass(frozen=True)
class Source:
    """A tensor, and which ranks give which elements of it, each once.

    Attributes:
        kind: its dtype and global shape.
        pieces: of each rank that gives some; ``local`` counts elements of that rank's local tensor.
    """

    kind: Kind
    pieces: Mapping[int, tuple[Piece, ...]]


def sources(described: Described, what: str) -> dict[Address, Source]:
    """Choose the ranks that give a tensor's elements; a pure function, as `writers` is.

    Args:
        described: by all ranks.
        what: the action's name, for the error.

    Raises:
        ValueError: ranks disagree about a tensor.
    """
    union = _union(described, what)
    chosen = writers(_tensors(union, what), len(described.of_ranks))
    found: dict[Address, Source] = {}
    for address, kind in union.kinds.items():
        own: dict[int, tuple[Piece, ...]] = {}
        for holding, members in union.placed.get(address, {}).items():
            own.update(_pieces_on(chosen[address].intersection(members), holding, kind.shape))
        if not own:
            own = {rank: pieces(kind.shape, (), (), ()) for rank in chosen[address]}
        found[address] = Source(kind, own)
    return found


def _pieces_on(
    ranks: Iterable[int], holding: Holding, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """List ranks of a layout with the pieces that each has of a tensor."""
    position = {rank: number for number, rank in enumerate(holding.ranks)}
    for rank in ranks:
        at = np.unravel_index(position[rank], holding.mesh_shape)
        yield rank, pieces(shape, holding.placements, holding.mesh_shape, tuple(map(int, at)))


@lru_cache(maxsize=4)
def _joined(
    described: Described, limit: int
) -> tuple[Mapping[str, Sequence[File]], Mapping[Address, frozenset[int]], Mapping[Address, Address]]:
    """Return files, writers and aliases of a `SavePlan`; a run saves the same tensors many times.

    Args:
        described: by all ranks.
        limit: bytes of a file.
    """
    union = _union(described, "save")
    tensors = _tensors(union, "save")
    parts: dict[str, dict[str, Kind]] = {}
    for (part, name), kind in union.kinds.items():
        parts.setdefault(part, {})[name] = kind
    files = {part: lay_out(part, kinds, limit=limit) for part, kinds in sorted(parts.items())}
    return files, writers(tensors, len(described.of_ranks)), union.aliases


def _union(described: Described, what: str) -> _Union:
    union = _Union()
    for number, (tensors_text, meshes) in enumerate(described.different):
        if tensors_text:
            members = [rank for rank, own in enumerate(described.of_ranks) if own == number]
            _add(union, json.loads(tensors_text), json.loads(meshes), members, what)
    return union


def _tensors(union: _Union, what: str) -> dict[Address, Tensor]:
    """Return all tensors with their layouts, in the order of their addresses, on which `writers` depends."""
    tensors: dict[Address, Tensor] = {}
    for address, kind in sorted(union.kinds.items(), key=lambda each: each[0]):
        placed = union.placed.get(address, {})
        if not placed:
            own = union.complete[address]
            complete = Holding(tuple(own), (len(own),), (Replicate(),))
            tensors[address] = Tensor(kind.shape, kind.itemsize, (complete,))
        elif all(len(members) == len(holding.ranks) for holding, members in placed.items()):
            tensors[address] = Tensor(kind.shape, kind.itemsize, tuple(placed))
        else:
            shards = shards_of(kind.shape, placed, address[1], what)
            tensors[address] = Tensor(kind.shape, kind.itemsize, shards=shards)
    return tensors


def _add(
    union: _Union, tree: Mapping[str, Any], meshes: Sequence[Sequence[int]], members: Sequence[int], what: str
) -> None:
    for part, name, dtype, shape, placed in tree["tensors"]:
        address, kind = (part, name), Kind(dtype, tuple(shape))
        known = union.kinds.setdefault(address, kind)
        if known != kind:
            raise ValueError(
                f"{what}: {name!r} is {known.dtype} of shape {list(known.shape)} on one rank, and {dtype} of shape"
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
