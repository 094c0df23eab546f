"""Factors: the dims that an operation's operands and results share, and the choice among legal placements.

Every dim of an operand or a result belongs to a *factor* (an index of the operation's loop nest), or to none if it is
broadcast. Sharding a factor shards every dim that carries it; a factor that no result carries is a reduction, and
sharding it leaves the result partial. These are the factors of Shardy's sharding rules.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec, normalize
from hp_dtensor.redistribution.planner import cheapest

Dims = tuple["int | None", ...]
# Placements of the operands, where they vary, placements of the results, and the factor that is sharded.
Candidate = tuple[list[Placement], list[bool], list[Placement], "int | None"]
REPLICATE = Replicate()
LINEAR = frozenset({"sum", "avg"})
"""Reductions that are linear."""


class NoLegalPlacement(ValueError):
    """No combination of placements is legal, e.g. an in-place operation that would have to move its own operand."""


@dataclass(frozen=True, slots=True)
class FactorMap:
    """The factors of one call.

    Attributes:
        operands: for each operand, the factor of each dim; None for a broadcast dim.
        results: likewise for each result.
        reduce: factor -> op that combines partial results when that factor is sharded.
        need_replication: factors that must not be sharded.
        even: factors that may be sharded only into equal shards.
        nonempty: factors that may be sharded only if no rank's shard is empty.
        contiguous: factors that may be sharded only into contiguous ranges: ``Shard``, not ``StridedShard``.
        linear: sets of operands; the operation is linear in each set jointly, so partial sums pass through it.
        passes: reductions that pass through where the operation is ``linear``.
        bias: operands that only one rank adds if the result is a partial sum. The gradient of each is the result's
            gradient on every rank.
        elementwise: results are computed element by element from operands of the result's shape.
        value_independent: the operands' values don't matter (``zeros_like``), so partial operands may stay partial.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduce: Mapping[int, str] = field(default_factory=dict)
    need_replication: frozenset[int] = frozenset()
    even: frozenset[int] = frozenset()
    nonempty: frozenset[int] = frozenset()
    contiguous: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    passes: frozenset[str] = LINEAR
    bias: frozenset[int] = frozenset()
    elementwise: bool = False
    value_independent: bool = False


@dataclass(frozen=True, slots=True)
class Solution:
    """Placements for a call: where each operand must be, where it varies, and where the results are.

    Attributes:
        operands: target placements, by operand and axis.
        vary: by operand and axis, True where a replicated operand meets a result that varies over the axis, so that its
            gradient is partial there.
        results: placements, by result and axis.
    """

    operands: tuple[tuple[Placement, ...], ...]
    vary: tuple[tuple[bool, ...], ...]
    results: tuple[tuple[Placement, ...], ...]


def _shard_factor(dims: Dims, placement: Placement) -> int | None:
    if isinstance(placement, (Shard, StridedShard)) and placement.dim < len(dims):
        return dims[placement.dim]
    return None


def _placed(dims: Dims, factor: int, like: Placement) -> Placement | None:
    """Return ``like`` on the dim that carries ``factor``; None if no dim does."""
    if factor not in dims:
        return None
    dim = dims.index(factor)
    return StridedShard(dim, like.split_factor) if isinstance(like, StridedShard) else Shard(dim)


