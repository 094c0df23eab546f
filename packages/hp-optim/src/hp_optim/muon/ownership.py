"""Ownership: the rank that orthogonalizes each matrix, and what ranks send each other for it, from shapes and layouts.

Note [Owners]
    Each matrix is computed by one rank, its *owner*: an all-to-all brings it the pieces, another one takes the result
    to every rank that has a part. So a step has two collectives, however many matrices and whatever their layouts.
    The heaviest matrices are assigned first. The owner is the rank that has the most of the matrix, because what
    stays costs nothing, among those whose work stays within `SLACK` of the mean or of the least; the least loaded
    where there is none. Replicas have the same pieces, so they share the work. The result does not depend on the
    owner. Only the ranks of its mesh know of a parameter (those of another pipeline stage, or of another slice of
    the mesh, don't), so the work is balanced among the parameters whose meshes have the same ranks.

Note [Relays]
    That a gradient is missing, or not finite, on one rank concerns all of them. If each told each, there would be a
    message between any two of them, where ragged shards need a few. So ranks are numbered row by row in a square: in
    the first exchange each tells those of its row, in the second one each tells its column what its row knows. Of a
    last row that is shorter, members stand in for the columns that it lacks.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt, prod
from typing import Any

import numpy as np

from hp_dtensor import DeviceMesh, Placement
from hp_dtensor.extend import axis_within, in_one_root
from hp_optim.muon.pieces import Part, Region, joined, paired, parts_of
from hp_optim.muon.rules import Matrix, Orthogonalization
from hp_platform.extend import own_rank

SLACK = 0.02
"""How much more than it must a rank may have to do to keep matrices where they are, as a part of the mean work."""

Located = tuple[tuple[int, Region], ...]
"""Numbers of tensors, and regions of them."""


@dataclass(frozen=True)
class Placed:
    """A parameter as the plan sees it.

    Attributes:
        name: for errors.
        shape: the global shape.
        matrices: of which it is made.
        ranks: the ranks of its mesh, row-major; this rank alone where it is no DTensor.
        mesh_shape: ranks on each axis.
        placements: one for each axis, none of them partial.
        settings: what must be equal for matrices to be computed together, beside their shape.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    settings: Hashable = None

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What the ranks of the mesh have of it."""
        return parts_of(self.shape, self.placements, self.mesh_shape, self.matrices)

    def line(self, dtype: str) -> str:
        """Describe what must be the same on all ranks.

        Args:
            dtype: of the parameter.
        """
        digest = hashlib.sha256(f"{dtype} {self.matrices} {self.settings}".encode()).hexdigest()[:12]
        return f"{self.name!r} of shape {self.shape}, placed {self.placements} on {self.mesh_shape}, settings {digest}"


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that a rank orthogonalizes together.

    Attributes:
        rows: of each.
        columns: of each.
        settings: see `Placed`.
        members: number of the parameter, and of the matrix in it.
    """

    rows: int
    columns: int
    settings: Hashable
    members: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        return self.rows * self.columns * len(self.members)


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a plan. Places are those of `OwnerPlan.world`; see Note [Streams] in `hp_optim.muon.pieces`.

    Attributes:
        batches: what this rank orthogonalizes.
        sent: what it sends, in regions of its local tensors, for one place after the other.
        send_sizes: how many elements for each place.
        received: where it puts what arrives, in regions of the batches.
        receive_sizes: how many elements from each place.
        kept: of what it both has and orthogonalizes, a parameter, a region of its local tensor, a batch, and the region
            of it with the same elements.
        results_sent: the way back, in regions of the batches.
        results_send_sizes: how many elements for each place.
        results_received: in regions of local tensors.
        results_receive_sizes: how many elements from each place.
    """

    batches: tuple[Batch, ...]
    sent: Located
    send_sizes: tuple[int, ...]
    received: Located
    receive_sizes: tuple[int, ...]
    kept: tuple[tuple[int, Region, int, Region], ...]
    results_sent: Located
    results_send_sizes: tuple[int, ...]
    results_received: Located
    results_receive_sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class OwnerPlan:
    """Owners of all matrices, and each rank's part of the exchange.

    Attributes:
        parameters: in the optimizer's order.
        world: the ranks that take part, ascending.
        owners: for each parameter the owner of each of its matrices.
        loads: for each set of ranks that share parameters the work of each of them, in multiplications.
    """

    parameters: tuple[Placed, ...]
    world: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    loads: dict[frozenset[int], dict[int, int]]
    _exchanges: dict[int, Exchange] = field(default_factory=dict, repr=False)

    @property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean, among the ranks of a mesh; the largest of all meshes."""
        return max(
            (max(load.values()) * len(load) / max(sum(load.values()), 1) for load in self.loads.values()), default=1.0
        )

    def sent_elements(self) -> int:
        """Return how many elements all ranks send on the way to the owners."""
        return sum(
            piece.elements
            for placed, owners in zip(self.parameters, self.owners)
            for part in placed.parts
            for number, pieces in part.pieces
            if _source(part, placed, owners[number]) != owners[number]
            for piece in pieces
        )

    def exchange(self, rank: int) -> Exchange:
        """Return a rank's part."""
        if rank not in self._exchanges:
            self._exchanges[rank] = _exchange(self, rank)
        return self._exchanges[rank]


