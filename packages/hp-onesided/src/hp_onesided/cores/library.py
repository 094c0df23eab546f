"""The compiled core, made once for each version of its source by the C++ compiler of the machine."""

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
_SOURCE = Path(__file__).with_name("core.cpp")
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

    It lies in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), in a folder named by its source and the compiler.
    The first process of a machine compiles for a few seconds, and others wait for it.
    """
    try:
        return _declare(ctypes.CDLL(str(_built())))
    except (OSError, RuntimeError) as error:  # also where the user has no home
        _log.info("hp_onesided: no compiled core, so the one in Python is used: %s", error)
        return None


def _built() -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if sys.platform != "linux" or compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is there" if sys.platform == "linux" else "it needs Linux")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(f"{compiler} {platform.machine()} {_FLAGS}".encode() + _SOURCE.read_bytes()).hexdigest()
    folder = Path(root, "hyper-parallel", "onesided")
    made = folder / f"core-{digest[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(compiler, made)
    return made


def _compile(compiler: str, made: Path) -> None:
    part = made.with_suffix(f".{os.getpid()}")
    command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)]
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
    core.hp_abort.restype = core.hp_stop.restype = core.hp_free.restype = None
    for name in ("finished", "count", "failure", "culprit", "abort", "stop", "free"):
        getattr(core, f"hp_{name}").argtypes = (address,)
    return core
