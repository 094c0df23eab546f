"""The simulation compiled, once for each version of what it is made from, and loaded into this process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMPILER = "g++"
HERE = Path(__file__).parent
RUNTIME = "ascendcl"
# torch_npu is linked against these as well, or opens them by name; all that is asked of them is in the runtime.
ALIASES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "runtime", "opapi")
SHIM = "npu_sim_shim"
# Folders that torch_npu looks for in an installation of CANN.
PARTS = ("runtime", "compiler", "opp")
_FLAGS = ("-std=c++17", "-O1", "-fPIC")
_ENVIRONMENT = {
    "TASK_QUEUE_ENABLE": "0",  # operators run in the calling thread
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # `import torch` imports torch_npu, as it does on a machine with an NPU
}


def library(name: str) -> str:
    """Name the file of a library."""
    return f"lib{name}.so"


def built() -> Path:
    """Get the folder of the compiled libraries, compiling them if they aren't there.

    The folder's name is a hash of the sources and of the versions of the compiler, torch and torch_npu. It is filled
    under another name and then renamed, so that processes may build at the same time.

    Raises:
        RuntimeError: the compiler failed; with what it said.
    """
    folder = _cache() / _fingerprint()
    if folder.is_dir():
        return folder
    sys.stderr.write(f"compiling the stand-in for CANN with {COMPILER}, once, for half a minute or more: {folder}\n")
    sys.stderr.flush()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as temporary:
        target = Path(temporary, "libraries")
        target.mkdir()
        _build(target, Path(temporary))
        try:
            target.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "hyper-parallel", "npu-sim")


def _sources(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.cpp"))


def _fingerprint() -> str:
    digest = hashlib.sha256()
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    parts = [version, *(importlib.metadata.version(name).encode() for name in ("torch", "torch-npu"))]
    parts += [Path(__file__).read_bytes(), *(path.read_bytes() for path in sorted(HERE.glob("*/*")) if path.is_file())]
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _build(target: Path, scratch: Path) -> None:
    for part in PARTS:
        (target / part).mkdir()
    torch, torch_npu = _package("torch"), _package("torch_npu")
    third_party = torch_npu / "include" / "third_party"
    cann = [torch_npu / "include", third_party / "acl" / "inc", third_party / "hccl" / "inc"]
    aten = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    jobs = [(path, cann) for path in _sources("cann")] + [(path, aten + cann) for path in _sources("shim")]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        objects = dict(executor.map(lambda job: (job[0], _compile(job[0], job[1], scratch)), jobs))

    _link(target, RUNTIME, [objects[path] for path in _sources("cann")], ["-lpthread", "-ldl"])
    for name in ALIASES:
        _link(target, name, [], ["-Wl,--no-as-needed", f"-L{target}", f"-l{RUNTIME}"])
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{target}", f"-l{RUNTIME}"]
    _link(target, SHIM, [objects[path] for path in _sources("shim")], libraries)


def _compile(source: Path, includes: Iterable[Path], scratch: Path) -> Path:
    output = scratch / f"{source.parent.name}-{source.stem}.o"
    headers = [argument for folder in includes for argument in ("-isystem", str(folder))]
    _run([COMPILER, *_FLAGS, "-Wall", *headers, "-c", str(source), "-o", str(output)])
    return output


def _link(target: Path, name: str, objects: Iterable[Path], others: Iterable[str]) -> None:
    output = target / library(name)
    soname = f"-Wl,-soname,{output.name}"
    _run([COMPILER, "-shared", soname, "-Wl,-rpath,$ORIGIN", "-o", str(output), *map(str, objects), *others])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the NPU simulation does not compile:\n{' '.join(command)}\n{done.stderr.strip()}")


def missing() -> str | None:
    """Say what the simulation needs and this machine lacks, None if nothing."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if importlib.util.find_spec("torch_npu") is None:
        return "needs torch_npu in the version of torch: pip install 'torch-npu==2.13.*'"
    if shutil.which(COMPILER) is None:  # nothing to compile with
        return f"needs {COMPILER} to compile its stand-in for CANN"
    return None


@functools.cache
def load() -> None:
    """Make NPUs appear in this process and in those that it starts from now on; torch_npu must not be imported yet.

    The first call on a machine compiles for half a minute.

    Note [Two ways in]: the dynamic linker looks for CANN's libraries in LD_LIBRARY_PATH, which it reads when a process
    starts: that is for the processes that this one starts. In this one they are loaded by their paths, so that those
    names are taken when torch_npu asks for them.

    Raises:
        RuntimeError: the simulation does not compile.
    """
    folder = built()
    for name in (RUNTIME, *ALIASES):
        ctypes.CDLL(str(folder / library(name)), mode=ctypes.RTLD_GLOBAL)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ.update(
        _ENVIRONMENT,
        LD_LIBRARY_PATH=os.pathsep.join(paths),
        ASCEND_HOME_PATH=str(folder),
        ASCEND_OPP_PATH=str(folder / "opp"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu's sources have invalid escape sequences, for one
        importlib.import_module("torch_npu")


def communicators() -> list[dict[str, Any]]:
    """List what this process's HCCL communicators were made with, in the order they were made.

    Each has "size", "rank", "name", "buffer_size" (MB) and "exec_timeout" (seconds); -1 is CANN's default.
    """
    function = ctypes.CDLL(library("hccl")).npu_sim_communicators
    function.restype = ctypes.c_char_p
    return json.loads(function())
