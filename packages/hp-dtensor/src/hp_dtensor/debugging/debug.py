"""The communication of a program, by its place in the program: `CommDebugMode`.

It records the collectives of `hp_platform`, which are all that these packages issue.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from hp_dtensor import port
from hp_dtensor.debugging.visualize import text_table
from hp_dtensor.layout.spec import meshes as known_meshes
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_platform import get_platform
from hp_platform.extend import observers, own_rank

_LIBRARIES = ("torch", "torch_npu", "mindspore", "hyper_parallel", "contextlib", "functools", "threading")
_COLUMNS = ("phase", "module", "kind", "axis", "file", "line")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that this process issued.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"send"``,
            ``"recv"`` or ``"barrier"``.
        axis: the mesh axis, or the ranks as ``"ranks 0-3"`` if they do not form an axis of a known mesh.
        bytes: size of the larger of its tensors.
        phase: ``"backward"`` in autograd's backward, otherwise ``"forward"``.
        module: name of the module that communicates, after the class of the outermost module:
            ``"Transformer.layers.0.mlp"``. In backward, the module whose operation is being differentiated. For
            `fully_shard`, the module whose parameters are gathered or whose gradients are reduced. Empty outside of
            modules, and for work on several modules at once, such as reducing parameter gradients after backward.
        file: the file of ``line``; empty if no frame is the user's.
        line: the innermost line outside of the framework and of these packages; in backward, the line that called
            backward.
        start: nanoseconds since 1970.
        duration: nanoseconds on the host from issue until the end of the wait for it; None if nobody waited.
    """

    kind: str
    axis: str
    bytes: int
    phase: str
    module: str
    file: str
    line: int
    start: int
    duration: int | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over collectives.

    Attributes:
        calls: the number of collectives.
        bytes: the sum of their sizes.
    """

    calls: int = 0
    bytes: int = 0


class CommDebugMode:
    """Context manager that records each collective: its kind, bytes, mesh axis, module, line, phase and time.

    It may be entered again, nested or later, and then adds to its records; several may be active at a time. It costs
    nothing outside the ``with``. On MindSpore, the module of a collective in backward is only known for those of
    `fully_shard`.

    Example:
        >>> with CommDebugMode() as comm:
        ...     model(tokens).sum().backward()
        >>> comm.totals("phase", "kind")                        # row parallel, then its input's gradient
        {('forward', 'all_reduce'): Total(calls=1, bytes=4096), ('backward', 'all_reduce'): Total(calls=1, bytes=4096)}
        >>> print(comm.table())

    Args:
        mesh: the mesh or meshes whose axis names to use. Default: those of all living DTensors; if the same ranks have
            several names, these are joined by ``|``.
    """

    def __init__(self, *, mesh: DeviceMesh | Sequence[DeviceMesh] | None = None) -> None:
        self._meshes = [mesh] if isinstance(mesh, DeviceMesh) else mesh
        self._events: list[Collective] = []
        self._lock = threading.Lock()
        self._depth = 0
        self._thread = 0
        self._modules: port.Watched = port.debug().Modules()
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def __enter__(self) -> CommDebugMode:
        if not self._depth:
            self._thread = threading.get_ident()
            self._modules.start()
            observers.append(self._observe)
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            observers.remove(self._observe)
            self._modules.stop()

    # ---- results ----
    @property
    def events(self) -> tuple[Collective, ...]:
        """All collectives, in the order in which they were issued."""
        return tuple(self._events)

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return len(self._events)

    def get_comm_counts(self) -> dict[str, int]:
        """Return the number of collectives of each kind."""
        return dict(Counter(event.kind for event in self._events))

    def totals(self, *by: str) -> dict[tuple[Any, ...], Total]:
        """Sum calls and bytes over the collectives that agree in the named attributes.

        ``totals("kind", "axis")`` has a total for each ``(kind, axis)``, in the order of their first collective;
        ``totals()`` has one, for ``()``.

        Args:
            by: names of attributes of `Collective`.

        Raises:
            ValueError: an unknown attribute.
        """
        names = [field.name for field in fields(Collective)]
        unknown = [name for name in by if name not in names]
        if unknown:
            raise ValueError(f"totals: {unknown[0]!r} is not an attribute of Collective, which has {', '.join(names)}")
        sums: dict[tuple[Any, ...], Total] = {} if by else {(): Total()}
        for event in self._events:
            key = tuple(getattr(event, name) for name in by)
            total = sums.get(key, Total())
            sums[key] = Total(total.calls + 1, total.bytes + event.bytes)
        return sums

    def table(self) -> str:
        """Return calls and bytes by phase, module, kind, axis and line, as text; the last row is their sum."""
        rows = []
        for (*key, file, line), total in self.totals(*_COLUMNS).items():
            rows.append(
                [*key, f"{total.calls}", f"{total.bytes:,}", f"{os.path.basename(file)}:{line}" if file else ""]
            )
        everything = self.totals()[()]
        rows.append(["total", "", "", "", f"{everything.calls}", f"{everything.bytes:,}", ""])
        return text_table(["phase", "module", "kind", "axis", "calls", "bytes", "line"], rows)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the collectives as trace events for chrome://tracing or Perfetto: a process per rank, a row per axis.

        Times are wall-clock times, so that the files of several ranks can be loaded together. A collective that nobody
        waited for is an instant.

        Args:
            path: the JSON file.
        """
        rank = own_rank()
        rows = {axis: row for row, axis in enumerate(dict.fromkeys(event.axis for event in self._events))}
        trace: list[dict[str, Any]] = [_label("process_name", rank, 0, f"rank {rank}")]
        trace += [_label("thread_name", rank, row, axis) for axis, row in rows.items()]
        for event in self._events:
            arguments = asdict(event)
            start, duration = arguments.pop("start"), arguments.pop("duration")
            trace.append(
                {
                    "name": event.kind,
                    "cat": event.phase,
                    "ts": start / 1000,  # microseconds
                    "pid": rank,
                    "tid": rows[event.axis],
                    "args": arguments,
                }
                | ({"ph": "i", "s": "t"} if duration is None else {"ph": "X", "dur": duration / 1000})
            )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": trace, "displayTimeUnit": "ms"}, file)

    # ---- recording ----
    def _observe(self, kind: str, size: int, group: Any) -> Callable[[], None]:
        frame = sys._getframe(1)
        phase, module = self._modules.place(frame)
        file, line = self._line(frame)
        axis = _axis(get_platform().groups.ranks(group), known_meshes() if self._meshes is None else self._meshes)
        clock = time.perf_counter_ns()
        with self._lock:
            index = len(self._events)
            self._events.append(Collective(kind, axis, size, phase, module, file, line, self._epoch + clock))

        def done() -> None:
            self._events[index] = replace(self._events[index], duration=time.perf_counter_ns() - clock)

        return done

    def _line(self, frame: FrameType) -> tuple[str, int]:
        """Return the user's line above a frame; in autograd's threads, the one that the context's thread executes."""
        return _user_line(frame) or _user_line(sys._current_frames().get(self._thread)) or ("", 0)


