"""Memory and work of plans that were not traced, from traces of some that were.

Note [Live bytes are polynomials]
The live bytes at each operation of a step are a polynomial in the micro-batch b and the sequence length s, with terms
1, b s, s, b, b s^2 and s^2, and what n ranks share is a part in 1 / n. The peak, the most of them, is none: where b
grows another operation has it. So a `Curve` has one polynomial for each operation, and predicts the peak as the
maximum. Blocks and stages add operations, but the same ones over and over: over them the peak itself grows evenly
(`Growth`), and so does what is counted over a step (`Tally`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_plan.dry.trace import Trace

Number = Any
"""A number, or an array of them."""
Floats = NDArray[np.float64]


class OperationsDiffer(ValueError):
    """Traces have different operations, so that no operation's bytes can be followed from one to another."""


class Undetermined(ValueError):
    """What is asked for varies something that the traces did not vary."""


_SMALL = 1 << 20
"""Bytes of messages that do not count: what ranks tell each other of themselves grows in steps."""


class NotLinear(ValueError):
    """A trace is not where those of fewer blocks or stages lead."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a trace was taken, or is asked for; numbers, or arrays of one shape.

    Attributes:
        micro_batch: samples of a micro-batch.
        length: tokens of a sample.
        shards: ranks on `dp_shard`, which share a copy.
        micro_batches: of a step.
        blocks: of the rank.
        stages: ranks on `pp`.
    """

    micro_batch: Number
    length: Number
    shards: Number = 1
    micro_batches: Number = 1
    blocks: Number = 1
    stages: Number = 1

    @property
    def activations(self) -> Floats:
        """The terms in b and s, last."""
        b, s = np.asarray(self.micro_batch, dtype=np.float64), np.asarray(self.length, dtype=np.float64)
        b, s = np.broadcast_arrays(b, s)
        return np.stack([np.ones_like(b), b * s, s, b, b * s * s, s * s], axis=-1)

    @property
    def memory(self) -> Floats:
        """The terms of live bytes, last."""
        return _joined(self.activations, 1 / np.asarray(self.shards, dtype=np.float64))

    @property
    def work(self) -> Floats:
        """The terms of what is counted over a step, last: for each micro-batch, and once; both for each block, too."""
        micros, shards = (np.asarray(each, dtype=np.float64)[..., None] for each in (self.micro_batches, self.shards))
        once = _joined(np.ones_like(shards), 1 / shards[..., 0])
        terms = _joined(_joined(self.activations * micros, micros[..., 0] / shards[..., 0]), once)
        return _joined(terms, terms * np.asarray(self.blocks, dtype=np.float64)[..., None])


