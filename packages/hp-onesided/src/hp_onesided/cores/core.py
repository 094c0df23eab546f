"""The interface of the two cores, and which one this machine has."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hp_onesided.cores import library, waiting
from hp_onesided.cores.segment import Segment, Shape
from hp_onesided.planning.headers import Call
from hp_onesided.planning.steps import Program


@dataclass(frozen=True)
class Team:
    """The ranks of a group as a core needs them.

    Attributes:
        rank: this one, in the group.
        segments: of each rank.
        shape: of the segments.
        pids: of the ranks' processes.
        processes: a descriptor of each other rank's process, by rank.
        limit: seconds to wait for a rank.
    """

    rank: int
    segments: Sequence[Segment]
    shape: Shape
    pids: Sequence[int]
    processes: Mapping[int, int]
    limit: float


class Core(Protocol):
    """Runs programs over the memory of a group, one after the other in the order in which they came.

    What can't be done raises WaitError, and so does every later call: the ranks are no longer at the same place.
    """

    def prepare(self, program: Program, call: Call) -> Any:
        """Make of a program what `run` and `issue` take; it may be used again."""
        ...

    def run(self, prepared: Any, output: int, source: int) -> None:
        """Run a program, behind those that were issued.

        Args:
            prepared: the program.
            output: address of the output.
            source: address of the input.

        Raises:
            WaitError: the collective can't be done.
        """
        ...

    def issue(self, prepared: Any, output: int, source: int) -> int:
        """Let the group's thread run a program, and return its number; they count from 1.

        The program and the memory have to stay until `finished` says so.
        """
        ...

    def wait(self, number: int) -> None:
        """Wait until a program that was issued has run.

        Raises:
            WaitError: its collective couldn't be done.
        """
        ...

    def failed(self) -> bool:
        """Tell whether a collective couldn't be done, so that none can be done any more."""
        ...

    def finished(self) -> int:
        """Return the number of the last program that was issued and has run, well or not."""
        ...

    def calls(self) -> list[tuple[int, ...]]:
        """Read what each rank called last, as words."""
        ...

    def abort(self) -> None:
        """End what runs, here and on the ranks that wait for this one; from any thread."""
        ...

    def stop(self) -> None:
        """Run what was issued, then end the group's thread; the core is used no more."""
        ...


@functools.cache
def core_name() -> Literal["native", "python"] | None:
    """Name the core of this machine.

    Returns:
        "native" where the compiled core can be loaded, or made by the machine's C++ compiler; else "python", which does
        the same by PyTorch's operators, and needs up to half of gloo's time; None where neither works, as on macOS.
    """
    if library.library() is not None:
        return "native"
    return "python" if waiting.lacking() is None else None
