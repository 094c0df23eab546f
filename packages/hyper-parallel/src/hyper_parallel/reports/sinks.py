"""Where a run's metrics go besides the display: JSON lines, TensorBoard, Weights & Biases, and sinks of one's own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.reports.output import strict

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The library, and the extra, of each sink that a plan may name: see `metrics.sinks`."""


class Sink(Protocol):
    """A place for metrics; rank 0's."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, counted from 1."""
        ...

    def text(self, name: str, value: str) -> None:
        """Take a text, such as the resolved plan."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class JsonLines:
    """A line of JSON a step, written at once: a killed run leaves no half line.

    A metric that is no number, or infinite, is null: JSON has no word for it.

    Args:
        path: the file, to whose end lines are added.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of a step."""
        line = (json.dumps({"step": step, **strict(metrics)}, allow_nan=False) + "\n").encode()
        while line:  # a full disk may take a part, and then says why
            line = line[os.write(self._file, line) :]

    def text(self, name: str, value: str) -> None:
        """Leave texts to the run's folder."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class TensorBoard:
    """Event files that TensorBoard shows.

    Args:
        folder: of the files.
        after: a step; those after it that another start of the run has written are not shown.

    Raises:
        ImportError: tensorboardX isn't installed.
    """

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        purge = {"purge_step": after + 1} if after else {}
        self._writer = _library("tensorboard").SummaryWriter(str(folder), **purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, value: str) -> None:
        """Add a text."""
        self._writer.add_text(name, "".join(f"    {line}\n" for line in value.splitlines()))

    def close(self) -> None:
        """Write and close the files."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; project, mode and keys come from its own environment variables (`WANDB_MODE=offline`).

    Args:
        folder: where its files go.
        name: of the run.
        config: values to search runs by.
        identity: of the run, which goes on under it; None is a new one.

    Raises:
        ImportError: wandb isn't installed.
    """

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any], identity: str | None = None) -> None:
        same = {} if identity is None else {"id": identity, "resume": "allow"}
        self._run = _library("wandb").init(dir=str(folder), name=name, config=dict(config), **same)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        self._run.log(dict(metrics), step=step)

    def text(self, name: str, value: str) -> None:
        """Keep a text in the run's summary."""
        self._run.summary[name] = value

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Background:
    """A sink in a thread of its own: the run neither waits for it nor fails with it.

    A sink that raises is left alone from then on, after a warning. One that falls behind by `limit` calls loses the
    oldest, which `close` reports.

    Args:
        name: of the sink, for warnings.
        make: opens the sink, in its thread.
        limit: calls that wait at most.
        patience: seconds that `close` waits.
    """

    def __init__(self, name: str, make: Callable[[], Sink], *, limit: int = 4096, patience: float = 5.0) -> None:
        self._name, self._limit, self._patience = name, limit, patience
        self._calls: deque[Callable[[Sink], None]] = deque()
        self._changed, self._closing, self._lost = threading.Condition(), False, 0
        self._error: BaseException | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._serve, args=(make,), name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of a step."""
        values = dict(metrics)
        self._hand(lambda sink: sink.write(step, values))

    def text(self, name: str, value: str) -> None:
        """Hand over a text."""
        self._hand(lambda sink: sink.text(name, value))

    def close(self) -> None:
        """Wait until all is written, for `patience` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(self._patience)
        self._warn()
        if self._thread.is_alive():
            left = len(self._calls)
            text = f"the sink {self._name} still blocks after {self._patience:g} s; {left} calls are not written"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if self._lost:
            text = f"the sink {self._name} was too slow: {self._lost} of its oldest calls are not written"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _hand(self, call: Callable[[Sink], None]) -> None:
        self._warn()
        if self._error is not None:
            return
        with self._changed:
            if len(self._calls) == self._limit:
                self._calls.popleft()
                self._lost += 1
            self._calls.append(call)
            self._changed.notify()

    def _warn(self) -> None:
        """Warn once, in the run's own thread, of what the sink raised."""
        if self._error is not None and not self._warned:
            self._warned = True
            text = f"the sink {self._name} failed and gets no more metrics: {type(self._error).__name__}: {self._error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _serve(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (call := self._next()) is not None:
                call(sink)
            sink.close()
        except BaseException as error:
            self._error = error

    def _next(self) -> Callable[[Sink], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closing)
            return self._calls.popleft() if self._calls else None


def open_sinks(names: Sequence[str], folder: Path, record: Mapping[str, Any]) -> list[Background]:
    """Open the sinks of a plan's `metrics.sinks`, each in the background, and give them the run's record.

    Args:
        names: of the sinks.
        folder: of the run.
        record: of the run, whose last start is the one that goes on now.
    """
    start = record["starts"][-1]
    makes: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", after=start["step"]),
        "wandb": lambda: WeightsAndBiases(folder, name=folder.name, config=start, identity=record["id"]),
    }
    opened = [Background(name, makes[name]) for name in dict.fromkeys(names)]
    for sink in opened:
        sink.text("run", json.dumps(start, indent=1))
    return opened


def missing(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the sinks whose library isn't installed, each with its library."""
    return [(name, LIBRARIES[name]) for name in names if importlib.util.find_spec(LIBRARIES[name]) is None]


def _library(sink: str) -> Any:
    try:
        return importlib.import_module(LIBRARIES[sink])
    except ImportError as error:
        text = f"the sink {sink} needs {LIBRARIES[sink]}: pip install 'hyper-parallel[{sink}]'"
        raise ImportError(text) from error
