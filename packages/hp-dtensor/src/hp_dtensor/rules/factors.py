"""Factors: which dims of an operation's operands and results are one thing, and what follows for placements.

Every dim of an operand or a result belongs to a *factor* (an index of the operation's loop nest), or to none where it
is broadcast. Sharding a factor shards every dim that carries it; a factor that no result carries is a reduction, and
sharding it leaves the result partial. This is the factor form of Shardy's sharding rules.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.redistribution.choice import cheapest

__all__ = ["LINEAR", "Dims", "FactorMap", "NoLegalPlacement", "Solution", "solve"]

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
        whole: factors that must not be sharded.
        even: factors whose every dim must be a multiple of the number of shards.
        full: factors of which no rank may hold an empty shard.
        runs: factors that may be cut in runs only, not in strides.
        linear: sets of operands; the operation is linear in each set jointly, so partial sums pass through it.
        passes: reductions whose parts pass through where an operation is ``linear``.
        once: operands that are added to a sum on one rank alone; the sum's gradient is theirs on every rank.
        elementwise: results are computed element by element from operands of the result's shape.
        forgetful: values of partial operands don't matter (``zeros_like``).
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduce: Mapping[int, str] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    even: frozenset[int] = frozenset()
    full: frozenset[int] = frozenset()
    runs: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    passes: frozenset[str] = LINEAR
    once: frozenset[int] = frozenset()
    elementwise: bool = False
    forgetful: bool = False


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
    """``like`` on the dim that carries ``factor``; None where no dim does."""
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

    On each axis a factor that some operand is sharded on there, partial values passed through an operation that is
    linear in them, or everything replicated. Of equal prices the sharded one wins, on the first axis first.

    Args:
        factors: the call's factors.
        shapes: global shape of each operand.
        placements: where each operand is.
        mesh_shape: ranks along each axis.
        itemsizes: bytes an element of each operand.
        results: global shape of each result.
        in_place: index of an operand that is written to and so can't move.

    Raises:
        NoLegalPlacement: ``in_place`` leaves no legal combination.
    """
    search = _Search(factors, shapes, placements, mesh_shape, results, in_place)
    sources = [tuple(given) for given in placements]
    known = {(given, tuple(shape)) for given, shape in zip(sources, shapes, strict=True)}
    solutions: list[Solution] = []
    for choice in search.choices(0, {}):
        found = Solution(
            *(_by_tensor(choice, part, n) for part, n in ((0, len(shapes)), (1, len(shapes)), (2, len(results))))
        )
        unmoved = not solutions and all(map(operator.eq, found.operands, sources))
        chosen = [*zip(found.operands, shapes, strict=True), *zip(found.results, results, strict=True)]
        # A run is cut in units of what the other axes leave of it: beside another cut there may be no such tensor.
        if not any(_run_and_cut(given) and (given, tuple(shape)) not in known for given, shape in chosen):
            if unmoved:
                return found
            solutions.append(found)
    if not solutions:
        axis = search.stuck
        have = [given[axis] for given in placements]
        raise NoLegalPlacement(
            f"the operand that is written in place is {have[in_place or 0]!r} on axis {axis} of mesh"
            f" {tuple(mesh_shape)}, the operands are {have} of shapes {[tuple(s) for s in shapes]}: it would have"
            " to be redistributed first. Use the function that returns its result, or x = x.redistribute(...)"
            " (of a Partial: x = x.reduce_partial()) before it is written"
        )
    return cheapest(solutions, [found.operands for found in solutions], sources, shapes, mesh_shape, itemsizes)


def _by_tensor(choice: Sequence[Candidate], part: int, count: int) -> tuple[tuple[Any, ...], ...]:
    """Transpose candidates, one tuple per axis, to one tuple per tensor."""
    return tuple(tuple(candidate[part][i] for candidate in choice) for i in range(count))  # type: ignore[index]