def assign(parameters: Sequence[Placed], world: Sequence[int]) -> OwnerPlan:
    """Choose an owner for each matrix; see Note [Owners].

    Args:
        parameters: in the optimizer's order, the same on all ranks.
        world: the ranks that take part in the exchange, ascending; those of the meshes are among them.
    """
    owners = [[-1] * len(placed.matrices) for placed in parameters]
    sharing: dict[frozenset[int], list[int]] = {}
    for number, placed in enumerate(parameters):
        sharing.setdefault(frozenset(placed.ranks), []).append(number)
    loads = {ranks: _balance(parameters, numbers, sorted(ranks), owners) for ranks, numbers in sharing.items()}
    return OwnerPlan(tuple(parameters), tuple(world), tuple(map(tuple, owners)), loads)


def _balance(
    parameters: Sequence[Placed], numbers: Sequence[int], ranks: Sequence[int], owners: list[list[int]]
) -> dict[int, int]:
    """Choose the owners of some parameters' matrices among the ranks that share them; return the ranks' work."""
    loads = dict.fromkeys(ranks, 0)
    heap = [(0, rank) for rank in ranks]
    holders = {number: _holders(parameters[number]) for number in numbers}
    heaviest_first = sorted(
        (-_work(matrix.rows, matrix.columns), number, at)
        for number in numbers
        for at, matrix in enumerate(parameters[number].matrices)
    )
    mean = -sum(negative for negative, _, _ in heaviest_first) / len(ranks)
    for negative, number, at in heaviest_first:
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heappop(heap)
        most = max(mean, heap[0][0] - negative) + SLACK * mean
        within = [each for each in holders[number][at].items() if loads[each[0]] - negative <= most]
        owner = min(within, key=lambda each: (-each[1], loads[each[0]], each[0]), default=(heap[0][1], 0))[0]
        owners[number][at] = owner
        loads[owner] -= negative
        heapq.heappush(heap, (loads[owner], owner))
    return loads


def _work(rows: int, columns: int) -> int:
    """Return about how many multiplications an iteration takes."""
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)


def _holders(placed: Placed) -> list[dict[int, int]]:
    """List for each matrix how many of its elements the ranks have that have any."""
    counts: list[dict[int, int]] = [{} for _ in placed.matrices]
    for part in placed.parts:
        for number, pieces in part.pieces:
            elements = sum(piece.elements for piece in pieces)
            counts[number].update((placed.ranks[place], elements) for place in part.places)
    return counts


def _source(part: Part, placed: Placed, owner: int) -> int:
    """Choose which of the ranks that have a part alike sends it: the owner itself, or the one nearest to it."""
    ranks = [placed.ranks[place] for place in part.places]
    return min(ranks, key=lambda rank: (abs(rank - owner), rank))


