"""The compiled core: that of the wheel, or made once for each version of its source by the machine's C++ compiler."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
SHIPPED = Path(__file__).with_name("libcore.so")
"""Where a wheel for a platform has the core; see `hatch_build.py`."""
_SOURCES = [Path(__file__).with_name(name) for name in ("core.cpp", "codec.cpp")]
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fwrapv", "-ffp-contract=off")
_log = logging.getLogger("hp_onesided")


class Step(ctypes.Structure):
    """A step, as the core reads it."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "peer")),
        *((name, ctypes.c_uint64) for name in ("slot", "at", "own", "piece", "stride", "end")),
    ]


class Program(ctypes.Structure):
    """A program, as the core reads it."""

    _fields_ = [
        ("steps", ctypes.POINTER(Step)),
        ("words", ctypes.POINTER(ctypes.c_uint64)),
        ("chunk", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("count", "word_count", "rounds", "dtype", "op")),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled core, and compile it first where that has not been done; None where it can't be.

    It came with the package where that was installed from a wheel for this platform. Else it lies in the user's cache
    (`XDG_CACHE_HOME`, else `~/.cache`), in a folder named by its source and the compiler.
    The first process of a machine compiles for a few seconds, and others wait for it.
    """
    try:
        return _declare(ctypes.CDLL(str(SHIPPED if SHIPPED.exists() else _built())))
    except (OSError, RuntimeError) as error:  # also where the user has no home
        _log.info("hp_onesided: no compiled core, so the one in Python is used: %s", error)
        return None


def _built() -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if sys.platform != "linux" or compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is there" if sys.platform == "linux" else "it needs Linux")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    digest = hashlib.sha256(f"{compiler} {platform.machine()} {_FLAGS}".encode() + sources).hexdigest()
    folder = Path(root, "hyper-parallel", "onesided")
    made = folder / f"core-{digest[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                compile_core(compiler, made)
    return made


def compile_core(compiler: str, made: Path, *options: str) -> None:
    """Compile the core.

    Args:
        compiler: its command.
        made: the library's path.
        options: more of the compiler's.

    Raises:
        OSError: it failed; with what it said.
    """
    part = made.with_suffix(f".{os.getpid()}")
    command = [compiler, *_FLAGS, *options, *map(str, _SOURCES), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")
        part.rename(made)
    finally:
        part.unlink(missing_ok=True)


def _declare(core: ctypes.CDLL) -> ctypes.CDLL:
    address, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
    core.hp_open.restype = address
    core.hp_open.argtypes = (
        *(integer, integer, ctypes.POINTER(number), ctypes.POINTER(integer)),
        *(number, number, number, ctypes.c_double, integer, integer),
    )
    core.hp_run.argtypes = core.hp_issue.argtypes = (address, ctypes.POINTER(Program), address, address)
    core.hp_wait.argtypes = (address, number)
    core.hp_issue.restype = core.hp_finished.restype = number
    core.hp_count.restype = ctypes.c_uint32
    core.hp_add.argtypes = (address, number)
    core.hp_await.argtypes = (
        *(address, number, address, ctypes.POINTER(integer), integer),
        *(ctypes.c_double, integer, integer, ctypes.POINTER(integer)),
    )
    core.hp_reduce.argtypes = (integer, integer, address, ctypes.POINTER(number), integer, number)
    core.hp_encode.argtypes = *(integer, address, address), *(number,) * 4, ctypes.POINTER(ctypes.c_uint32)
    core.hp_decode.argtypes = *(integer, address, address), *(number,) * 4
    core.hp_encode.restype = core.hp_decode.restype = None
    core.hp_add.restype = core.hp_reduce.restype = None
    core.hp_abort.restype = core.hp_stop.restype = core.hp_free.restype = None
    for name in ("finished", "count", "failure", "culprit", "abort", "stop", "free"):
        getattr(core, f"hp_{name}").argtypes = (address,)
    return core