def _joined(terms: Floats, more: Floats) -> Floats:
    """Put terms, or one term, after others."""
    if more.ndim < terms.ndim or more.shape == terms.shape[:-1]:
        more = more[..., None]
    shape = np.broadcast_shapes(terms.shape[:-1], more.shape[:-1])
    parts = [np.broadcast_to(each, (*shape, each.shape[-1])) for each in (terms, more)]
    return np.concatenate(parts, axis=-1)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Sums of terms, by least squares.

    Attributes:
        coefficients: [terms, values].
        spanned: [terms, terms], the projection on what the fitted rows can tell apart.
        scale: [terms], by which a row is divided first.
    """

    coefficients: Floats
    spanned: Floats
    scale: Floats

    @classmethod
    def to(cls, rows: Floats, values: Floats) -> Fitted:
        """Fit.

        Args:
            rows: [points, terms].
            values: [points, values].
        """
        scale = np.abs(rows).max(axis=0)
        scale[scale == 0] = 1.0
        left, sizes, right = np.linalg.svd(rows / scale, full_matrices=False)
        rank = int(np.count_nonzero(sizes > 1e-9 * sizes[0]))
        left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
        return cls(right.T @ ((left.T @ values) / sizes[:, None]), right.T @ right, scale)

    def at(self, rows: Floats) -> Floats:
        """Return [points, values] at rows of terms.

        Raises:
            Undetermined: a row is no combination of those that were fitted.
        """
        rows = rows / self.scale
        outside = np.abs(rows - rows @ self.spanned).max(axis=-1)
        if np.any(outside > 1e-6 * np.abs(rows).max(axis=-1)):
            raise Undetermined(
                "the traces do not vary what is asked for (micro-batch, sequence length, shards, micro-batches or"
                " blocks): add traces that do."
            )
        return rows @ self.coefficients


@dataclass(frozen=True, eq=False)
class Curve:
    """Live bytes at each operation of a step, as polynomials: Note [Live bytes are polynomials].

    Attributes:
        fitted: coefficients [terms, moments].
        optimizer_from: moment at which the optimizer's step begins.
        misfit: bytes by which the worst moment of a fitted trace is missed; below a half where they are polynomials.
    """

    fitted: Fitted
    optimizer_from: int
    misfit: float

    @classmethod
    def fit(cls, points: Sequence[Point], traces: Sequence[Trace]) -> Curve:
        """Fit traces at some points, such as b of 2, 3 and 5 by three lengths.

        A sample of one has operations of its own: begin at micro-batches of 2. Where all points have one length, the
        curve is for that length.

        Raises:
            OperationsDiffer: two traces do not have as many operations.
        """
        for point, trace in zip(points, traces, strict=True):
            if len(trace.live) != len(traces[0].live) or trace.optimizer_from != traces[0].optimizer_from:
                raise OperationsDiffer(
                    f"a step has {len(traces[0].live)} operations at {_described(points[0])}, but {len(trace.live)} at"
                    f" {_described(point)}: there is no curve through both."
                )
        rows = np.stack([point.memory for point in points])
        values = np.array([trace.live for trace in traces], dtype=np.float64)
        fitted = Fitted.to(rows, values)
        return cls(fitted, traces[0].optimizer_from, float(np.abs(fitted.at(rows) - values).max(initial=0.0)))

    def live(self, point: Point) -> NDArray[np.int64]:
        """Return the live bytes at each operation, moments last.

        Raises:
            Undetermined: the point varies what the traces did not.
        """
        return np.rint(self.fitted.at(point.memory)).astype(np.int64)

    def peak(self, point: Point) -> Number:
        """Return the most of them: an integer, or an array of integers."""
        peaks = self.live(point).max(axis=-1)
        return peaks if np.ndim(peaks) else int(peaks)


def _described(point: Point) -> str:
    return (
        f"{point.micro_batches} x {point.micro_batch} samples of {point.length} tokens, dp_shard {point.shards},"
        f" pp {point.stages} of {point.blocks} blocks"
    )


def extended(values: Mapping[tuple[int, int], Number], blocks: Number, stages: Number = 1) -> Number:
    """Go on evenly from values at two numbers of blocks, and at one or two numbers of stages.

    >>> extended({(3, 1): 70, (4, 1): 90}, 32)
    650

    Args:
        values: at (blocks, stages): all pairs of two numbers of blocks and one or two of stages; integers.
        blocks: where to.
        stages: where to.
    """
    few, many = sorted({each for each, _ in values})
    first, *rest = sorted({each for _, each in values})

    def along(stage: int) -> Number:
        return values[few, stage] + (values[many, stage] - values[few, stage]) * (blocks - few) // (many - few)

    if not rest:
        return along(first)
    return along(first) + (along(rest[0]) - along(first)) * (stages - first) // (rest[0] - first)


@dataclass(frozen=True, eq=False)
class Growth:
    """Peaks over blocks and stages, by curves at a few of both.

    The peak may be where the loss is, after all blocks' forwards; at the end of backward, when all gradients are
    there; or in the optimizer's step. Each grows with the blocks at a pace of its own, and so the maxima of these three
    parts of a step are followed apart. The second is as long as the backward of one block, which is about three
    quarters of the operations that a block adds for each micro-batch.

    Attributes:
        curves: at (blocks, stages): of two numbers of blocks, and one or two of stages.
        micro_batches: of the traces with the fewer stages.
    """

    curves: Mapping[tuple[int, int], Curve]
    micro_batches: int = 1

    @property
    def last_block(self) -> int:
        """Operations of the last block's backward, about."""
        stages = min(stages for _, stages in self.curves)
        few, *_, many = sorted(blocks for blocks, each in self.curves if each == stages)
        more = self.curves[many, stages].optimizer_from - self.curves[few, stages].optimizer_from
        return max(1, 3 * more // (4 * self.micro_batches * (many - few)))

    def peak(self, point: Point) -> Number:
        """Return the most live bytes at a point: an integer, or an array of integers."""
        b, s, n, blocks, stages = np.broadcast_arrays(
            point.micro_batch, point.length, point.shards, point.blocks, point.stages
        )
        # Plans of one micro-batch and as many shards share what takes long, the maxima over moments.
        rows, place = np.unique(np.stack([b.ravel(), s.ravel(), n.ravel()]), axis=1, return_inverse=True)
        place, length = place.reshape(b.shape), self.last_block
        parts: list[dict[tuple[int, int], Number]] = [{}, {}, {}]
        for at, curve in self.curves.items():
            live, end = curve.live(Point(*rows)), curve.optimizer_from
            begin = max(0, end - length)
            for part, values in zip(parts, (live[:, :begin], live[:, begin:end], live[:, end:]), strict=True):
                part[at] = values.max(axis=-1, initial=0)[place]
        peak = np.max([extended(part, blocks, stages) for part in parts], axis=0)
        return peak if peak.ndim else int(peak)

    def check(self, point: Point, trace: Trace, *, tolerance: float = 1e-3) -> None:
        """Compare with a trace of more blocks, or of more stages.

        Args:
            point: where the trace was taken.
            trace: it.
            tolerance: by which part of its peak it may be missed.

        Raises:
            NotLinear: it is missed by more.
        """
        _compare(int(self.peak(point)), trace.peak, point, "the peak, in bytes,", tolerance)


def _compare(expected: float, got: float, point: Point, what: str, tolerance: float) -> None:
    if abs(expected - got) > tolerance * max(abs(got), 1):
        raise NotLinear(
            f"{what} at {point.blocks} blocks and {point.stages} stages is {got:,.0f}, but fewer lead to"
            f" {expected:,.0f}: the blocks are not all alike. Give ModelSizes.period, after which they are."
        )


@dataclass(frozen=True, eq=False)
class Tally:
    """What is counted over a step (operations, bytes, seconds of kernels), as sums of terms.

    Attributes:
        names: of what is counted, in order.
        fitted: coefficients [terms, names].
    """

    names: tuple[Any, ...]
    fitted: Fitted

    @classmethod
    def fit(cls, points: Sequence[Point], counts: Sequence[Mapping[Any, float]]) -> Tally:
        """Fit counts at some points; what a trace does not have counts 0."""
        names = tuple(dict.fromkeys(name for each in counts for name in each))
        values = np.array([[each.get(name, 0.0) for name in names] for each in counts], dtype=np.float64)
        return cls(names, Fitted.to(np.stack([point.work for point in points]), values))

    def at(self, point: Point) -> dict[Any, Number]:
        """Return each count at a point.

        Raises:
            Undetermined: the point varies what the traces did not.
        """
        values = self.fitted.at(point.work)
        return {name: values[..., index] for index, name in enumerate(self.names)}

    def check(self, point: Point, counts: Mapping[Any, float], *, tolerance: float = 1e-3) -> None:
        """Compare with the counts of a trace of more blocks; raise `NotLinear` where one is missed by more."""
        predicted = self.at(point)
        for name, expected in predicted.items():
            what = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
            got = counts.get(name, 0.0)
            if what.startswith(("bytes", "calls")):
                sent = ("bytes", *name[1:])
                if max(predicted.get(sent, 0.0), counts.get(sent, 0.0)) < _SMALL:
                    continue
            _compare(float(expected), got, point, what, tolerance)