def _exchange(plan: OwnerPlan, me: int) -> Exchange:
    """List what one rank sends, receives and keeps."""
    keys: dict[tuple[int, int, Hashable], list[tuple[int, int]]] = {}
    for number, (placed, owners) in enumerate(zip(plan.parameters, plan.owners)):
        for at, (matrix, owner) in enumerate(zip(placed.matrices, owners)):
            if owner == me:
                keys.setdefault((matrix.rows, matrix.columns, placed.settings), []).append((number, at))
    batches = tuple(Batch(*key, tuple(members)) for key, members in keys.items())
    slots = {
        member: (number, slot * batch.rows * batch.columns)
        for number, batch in enumerate(batches)
        for slot, member in enumerate(batch.members)
    }
    out, into, back, home = _Stream(plan.world), _Stream(plan.world), _Stream(plan.world), _Stream(plan.world)
    kept: tuple[list[tuple[int, Region]], list[tuple[int, Region]]] = [], []
    for number, (placed, owners) in enumerate(zip(plan.parameters, plan.owners)):
        mine = next((part for part in placed.parts if me in _ranks(placed, part)), None)
        if mine is None and me not in owners:
            continue
        for part in placed.parts:
            for at, pieces in part.pieces:
                owner = owners[at]
                if owner != me and part is not mine:
                    continue
                source = _source(part, placed, owner)
                for piece in pieces:
                    if owner == me:
                        batch, start = slots[number, at]
                        inside = _shifted(piece.matrix, start)
                        if source == me:
                            kept[0].append((number, piece.local))
                            kept[1].append((batch, inside))
                        else:
                            into.add(source, batch, inside)
                        for rank in _ranks(placed, part):
                            if rank != me:
                                back.add(rank, batch, inside)
                    else:
                        if source == me:
                            out.add(owner, number, piece.local)
                        home.add(owner, number, piece.local)
    return Exchange(
        batches,
        *out.listed(),
        *into.listed(),
        paired(joined(kept[0]), joined(kept[1])),
        *back.listed(),
        *home.listed(),
    )


class _Stream:
    """Messages to, or from, each rank."""

    def __init__(self, world: Sequence[int]) -> None:
        self.world = world
        self.messages: dict[int, list[tuple[int, Region]]] = {}

    def add(self, rank: int, number: int, region: Region) -> None:
        """Append a region to the message of a rank."""
        self.messages.setdefault(rank, []).append((number, region))

    def listed(self) -> tuple[Located, tuple[int, ...]]:
        """Return the regions for one place after the other, and the number of elements for each."""
        regions = tuple(region for rank in self.world for region in joined(self.messages.get(rank, ())))
        sizes = tuple(sum(region.elements for _, region in self.messages.get(rank, ())) for rank in self.world)
        return regions, sizes


def _ranks(placed: Placed, part: Part) -> list[int]:
    return [placed.ranks[place] for place in part.places]


def _shifted(region: Region, by: int) -> Region:
    """Return a region of a matrix as one of the batch that has the matrix at an offset."""
    return Region(region.start + by, region.length, None, region.block, region.offsets, region.sizes)


