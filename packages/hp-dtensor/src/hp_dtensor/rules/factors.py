"""Factors: which dims of an operation's operands and results are one thing, and what follows for placements.

Every dim of an operand or a result belongs to a *factor* (an index of the operation's loop nest), or to none where it
is broadcast. Sharding a factor shards every dim that carries it; a factor that no result carries is a reduction, and
sharding it leaves the result partial. This is the factor form of Shardy's sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

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


def _move_bytes(have: Placement, want: Placement, size: int, ranks: int) -> float:
    """Bytes a rank receives when an operand of ``size`` bytes goes from ``have`` to ``want`` on an axis."""
    if have == want or have.is_replicate():
        return 0.0
    share = size * (ranks - 1) / ranks
    if have.is_partial():
        return 2 * share if want.is_replicate() else share
    return share if want.is_replicate() else share / ranks


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
    """The legal placements that move the fewest bytes; see ``_solve``, whose choices by axis may not exist together.

    A run of elements is cut in units of what the other axes leave of it: beside another cut than its own there may be
    no such tensor. Then runs are gathered.
    """
    found = _solve(factors, shapes, placements, mesh_shape, itemsizes, results, in_place, ragged=True)
    known = {(tuple(given), tuple(shape)) for given, shape in zip(placements, shapes, strict=True)}
    chosen = [*zip(found.operands, shapes, strict=True), *zip(found.results, results, strict=True)]
    if any(_run_and_cut(given) and (given, tuple(shape)) not in known for given, shape in chosen):
        return _solve(factors, shapes, placements, mesh_shape, itemsizes, results, in_place, ragged=False)
    return found


def _run_and_cut(placements: Sequence[Placement]) -> bool:
    kinds = [type(placement) for placement in placements]
    return RaggedShard in kinds and (Shard in kinds or StridedShard in kinds)


def _solve(
    factors: FactorMap,
    shapes: Sequence[Sequence[int]],
    placements: Sequence[Sequence[Placement]],
    mesh_shape: Sequence[int],
    itemsizes: Sequence[int],
    results: Sequence[Sequence[int]],
    in_place: int | None,
    ragged: bool,
) -> Solution:
    """The legal placements that move the fewest bytes, on each axis by itself.

    Each axis is solved by itself: a factor that some operand is sharded on there, partial values passed through an
    operation that is linear in them, or everything replicated. Of equal candidates the sharded one wins.

    Args:
        factors: the call's factors.
        shapes: global shape of each operand.
        placements: where each operand is.
        mesh_shape: ranks along each axis.
        itemsizes: bytes an element of each operand.
        results: global shape of each result.
        in_place: index of an operand that is written to and so can't move.
        ragged: whether runs of elements may stay runs.

    Raises:
        NoLegalPlacement: ``in_place`` leaves no legal combination.
    """
    count = len(shapes)
    sizes = [math.prod(shape) * itemsize for shape, itemsize in zip(shapes, itemsizes, strict=True)]
    splits: dict[int, int] = {}
    targets: list[list[Placement]] = [[] for _ in range(count)]
    vary: list[list[bool]] = [[] for _ in range(count)]
    outs: list[list[Placement]] = [[] for _ in factors.results]

    for axis, ranks in enumerate(mesh_shape):
        have = [placements[i][axis] for i in range(count)]
        best: tuple[float, list[Placement], list[bool], list[Placement], int | None] | None = None

        def offer(
            want: list[Placement],
            varies: list[bool],
            out: list[Placement],
            factor: int | None,
            have: list[Placement] = have,
            ranks: int = ranks,
        ) -> None:
            nonlocal best
            if in_place is not None and (
                want[in_place] != have[in_place] or varies[in_place] or any(o != have[in_place] for o in out)
            ):
                return
            cost = sum(_move_bytes(h, w, size, ranks) for h, w, size in zip(have, want, sizes, strict=True))
            if best is None or cost < best[0]:
                best = (cost, want, varies, out, factor)

        for candidate in _sharded(factors, have, shapes, ranks, splits):
            offer(*candidate)
        for candidate in _partial(factors, have, shapes, results, in_place is not None):
            offer(*candidate)
        if factors.elementwise and ragged:
            for candidate in _ragged(have, shapes, results):
                offer(*candidate)
        if factors.forgetful and any(p.is_partial() for p in have):
            offer(list(have), [False] * count, [REPLICATE] * len(outs), None)
        offer([REPLICATE] * count, [False] * count, [REPLICATE] * len(outs), None)
        if best is None:
            raise NoLegalPlacement(
                f"the operand that is written in place is {have[in_place or 0]!r} on axis {axis} of mesh"
                f" {tuple(mesh_shape)}, the operands are {have} of shapes {[tuple(s) for s in shapes]}: it would have"
                " to be redistributed first. Use the function that returns its result, or x = x.redistribute(...)"
                " (of a Partial: x = x.reduce_partial()) before it is written"
            )
        _, want, varies, out, factor = best
        if factor is not None:
            splits[factor] = splits.get(factor, 1) * ranks
        for i in range(count):
            targets[i].append(want[i])
            vary[i].append(varies[i])
        for i, placement in enumerate(out):
            outs[i].append(placement)
    return Solution(tuple(map(tuple, targets)), tuple(map(tuple, vary)), tuple(map(tuple, outs)))


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