class Names:
    """Names of modules, prefixed by the class of the outermost module.

    Args:
        named_modules: returns a module and all modules inside it, by name.
    """

    def __init__(self, named_modules: Callable[[Any], Mapping[str, Any]]) -> None:
        self._named_modules = named_modules
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def of(self, running: Sequence[Any]) -> str:
        """Return the name of the innermost of the running modules, listed from the innermost to the outermost."""
        if not running:
            return ""
        module, root = running[0], running[-1]
        if module not in self._names:
            top = self._names.get(root, type(root).__name__)
            for name, each in reversed(list(self._named_modules(root).items())):  # of several names keep the first
                self._names[each] = f"{top}.{name}" if name else top
        if module not in self._names:  # created in a forward, not a submodule
            return f"{self.of(running[1:])}.({type(module).__name__})"
        return self._names[module]


def running(frame: FrameType | None, kind: type) -> list[Any]:
    """Return the modules that are running at a frame, from the innermost to the outermost.

    A module runs while its ``__call__`` does, which includes more than forward: fully_shard gathers there.

    Args:
        frame: the innermost frame.
        kind: the framework's module class.
    """
    modules: list[Any] = []
    while frame is not None:
        if frame.f_code.co_name in ("__call__", "_call_impl"):
            module = frame.f_locals.get("self")
            if isinstance(module, kind) and not (modules and modules[-1] is module):
                modules.append(module)
        frame = frame.f_back
    return modules


def _user_line(frame: FrameType | None) -> tuple[str, int] | None:
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LIBRARIES and not package.startswith("hp_"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _axis(ranks: Sequence[int], meshes: Iterable[DeviceMesh]) -> str:
    """Return the names of the mesh axes along which these ranks lie, or the ranks if no mesh has such an axis."""
    names: dict[str, None] = {}
    related = (each for listed in meshes for each in (listed, listed.root, *listed.root._flattened.values()))
    for mesh in dict.fromkeys(related):
        coordinate = mesh.get_coordinate()
        for axis in range(mesh.ndim) if coordinate is not None else ():
            line: list[Any] = list(coordinate or ())
            line[axis] = slice(None)
            if sorted(mesh.ranks[tuple(line)].tolist()) == sorted(ranks):
                names[mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else f"axis{axis}"] = None
    return "|".join(sorted(names)) or f"ranks {', '.join(map(str, ranks))}"


def _label(name: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": row, "args": {"name": text}}