def solve(
    factors: FactorMap,
    shapes: Sequence[Sequence[int]],
    placements: Sequence[Sequence[Placement]],
    mesh_shape: Sequence[int],
    itemsizes: Sequence[int],
    results: Sequence[Sequence[int]],
    in_place: int | None = None,
) -> Solution:
    """Choose the legal placements that move the fewest bytes.

    On each axis, either a factor is sharded that is sharded there in some operand, or partial values pass through an
    operation that is linear in them, or everything is replicated. At equal cost sharding wins, on the first axis first.

    Args:
        factors: the call's factors.
        shapes: global shape of each operand.
        placements: where each operand is.
        mesh_shape: ranks along each axis.
        itemsizes: bytes an element of each operand.
        results: global shape of each result.
        in_place: index of the operand that is written in place, and so cannot be redistributed.

    Raises:
        NoLegalPlacement: ``in_place`` leaves no legal combination.
    """
    search = _Search(factors, shapes, placements, mesh_shape, results, in_place)
    sources = [tuple(operand) for operand in placements]
    existing = {(operand, tuple(shape)) for operand, shape in zip(sources, shapes, strict=True)}
    solutions: list[Solution] = []
    for choice in search.choices(0, {}):
        solution = Solution(
            *(_by_tensor(choice, part, n) for part, n in ((0, len(shapes)), (1, len(shapes)), (2, len(results))))
        )
        unmoved = not solutions and all(map(operator.eq, solution.operands, sources))
        chosen = [*zip(solution.operands, shapes, strict=True), *zip(solution.results, results, strict=True)]
        # The units of a RaggedShard depend on how other axes shard the tensor, so next to a new Shard they may not
        # fit; an operand's own placements do.
        if not any(_ragged_and_sharded(p) and (p, tuple(shape)) not in existing for p, shape in chosen):
            if unmoved:
                return solution
            solutions.append(solution)
    if not solutions:
        axis = search.stuck
        on_axis = [operand[axis] for operand in placements]
        raise NoLegalPlacement(
            f"the operand that is written in place is {on_axis[in_place or 0]!r} on axis {axis} of mesh"
            f" {tuple(mesh_shape)}, the operands are {on_axis} of shapes {[tuple(s) for s in shapes]}: it would have"
            " to be redistributed first. Use the function that returns its result, or x = x.redistribute(...)"
            " (of a Partial: x = x.reduce_partial()) before it is written"
        )
    return cheapest(solutions, [solution.operands for solution in solutions], sources, shapes, mesh_shape, itemsizes)


def _by_tensor(choice: Sequence[Candidate], part: int, count: int) -> tuple[tuple[Any, ...], ...]:
    """Transpose candidates, one tuple per axis, to one tuple per tensor."""
    return tuple(tuple(candidate[part][i] for candidate in choice) for i in range(count))  # type: ignore[index]


def _ragged_and_sharded(placements: Sequence[Placement]) -> bool:
    kinds = [type(placement) for placement in placements]
    return RaggedShard in kinds and (Shard in kinds or StridedShard in kinds)


@dataclass(slots=True)
class _Search:
    """The legal combinations of candidates, one for each axis."""

    factors: FactorMap
    shapes: Sequence[Sequence[int]]
    placements: Sequence[Sequence[Placement]]
    mesh_shape: Sequence[int]
    results: Sequence[Sequence[int]]
    in_place: int | None
    stuck: int = 0
    """The last axis that had no legal candidate."""

    def choices(self, axis: int, splits: dict[int, int]) -> Iterator[tuple[Candidate, ...]]:
        """Yield a candidate for ``axis`` and each to its right; ``splits`` are the factors' shards on those before."""
        if axis == len(self.mesh_shape):
            yield ()
            return
        ranks, legal = self.mesh_shape[axis], False
        here = [operand[axis] for operand in self.placements]
        for candidate in self._candidates(here, ranks, splits):
            if not self._stays(here, candidate):
                continue
            legal, factor = True, candidate[3]
            inner = splits if factor is None else {**splits, factor: splits.get(factor, 1) * ranks}
            for rest in self.choices(axis + 1, inner):
                yield (candidate, *rest)
        if not legal:
            self.stuck = axis

    def _candidates(self, placements: list[Placement], ranks: int, splits: dict[int, int]) -> Iterator[Candidate]:
        factors, count, outs = self.factors, len(placements), len(self.factors.results)
        yield from _sharded(factors, placements, self.shapes, ranks, splits)
        yield from _partial(factors, placements, self.shapes, self.results, self.in_place is not None)
        if factors.elementwise:
            yield from _ragged(placements, self.shapes, self.results)
        if factors.value_independent and any(p.is_partial() for p in placements):
            yield list(placements), [False] * count, [REPLICATE] * outs, None
        yield [REPLICATE] * count, [False] * count, [REPLICATE] * outs, None

    def _stays(self, placements: list[Placement], candidate: Candidate) -> bool:
        """Tell whether the operand written in place, if any, keeps its placements and its result has them too."""
        want, varies, out, _ = candidate
        i = self.in_place
        return i is None or (want[i] == placements[i] and not varies[i] and all(o == placements[i] for o in out))


