"""A run shown by the launcher: rank 0 writes what happens to a file, the launcher reads it."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.display import Reporter
from hyper_parallel.output import Step, Summary


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
        self._path, self._read = path, 0
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


class EventReader:
    """A reader that passes an EventWriter's events to another reporter as they come, and closes it at the end.

    Args:
        path: the writer's file; it may come later.
        reporter: shows the run.
    """

    def __init__(self, path: Path, reporter: Reporter) -> None:
        self._tail, self._reporter, self._begun = Tail(path), reporter, ""
        self._open = contextlib.ExitStack()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def poll(self) -> None:
        """Show the events written since the last call."""
        *whole, self._begun = (self._begun + self._tail.read()).split("\n")
        for line in whole:
            self._show(json.loads(line))

    def _show(self, event: dict[str, Any]) -> None:
        ((kind, values),) = event.items()
        if kind == "running":
            self._open.enter_context(self._reporter.running(values["title"], steps=values["steps"]))
        elif kind == "over":
            self._open.close()
        elif kind == "step":
            self._reporter.step(Step(**{**values, "texts": tuple(values["texts"])}))
        else:
            fields: dict[str, Any] = {n: tuple(each) if isinstance(each, list) else each for n, each in values.items()}
            self._reporter.finished(Summary(**fields))
