"""What a dry run tells: the memory of ranks at their peaks, and what they compute, send and assume."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_offload.extend import size
from hp_plan.dry.trace import Trace
from hp_plan.features.communication import AxisTraffic
from hp_plan.features.communication import lines as traffic_lines

KINDS = ("weights", "gradients", "states", "gathered", "saved", "temporary", "host")
"""Of memory: parameters and buffers; their gradients; the optimizer's states; buffers of gathered parameters; what
backward needs of forward; the rest; and whatever is in the host's memory, which is in no sum of the device's."""


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors of one origin that are held at a moment.

    Attributes:
        bytes: of all of them.
        count: how many.
        kind: one of `KINDS`.
        operator: that made them; "" of those that the step began with.
        shape: of each.
        module: that ran; "" outside of modules.
    """

    bytes: int
    count: int
    kind: str
    operator: str
    shape: tuple[int, ...]
    module: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A rank's memory at one operation of a step.

    Attributes:
        live: bytes of the device.
        by_kind: the same, by `KINDS`; and the host's at this moment.
        operation: its number in the step.
        phase: "forward", "backward" or "optimizer".
        module: that ran; "" outside of modules.
        top: what holds most, the largest first.
    """

    live: int
    by_kind: Mapping[str, int]
    operation: int
    phase: str
    module: str
    top: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that the step read from a tensor without values.

    Attributes:
        what: was taken for it.
        where: file and line that read it.
        times: how often in a run.
    """

    what: str
    where: str
    times: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's step.

    Attributes:
        rank: its number in the world.
        coordinates: its place on each axis of the mesh.
        stands_for: how many ranks have its place in the pipeline: with even shards they have its memory too.
        uneven: its shard of some parameter is not as large as every other rank's.
        peak: where its memory is largest.
        rest: bytes between steps.
        host: the most bytes of the host's memory that are allocated for it.
        trace: the whole step.
        memory: bytes of each kind at each operation; empty unless asked for.
        assumed: values that were not there.
    """

    rank: int
    coordinates: Mapping[str, int]
    stands_for: int
    uneven: bool
    peak: Moment
    rest: int
    host: int
    trace: Trace
    memory: Mapping[str, tuple[int, ...]]
    assumed: tuple[Assumption, ...]


@dataclass(frozen=True, slots=True)
class DryReport:
    """The distinct ranks of a plan.

    Attributes:
        mesh: the plan's, for people, such as "dp_shard 32 x tp 8 x pp 4".
        world_size: number of ranks.
        ranks: those that were played.
        machine: the name of one that was asked for; "" without.
        room: bytes of its device for a plan, None without.
        traffic: what goes along the axes in a step of the fullest rank.
        usual: where the plan has an order of axes, the bytes that would come from other hosts without; else None.
    """

    mesh: str
    world_size: int
    ranks: tuple[RankReport, ...]
    machine: str = ""
    room: int | None = None
    traffic: tuple[AxisTraffic, ...] = ()
    usual: float | None = None

    @property
    def peak(self) -> int:
        """The most bytes of any rank."""
        return max(each.peak.live for each in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return everything but the traces' lists as plain values."""
        told = dataclasses.asdict(self)
        for rank, own in zip(told["ranks"], self.ranks, strict=True):
            rank["trace"] = {"peak": own.trace.peak, "flops": own.trace.flops, "operations": own.trace.operations}
            rank["collectives"] = [
                {"kind": kind, "bytes_each": each, "axes": list(axes), "calls": count.calls, "bytes": count.bytes}
                for (kind, each, axes), count in sorted(own.trace.collectives.items())
            ]
            rank["memory"] = {kind: list(values) for kind, values in own.memory.items()}
        return told

    def __str__(self) -> str:
        """Return a table of the ranks, what holds most in the fullest, messages and assumptions, in 80 columns."""
        lines = [f"dry run: {self.world_size} ranks, {self.mesh}", ""]
        rows = [[str(each.rank), _short(each.peak.live)] + [_short(each.peak.by_kind.get(kind, 0)) for kind in KINDS]
                for each in self.ranks]  # fmt: skip
        lines += _table(("rank", "peak", *(_HEADS.get(kind, kind) for kind in KINDS)), rows)
        if self.room is not None:
            left = self.room - self.peak
            says = f"{size(left)} are left" if left >= 0 else f"{size(-left)} too much"
            lines += ["", f"{size(self.peak)} of {size(self.room)} that {self.machine} has for a plan: {says}"]
        fullest = max(self.ranks, key=lambda each: each.peak.live)
        place = ", ".join(f"{axis} {number}" for axis, number in fullest.coordinates.items())
        lines += ["", f"rank {fullest.rank} ({place}) holds most in {fullest.peak.phase}:"]
        lines += [f"  in {fullest.peak.module}"[:80]] if fullest.peak.module else []
        for held in fullest.peak.top[:8]:
            shape = " x ".join(map(str, held.shape))
            origin = f"{held.operator or 'before the step'} {held.module}".strip()
            lines.append(f"  {size(held.bytes):>9}  {held.count:>4} of [{shape}], {held.kind}, {origin}"[:80])
        lines += ["", f"{size(fullest.rest)} between steps, {_flops(fullest.trace.flops)} a step"]
        lines += self._messages(fullest)
        if self.traffic:
            told = (textwrap.wrap(line, 80, subsequent_indent="  ") for line in traffic_lines(self.traffic))
            lines += ["", *itertools.chain.from_iterable(told)]
        if self.usual is not None:
            between = size(round(sum(each.between for each in self.traffic)))
            lines.append(f"{between} come from other hosts, {size(round(self.usual))} in the usual order of the axes")
        assumed = {(each.what, each.where) for rank in self.ranks for each in rank.assumed}
        if assumed:
            lines += ["", "assumed of values that are not there:"]
            lines += [f"  {what}, in {where}"[:80] for what, where in sorted(assumed)]
        return "\n".join(lines)

    @staticmethod
    def _messages(rank: RankReport) -> list[str]:
        calls: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for (kind, _, axes), count in rank.trace.collectives.items():
            total = calls.setdefault((kind, axes), [0, 0])
            total[0] += count.calls
            total[1] += count.bytes
        rows = [[" x ".join(axes), kind, str(number), _short(total)]
                for (kind, axes), (number, total) in sorted(calls.items(), key=lambda each: -each[1][1])]  # fmt: skip
        return ["", *_table(("over", "collective", "calls", "bytes"), rows)] if rows else []


_HEADS = {"gradients": "grads", "temporary": "temp"}


def _short(number: int) -> str:
    """Return bytes with three digits, or a dash for none."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            value = number / (1 << power)
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
    return f"{number} B" if number else "-"


def _flops(number: int) -> str:
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.1f} {letter}flop"
    return f"{number} flop"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    widths = [max(len(each) for each in column) for column in zip(heads, *rows, strict=True)]
    return [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
