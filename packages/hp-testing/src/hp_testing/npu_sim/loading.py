"""Putting this process, and those that it starts, on the simulation."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import os
import sys
import warnings
from typing import Any

from hp_testing.npu_sim import building

_ENVIRONMENT = {
    "TASK_QUEUE_ENABLE": "0",  # operators run in the calling thread
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # `import torch` imports torch_npu, as it does on a machine with an NPU
}


def missing() -> str | None:
    """Say what the simulation needs and this machine lacks, None if nothing."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if importlib.util.find_spec("torch_npu") is None:
        return "needs torch_npu in the version of torch: pip install 'torch-npu==2.13.*'"
    if building.compiler_missing():
        return f"needs {building.COMPILER} to compile its stand-in for CANN"
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
    folder = building.built()
    for name in (building.RUNTIME, *building.ALIASES):
        ctypes.CDLL(str(folder / building.library(name)), mode=ctypes.RTLD_GLOBAL)
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
    function = ctypes.CDLL(building.library("hccl")).npu_sim_communicators
    function.restype = ctypes.c_char_p
    return json.loads(function())
