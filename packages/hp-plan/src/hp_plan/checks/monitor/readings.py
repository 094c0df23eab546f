"""Readings: a few numbers of a tensor at a place of a step, and the files in which each rank keeps its own.

Note [Files of readings]
    A rank has two files in the folder of its run. `readings-<rank>.bin` is an array of `RECORD`, 48 bytes a reading,
    which readers map into memory. `readings-<rank>.names` is text: a line of JSON that tells the layout of the run,
    then the names that records refer to by their number. Both are only appended to, names first, by one `write` a step.
    What a process has written stays when it is killed; the last record of a step is marked, and what follows the last
    mark is a step that was cut off, which readers leave out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Phase = Literal["forward", "loss", "backward", "gradient", "moment", "weight"]
PHASES: tuple[str, ...] = get_args(Phase)
"""The phases of a step, in their order."""

RECORD = np.dtype(
    [
        ("step", "<u4"),
        ("name", "<u4"),
        ("zeros", "<f4"),
        ("micro", "<u2"),
        ("phase", "u1"),
        ("flags", "u1"),
        ("bits", "<i8"),
        ("norm", "<f8"),
        ("low", "<f8"),
        ("high", "<f8"),
    ]
)
"""A reading in a file, by the numbers of its name and phase."""

COUNTED, ALONE, END = 1, 2, 4
"""Flags: a part of a tensor that no other rank counts; one that is no part of a whole, such as a term of a sum over
ranks; the last reading of a step."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers of a rank's part of a tensor at a place of a step.

    Attributes:
        step: from 1.
        phase: "forward" (the output of a module), "loss" (this rank's), "backward" (the gradient with respect to the
            output), "gradient" (of a parameter, before clipping), "moment" or "weight" (after the step).
        name: of the module or the parameter; a moment's is `parameter/state`, a module's second call in a
            micro-batch `module#2`.
        micro: the number of the micro-batch, of forward and backward; else 0.
        rank: that has the tensor.
        bits: sum of the elements' bits as integers, modulo 2**64, the same in any order; 0 where they were not read.
        norm: the square root of the sum of squares. It and those below are not a number where they were not read.
        low: the smallest element; not a number where one isn't.
        high: the largest.
        zeros: the part of the elements that is zero.
    """

    step: int
    phase: Phase
    name: str
    micro: int
    rank: int
    bits: int
    norm: float
    low: float
    high: float
    zeros: float


@dataclass(frozen=True)
class RankReadings:
    """The readings of a rank, which iteration returns as values.

    Attributes:
        rank: which.
        layout: of the run: its mesh, micro-batches, dtypes, and which numbers were read.
        names: of modules and parameters.
        records: an array of `RECORD`, mapped into memory, in the order in which they were read.
    """

    rank: int
    layout: Mapping[str, Any]
    names: tuple[str, ...]
    records: NDArray[Any]

    def __iter__(self) -> Iterator[Reading]:
        for step, name, zeros, micro, phase, _, bits, *norms in self.records.tolist():
            yield Reading(step, PHASES[phase], self.names[name], micro, self.rank, bits, *norms, zeros)  # type: ignore[arg-type]


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"readings-{rank}.bin", folder / f"readings-{rank}.names"


def read_rank(folder: Path, rank: int) -> RankReadings:
    """Map the readings of a rank, up to its last whole step.

    Raises:
        FileNotFoundError: it has none.
    """
    path, texts = _paths(folder, rank)
    header, *names = texts.read_text(encoding="utf-8").split("\n")
    count = path.stat().st_size // RECORD.itemsize
    records = np.memmap(path, RECORD, "r", shape=(count,)) if count else np.empty(0, RECORD)
    ends = np.flatnonzero(records["flags"] & END)
    return RankReadings(rank, json.loads(header), tuple(names[:-1]), records[: int(ends[-1]) + 1 if len(ends) else 0])


def read_readings(folder: str | os.PathLike[str]) -> dict[int, RankReadings]:
    """Map the readings of all ranks of a run.

        run = read_readings("runs/first")
        run[0].records["norm"].max(), next(iter(run[0]))

    Args:
        folder: of the run.

    Returns:
        Those of each rank, by its number.

    Raises:
        FileNotFoundError: the run was not monitored.
    """
    folder = Path(folder)
    ranks = sorted(int(path.stem.removeprefix("readings-")) for path in folder.glob("readings-*.bin"))
    if not ranks:
        raise FileNotFoundError(f"{folder} has no readings: train with [monitor] every, or with --monitor full")
    return {rank: read_rank(folder, rank) for rank in ranks}


class ReadingsFile:
    """The readings of this rank, as they are written.

    Args:
        folder: of the run.
        rank: this one.
        layout: of the run, a value of JSON.
        step: that the run goes on after: readings of later steps are left out. Those of another layout are kept under
            names that begin with `old-`.
    """

    def __init__(self, folder: Path, rank: int, layout: Mapping[str, Any], *, step: int) -> None:
        path, texts = _paths(folder, rank)
        self._numbers: dict[str, int] = {}
        header = json.dumps(layout, sort_keys=True)
        for extra in folder.glob("readings-*.*") if rank == 0 else ():  # of ranks that are no more
            if int(extra.stem.removeprefix("readings-")) >= layout["ranks"]:
                extra.rename(extra.with_name(f"old-{extra.name}"))
        if path.exists() and texts.exists():
            before = read_rank(folder, rank)
            if step and json.dumps(before.layout, sort_keys=True) == header:
                self._numbers = {name: number for number, name in enumerate(before.names)}
                kept = int(np.searchsorted(before.records["step"], step, "right"))
                texts.write_text("".join(f"{line}\n" for line in [header, *before.names]), encoding="utf-8")
                os.truncate(path, kept * RECORD.itemsize)
            elif step:
                for each in (path, texts):
                    each.rename(each.with_name(f"old-{each.name}"))
        mode = "ab" if self._numbers else "wb"
        self._records, self._names = open(path, mode, buffering=0), open(texts, mode, buffering=0)
        if not self._numbers:
            self._names.write(f"{header}\n".encode())

    def number(self, name: str) -> int:
        """Return the number of a name, which is written down if it is new."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self._names.write(f"{name}\n".encode())
        return self._numbers[name]

    def write(self, records: NDArray[Any]) -> None:
        """Append the readings of a step, an array of `RECORD`."""
        if len(records):
            records["flags"][-1] |= END
            self._records.write(records.tobytes())

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._names.close()
