"""One rank: it joins the default group, finds functions by their names, and runs them until the pool hangs up."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hp_platform import groups, random
from hp_platform.platforms.launchers import end_with_parent
from hp_platform.platforms.platform import get_platform

BODY = "__rank_body__"


class Reference(NamedTuple):
    """Where a module-level function is.

    Attributes:
        module: the module's name.
        file: its file, None for a built-in module.
        name: the function's name in it.
    """

    module: str
    file: str | None
    name: str


def refer(function: Callable[..., Any]) -> Reference:
    """Name a module-level function.

    Raises:
        TypeError: the function is a lambda, nested, or a method.
    """
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise TypeError(
            f"ranks find a function by its module and name, got {name or function!r}: "
            "define it at a module's top level."
        )
    module = sys.modules.get(function.__module__)
    return Reference(function.__module__, getattr(module, "__file__", None), name)


def resolve(reference: Reference) -> Callable[..., Any]:
    """Find the function again, loading its module if it isn't."""
    function = getattr(_module(reference.module, reference.file), reference.name)
    return getattr(function, BODY, function)


def _module(name: str, file: str | None) -> ModuleType:
    if name == "__main__" and "__mp_main__" in sys.modules:
        return sys.modules["__mp_main__"]
    loaded = sys.modules.get(name)
    if loaded is not None and (file is None or getattr(loaded, "__file__", None) == file):
        return loaded
    if file is None or _importable(name, file):
        return importlib.import_module(name)
    # A module that pytest loaded by its path: load it the same way, asserts rewritten so that they show their values.
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    if "pytest" in sys.modules or b"pytest" in source:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source)
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(name: str, file: str) -> bool:
    if Path(file).name.startswith(("test_", "conftest")):
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == file


SEED = 0


class Start(NamedTuple):
    """What a rank needs to begin.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        environment: the environment variables of the process that asked.
        path: its `sys.path`.
        stacks: the file that the stacks go to on SIGUSR1.
    """

    rank: int
    world_size: int
    environment: dict[str, str]
    path: list[str]
    stacks: str


class Task(NamedTuple):
    """One run of a function.

    Attributes:
        function: what to run.
        arguments: pickled (args, kwargs).
        filters: warning filters as pytest spells them, None to leave them alone.
    """

    function: Reference
    arguments: bytes
    filters: tuple[tuple[str, ...], tuple[str, ...]] | None


class Outcome(NamedTuple):
    """How a run ended on one rank.

    Attributes:
        kind: "returned", "raised" or "skipped".
        value: the pickled result, the traceback, or the reason.
        issued: how many collectives the rank has issued so far in each of its groups, by the group's ranks.
        broken: it has broken its connections to the others, as a run does that saves its last step when it fails.
    """

    kind: str
    value: Any
    issued: dict[tuple[int, ...], int]
    broken: bool = False


def main(connection: Connection, start: Start) -> None:
    """Live as a rank; the target of the process."""
    os.setsid()  # Ctrl-C is the pool's to handle, and what a rank starts ends with it
    end_with_parent()
    stacks = open(start.stacks, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.path[:] = start.path
    try:
        framework = importlib.import_module(f"hp_testing.{get_platform().name}.ranks")
        framework.join(start.rank, start.world_size, connection.send, connection.recv)
    except BaseException:
        connection.send(Outcome("raised", traceback.format_exc(), {}))
        os._exit(1)
    gc.freeze()  # collections leave out the million objects that the libraries' imports have made
    connection.send(Outcome("returned", None, {}))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)  # no clean-up: the peers may be gone, and there is nothing to save
        connection.send(_run(task, framework))


def _run(task: Task, framework: Any) -> Outcome:
    framework.seed(SEED)
    random._seed = None  # what an earlier run has given to `manual_seed`
    try:
        with _filtered(task.filters):
            function = resolve(task.function)
            args, kwargs = pickle.loads(task.arguments)
            with _undone(kwargs) as own:
                kind, value = "returned", pickle.dumps(function(*args, **own))
            get_platform().devices.synchronize()  # what fails late fails in this run
            framework.check_streams()
    except BaseException as error:
        if type(error).__name__ == "Skipped":  # pytest.skip() in the body
            kind, value = "skipped", str(error)
        else:
            kind, value = "raised", _traceback(error)
    sys.stdout.flush()  # into what pytest captured for this test
    sys.stderr.flush()
    return Outcome(kind, value, framework.issued(), groups.is_broken())


@contextlib.contextmanager
def _undone(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the function patches of its own in this process, and undo them at its end, as pytest does in its own."""
    patches = {name: type(value)() for name, value in kwargs.items() if type(value).__name__ == "MonkeyPatch"}
    try:
        yield {**kwargs, **patches}
    finally:
        for patch in patches.values():
            patch.undo()


@contextlib.contextmanager
def _filtered(filters: tuple[tuple[str, ...], tuple[str, ...]] | None) -> Iterator[None]:
    if filters is None:
        yield
        return
    from _pytest.config import apply_warning_filters

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=DeprecationWarning)
        warnings.filterwarnings("always", category=PendingDeprecationWarning)
        apply_warning_filters(*filters)
        yield


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