def _sharded(
    factors: FactorMap, placements: list[Placement], shapes: Sequence[Sequence[int]], ranks: int, splits: dict[int, int]
) -> Iterator[Candidate]:
    seen: set[tuple[int, Placement | None]] = set()
    for operand, placement in enumerate(placements):
        factor = _shard_factor(factors.operands[operand], placement)
        if factor is None or factor in factors.need_replication:
            continue
        kind = placement if isinstance(placement, StridedShard) else None
        mark = (factor, None if kind is None else StridedShard(0, kind.split_factor))
        if mark in seen:
            continue
        seen.add(mark)
        shards = splits.get(factor, 1) * ranks
        sizes = [
            shape[dims.index(factor)] for dims, shape in zip(factors.operands, shapes, strict=True) if factor in dims
        ]
        if (factor in factors.even or len(set(sizes)) > 1) and any(size % shards for size in sizes):
            continue
        if factor in factors.nonempty and any(math.ceil(size / shards) * (shards - 1) >= size for size in sizes):
            continue
        if kind is not None and factor in factors.contiguous:
            continue
        if kind is not None and (any(size % (kind.split_factor * shards) for size in sizes) or factor in splits):
            continue
        want: list[Placement] = []
        varies: list[bool] = []
        for dims in factors.operands:
            placed = _placed(dims, factor, placement)
            want.append(placed or REPLICATE)
            varies.append(placed is None and not (factor in factors.reduce and len(varies) in factors.bias))
        out: list[Placement] = []
        for dims in factors.results:
            placed = _placed(dims, factor, placement)
            if placed is None:
                if factor not in factors.reduce:
                    break
                placed = Partial(factors.reduce[factor])
            out.append(placed)
        else:
            yield want, varies, out, factor


def _partial(
    factors: FactorMap,
    placements: list[Placement],
    shapes: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    in_place: bool,
) -> Iterator[Candidate]:
    """Yield candidates in which partial operands stay partial.

    A replicated operand next to partial sums or averages becomes partial too if it is smaller than the result, as a
    bias is, or if the result is written in place. Next to one as large as the result, a residual, the sum is reduced:
    what reads it needs it replicated anyway.
    """
    for jointly in factors.linear:
        parts = dict.fromkeys(placements[i] for i in sorted(jointly))
        placement = next((part for part in parts if isinstance(part, Partial)), None)
        if placement is None or placement.op not in factors.passes:
            continue
        others = [i for i in jointly if placements[i] != placement]
        most = math.prod(results[0])
        if any(
            not placements[i].is_replicate()
            or placement.op not in LINEAR
            or not (in_place or math.prod(shapes[i]) < most)
            for i in others
        ):
            continue
        want: list[Placement] = [placement if i in jointly else REPLICATE for i in range(len(placements))]
        yield want, [i not in jointly for i in range(len(placements))], [placement] * len(factors.results), None


