"""A run shown by the launcher: rank 0 writes what happens to a file, the launcher reads it.

Note [Around the live table]
A table that is drawn again and again stays whole only if one process writes to the terminal and knows of each line that
comes between. Python's own lines could be caught in a rank, but not those of native code, nor those of other ranks. So
ranks write to files what would go to the terminal; the launcher draws the table, and prints their lines above it.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.reports.display import Reporter
from hyper_parallel.reports.output import Step, Summary

_POLL = 0.1
_STREAMS = {1: "stdout", 2: "stderr"}


class EventWriter:
    """A reporter that writes a line of JSON for each call.

    Args:
        path: the file, to whose end lines are added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def running(self, title: str, *, steps: int) -> Iterator[None]:
        """Write the title before the steps, and an end after them."""
        self._line(running={"title": title, "steps": steps})
        yield
        self._line(over={})

    def step(self, step: Step) -> None:
        """Write the step."""
        self._line(step=dataclasses.asdict(step))

    def finished(self, summary: Summary) -> None:
        """Write the summary."""
        self._line(finished=dataclasses.asdict(summary))

    def _line(self, **event: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


class Tail:
    """Text that is appended to a file, read incrementally.

    Args:
        path: the file; it may come later.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._begun = path, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return the text added since the last call, without a character that is half written."""
        if not self._path.exists():
            return ""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        return self._decoder.decode(added)

    def lines(self, *, ended: bool = False) -> list[str]:
        """Return the lines added since the last call; one that is half written waits for its end.

        Args:
            ended: nothing is written any more.
        """
        *whole, self._begun = (self._begun + self.read()).split("\n")
        if ended and self._begun:
            whole.append(self._begun)
            self._begun = ""
        return whole


class EventReader:
    """A reader that passes an EventWriter's events to another reporter as they come, and closes it at the end.

    Args:
        path: the writer's file; it may come later.
        reporter: shows the run.
    """

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self._tail, self._reporter = Tail(path), reporter
        self._open = contextlib.ExitStack()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def poll(self) -> None:
        """Show the events written since the last call."""
        for line in self._tail.lines():
            self._show(json.loads(line))

    def _show(self, event: dict[str, Any]) -> None:
        ((kind, values),) = event.items()
        if kind == "running":
            self._open.enter_context(self._reporter.running(values["title"], steps=values["steps"]))
        elif kind == "over":
            self._open.close()
        elif kind == "step":
            self._reporter.step(Step(**_fields(values)))
        else:
            self._reporter.finished(Summary(**_fields(values)))


def hand_over_output(folder: Path) -> None:
    """Let the launcher show what this process, native code included, would write to a terminal.

    See Note [Around the live table]. A stream that is no terminal stays what it is.

    Args:
        folder: shared with the launcher.
    """
    for number, name in _STREAMS.items():
        if os.isatty(number):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)


@contextlib.contextmanager
def showing(events: Path, reporter: Reporter) -> Iterator[None]:
    """Show what happens inside: the events of a run, and the lines that ranks have handed over (`hand_over_output`).

    Args:
        events: the file of the rank that writes them, in the folder that is shared with all ranks.
        reporter: shows the run.
    """
    tails = {name: Tail(events.with_name(name)) for name in _STREAMS.values()}
    over = threading.Event()

    def show(*, ended: bool = False) -> None:
        for name, tail in tails.items():
            for line in tail.lines(ended=ended):
                print(line, file=getattr(sys, name), flush=True)
        reader.poll()

    def watch() -> None:
        while not over.wait(_POLL):
            show()

    with EventReader(events, reporter) as reader:
        thread = threading.Thread(target=watch, name="hyper-parallel screen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            show(ended=True)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return a value's fields: a list of JSON is a tuple there."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