@dataclass(frozen=True)
class Relays:
    """To which places a rank sends what it knows, and from which it hears.

    Attributes:
        first_to: for each place, whether this rank sends to it in the first exchange.
        first_from: the same of what arrives.
        second_to: of the second exchange.
        second_from: the same of what arrives.
    """

    first_to: tuple[bool, ...]
    first_from: tuple[bool, ...]
    second_to: tuple[bool, ...]
    second_from: tuple[bool, ...]

    @staticmethod
    def of(place: int, places: int) -> Relays:
        """Return those of a place among so many; see Note [Relays]."""
        width = isqrt(places - 1) + 1

        def speaks(source: int, target: int) -> bool:
            row, column = divmod(source, width)
            return source != target and target % width % min(width, places - row * width) == column

        row = tuple(other // width == place // width and other != place for other in range(places))
        return Relays(
            row,
            row,
            tuple(speaks(place, other) for other in range(places)),
            tuple(speaks(other, place) for other in range(places)),
        )


def placed_as(
    name: str, shape: Sequence[int], spec: Any, matrices: tuple[Matrix, ...], settings: Orthogonalization
) -> Placed:
    """Describe a parameter to the planner.

    Args:
        name: for errors.
        shape: of a plain parameter; that of a DTensor is its spec's.
        spec: of a DTensor; None for a plain parameter.
        matrices: of which it is made.
        settings: of its orthogonalization.

    Raises:
        ValueError: a partial parameter.
    """
    if spec is None:
        return Placed(name, tuple(shape), matrices, (own_rank(),), (), (), settings)
    if spec.partial:
        raise ValueError(f"Muon: parameter {name!r} is placed {spec.placements}: reduce it before it is trained")
    ranks = tuple(spec.mesh.ranks.reshape(-1).tolist())
    return Placed(name, tuple(spec.shape), matrices, ranks, tuple(spec.mesh.shape), spec.placements, settings)


def owner_plan(placed: Sequence[Placed], meshes: set[DeviceMesh]) -> OwnerPlan:
    """Choose the owners of parameters' matrices.

    Args:
        placed: see `placed_as`.
        meshes: of these parameters.

    Raises:
        ValueError: the meshes are parts of different meshes.
    """
    return assign(placed, world_of(meshes) or [own_rank()])


def world_of(meshes: set[DeviceMesh]) -> list[int]:
    """List the ranks of all meshes, alike on all of them: of the smallest mesh that has them all.

    Args:
        meshes: of an optimizer's parameters.

    Raises:
        ValueError: none of them has all ranks, and they are not slices, by name, of one mesh.
    """
    sets = {mesh: frozenset(mesh.ranks.reshape(-1).tolist()) for mesh in meshes}
    for ranks in sets.values():
        if all(other <= ranks for other in sets.values()):
            return sorted(ranks)
    return sorted(_around(meshes).ranks.reshape(-1).tolist()) if meshes else []


def _around(meshes: set[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of all meshes; of axes that others were made of, the larger ones."""
    ordered = sorted(meshes, key=lambda mesh: (-mesh.ndim, mesh.mesh_dim_names or ()))
    slices = in_one_root(ordered)
    if slices is None or any(mesh.mesh_dim_names is None for mesh in slices):
        other = next((mesh for mesh in ordered if in_one_root([ordered[0], mesh]) is None), ordered[-1])
        raise ValueError(
            f"Muon: parameters are on {other} and on {ordered[0]}; one of them must have all ranks, or both must be"
            " slices, by name, of one mesh"
        )
    axes = [mesh[name] for mesh in slices for name in mesh.mesh_dim_names or ()]
    chosen: list[DeviceMesh] = []
    for axis in sorted(axes, key=lambda axis: -axis.size()):
        if not axis_within(axis._axes[0], [one._axes[0] for one in chosen]):
            chosen.append(axis)
    return DeviceMesh._concatenate(chosen)


@dataclass(frozen=True)
class Gathers:
    """Which elements follow one another, as indices; all tensors are flattened and concatenated.

    Attributes:
        sent: what a rank sends, of its local tensors.
        batches: the matrices that it computes, of its local tensors and, behind them, what arrived.
        results_sent: what it sends back, of its results.
        locals: its part of all results, of its own results and, behind them, what arrived.
    """

    sent: np.ndarray
    batches: np.ndarray
    results_sent: np.ndarray
    locals: np.ndarray


def gathers_of(exchange: Exchange, shapes: Sequence[tuple[int, ...]]) -> Gathers:
    """Write an exchange out.

    Args:
        exchange: a rank's.
        shapes: of its local tensors.
    """
    own = _numbered([tuple(shape) for shape in shapes])
    matrices = _numbered([(batch.elements,) for batch in exchange.batches])
    elements, computed = sum(map(np.size, own)), sum(map(np.size, matrices))
    batches = np.full(computed, -1, dtype=np.int64)
    parts = np.full(elements, -1, dtype=np.int64)
    for number, region, batch, inside in exchange.kept:
        here, there = view(own[number], region).reshape(-1), view(matrices[batch], inside).reshape(-1)
        batches[there], parts[here] = here, there
    _number(batches, matrices, exchange.received, elements)
    _number(parts, own, exchange.results_received, computed)
    # Elements of no matrix, as of an empty one, get any value.
    return Gathers(
        _listed(own, exchange.sent),
        np.maximum(batches, 0),
        _listed(matrices, exchange.results_sent),
        np.maximum(parts, 0),
    )


def view(tensor: np.ndarray, region: Region) -> np.ndarray:
    """Return a region of a contiguous array, a view: of one dim, or a box."""
    tensor = tensor.reshape(-1) if region.dim is None else tensor
    dim = region.dim or 0
    tensor = tensor[(slice(None),) * dim + (slice(region.start, region.start + region.length),)]
    if region.block is None:
        return tensor
    tensor = tensor.reshape(*tensor.shape[:dim], *region.block, *tensor.shape[dim + 1 :])
    return tensor[tuple(slice(at, at + size) for at, size in zip(region.offsets, region.sizes))]


def _numbered(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the places of elements in the concatenation of tensors, in these shapes."""
    made, start = [], 0
    for shape in shapes:
        made.append(np.arange(start, start + prod(shape)).reshape(shape))
        start += prod(shape)
    return made


def _listed(tensors: Sequence[np.ndarray], regions: Sequence[tuple[int, Region]]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(view(tensors[n], region).reshape(-1) for n, region in regions)])


def _number(
    places: np.ndarray, tensors: Sequence[np.ndarray], regions: Sequence[tuple[int, Region]], start: int
) -> None:
    """Note where a stream's elements, numbered from ``start`` on, belong."""
    for number, region in regions:
        there = view(tensors[number], region).reshape(-1)
        places[there] = np.arange(start, start + there.size)
        start += there.size