def _run_and_cut(placements: Sequence[Placement]) -> bool:
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
        have = [given[axis] for given in self.placements]
        for candidate in self._candidates(have, ranks, splits):
            if not self._stays(have, candidate):
                continue
            legal, factor = True, candidate[3]
            inner = splits if factor is None else {**splits, factor: splits.get(factor, 1) * ranks}
            for rest in self.choices(axis + 1, inner):
                yield (candidate, *rest)
        if not legal:
            self.stuck = axis

    def _candidates(self, have: list[Placement], ranks: int, splits: dict[int, int]) -> Iterator[Candidate]:
        factors, count, outs = self.factors, len(have), len(self.factors.results)
        yield from _sharded(factors, have, self.shapes, ranks, splits)
        yield from _partial(factors, have, self.shapes, self.results, self.in_place is not None)
        if factors.elementwise:
            yield from _ragged(have, self.shapes, self.results)
        if factors.forgetful and any(p.is_partial() for p in have):
            yield list(have), [False] * count, [REPLICATE] * outs, None
        yield [REPLICATE] * count, [False] * count, [REPLICATE] * outs, None

    def _stays(self, have: list[Placement], candidate: Candidate) -> bool:
        """Tell whether the operand written in place, if any, keeps its placements and its result has them too."""
        want, varies, out, _ = candidate
        i = self.in_place
        return i is None or (want[i] == have[i] and not varies[i] and all(o == have[i] for o in out))


def _sharded(
    factors: FactorMap, have: list[Placement], shapes: Sequence[Sequence[int]], ranks: int, splits: dict[int, int]
) -> Iterator[Candidate]:
    seen: set[tuple[int, Placement | None]] = set()
    for operand, placement in enumerate(have):
        factor = _shard_factor(factors.operands[operand], placement)
        if factor is None or factor in factors.whole:
            continue
        kind = placement if isinstance(placement, StridedShard) else None
        mark = (factor, None if kind is None else StridedShard(0, kind.split_factor))
        if mark in seen:
            continue
        seen.add(mark)
        pieces = splits.get(factor, 1) * ranks
        sizes = [
            shape[dims.index(factor)] for dims, shape in zip(factors.operands, shapes, strict=True) if factor in dims
        ]
        if (factor in factors.even or len(set(sizes)) > 1) and any(size % pieces for size in sizes):
            continue
        if factor in factors.full and any(math.ceil(size / pieces) * (pieces - 1) >= size for size in sizes):
            continue
        if kind is not None and factor in factors.runs:
            continue
        if kind is not None and (any(size % (kind.split_factor * pieces) for size in sizes) or factor in splits):
            continue
        want: list[Placement] = []
        varies: list[bool] = []
        for dims in factors.operands:
            placed = _placed(dims, factor, placement)
            want.append(placed or REPLICATE)
            varies.append(placed is None and not (factor in factors.reduce and len(varies) in factors.once))
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
    have: list[Placement],
    shapes: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    in_place: bool,
) -> Iterator[Candidate]:
    """Parts that pass through.

    A replicated value that meets parts of a sum or an average becomes parts itself where it is smaller than the result,
    as a bias is, or the result can't move. At one as large, a residual, the sum is made: its readers read it whole.
    """
    for jointly in factors.linear:
        parts = dict.fromkeys(have[i] for i in sorted(jointly))
        placement = next((part for part in parts if isinstance(part, Partial)), None)
        if placement is None or placement.op not in factors.passes:
            continue
        others = [i for i in jointly if have[i] != placement]
        most = math.prod(results[0])
        if any(
            not have[i].is_replicate() or placement.op not in LINEAR or not (in_place or math.prod(shapes[i]) < most)
            for i in others
        ):
            continue
        want: list[Placement] = [placement if i in jointly else REPLICATE for i in range(len(have))]
        yield want, [i not in jointly for i in range(len(have))], [placement] * len(factors.results), None


def _ragged(
    have: list[Placement], shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Iterator[Candidate]:
    for placement in dict.fromkeys(p for p in have if isinstance(p, RaggedShard)):
        same = [tuple(shape) == tuple(results[0]) for shape in shapes]
        if all(fits or tuple(shape) in ((), (1,)) for fits, shape in zip(same, shapes, strict=True)):
            yield (
                [placement if fits else REPLICATE for fits in same],
                [not fits for fits in same],
                [placement] * len(results),
                None,
            )