def _ragged(
    placements: list[Placement], shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Iterator[Candidate]:
    for placement in dict.fromkeys(p for p in placements if isinstance(p, RaggedShard)):
        same = [tuple(shape) == tuple(results[0]) for shape in shapes]
        if all(fits or tuple(shape) in ((), (1,)) for fits, shape in zip(same, shapes, strict=True)):
            yield (
                [placement if fits else REPLICATE for fits in same],
                [not fits for fits in same],
                [placement] * len(results),
                None,
            )


Pair = tuple[Sequence[Any], Sequence[Any]]


def choose(
    name: str,
    acceptable: Sequence[Pair],
    specs: Sequence[TensorSpec],
    itemsizes: Sequence[int],
    results: Sequence[Sequence[int]],
) -> Solution:
    """Choose the acceptable placements that move the fewest bytes; of equal ones the first.

    As with every rule, a replicated operand whose results are sharded or partial on an axis has a partial gradient
    there.

    Args:
        name: the operation's, for errors.
        acceptable: pairs of placements of the results and of the operands, on one axis; None stands for an argument
            that is no tensor.
        specs: where each operand is.
        itemsizes: bytes an element of each operand.
        results: global shape of each result.

    Raises:
        TypeError: something that is no such pair.
        ValueError: no pair, another number of placements than of operands or results, or a dim out of range.
    """
    mesh = specs[0].mesh
    read = [_pair(name, pair, specs, results) for pair in acceptable]
    if not read:
        raise ValueError(f"{name}: its sharding function accepts nothing; accept at least Replicate() for all")
    choices = [*itertools.product(read, repeat=mesh.ndim)]
    targets_of_choices = [[*zip(*(want for _, want in choice), strict=True)] for choice in choices]
    sources, shapes = [spec.placements for spec in specs], [spec.shape for spec in specs]
    chosen = cheapest(choices, targets_of_choices, sources, shapes, mesh.shape, itemsizes)
    outs = [out for out, _ in chosen]
    targets = [want for _, want in chosen]
    varies = [any(not placement.is_replicate() for placement in out) for out in outs]
    operands = tuple(zip(*targets, strict=True))
    vary = tuple(
        tuple(v and placement.is_replicate() for v, placement in zip(varies, of, strict=True)) for of in operands
    )
    return Solution(operands, vary, tuple(zip(*outs, strict=True)))


def _flat(values: Any) -> list[Any]:
    """Placements in order; lists stand for lists of tensors."""
    flat: list[Any] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, (list, tuple)) else [value] if value is not None else [])
    return flat


def _pair(
    name: str, pair: Any, specs: Sequence[TensorSpec], results: Sequence[Sequence[int]]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(p, (list, tuple)) for p in pair)):
        raise TypeError(
            f"{name}: its sharding function must return pairs ([placements of the results], [placements of the"
            f" arguments]), got {pair!r}"
        )
    out, want = _flat(pair[0]), _flat(pair[1])
    for what, placements, count in (("results", out, len(results)), ("tensor arguments", want, len(specs))):
        if len(placements) != count:
            raise ValueError(
                f"{name}: {len(placements)} placements {placements} for {count} {what}; its sharding function must give"
                " one for each, and None for an argument that is not a tensor"
            )
    shapes = [*results, *(spec.shape for spec in specs)]
    mesh = specs[0].mesh
    normalized = [
        normalize([placement] * mesh.ndim, mesh, len(shape), name)[0]
        for placement, shape in zip([*out, *want], shapes, strict=True)
    ]
    return tuple(normalized[: len(out)]), tuple(normalized[len(out) :])


def check_results(name: str, what: str, shapes: Iterable[tuple[int, ...]], layouts: Sequence[TensorSpec]) -> None:
    """Check that the local shapes of results are those that a registered rule implies.

    Args:
        name: the operation's.
        what: ``"operation"`` or ``"kernel"``, for the error.
        shapes: the local shape of each result.
        layouts: the layout of each result by the rule.

    Raises:
        RuntimeError: a shape differs.
    """
    for index, (shape, spec) in enumerate(zip(shapes, layouts, strict=True)):
        if tuple(shape) != spec.local_shape:
            raise RuntimeError(
                f"{name}: by the registered rule result {index} of global shape {spec.shape} is {spec.placements},"
                f" which is {spec.local_shape} on this rank; the {what} returned {tuple(shape)}. The rule accepts"
                f" placements for which the {what} is not right"
            )
