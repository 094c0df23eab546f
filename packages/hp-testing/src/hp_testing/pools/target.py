"""The framework and the device of `--backend`, and tensors on it from arrays and back."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hp_platform.platforms.ports import platform_name

if TYPE_CHECKING:
    import numpy as np

TARGETS = ("torch-cpu", "torch-cuda", "torch-npu", "torch-npu-sim", "mindspore-cpu", "mindspore-ascend")
AUDIT = "HYPER_PARALLEL_AUDIT_STREAMS"
"""The environment's variable that turns the audit of streams on in the ranks of tests on a device."""
_KINDS = {"ascend": "npu"}  # where the backend's name says another word than the platform
_DEVICE = "HYPER_PARALLEL_DEVICE"
_PLATFORM = "HYPER_PARALLEL_PLATFORM"
_SIMULATED = "HYPER_PARALLEL_NPU_SIM"


def select(target: str) -> None:
    """Choose the framework and device of this process and all it starts.

    Args:
        target: one of TARGETS.
    """
    os.environ[_PLATFORM], device, *simulated = target.split("-")
    os.environ[_DEVICE] = _KINDS.get(device, device)
    # Ranks, and tests that run beside each other, share the cores: a second thread of each would wait for a core, and
    # the first one would spin meanwhile. Read when the framework is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank that compiles starts processes for it
    if os.environ[_PLATFORM] == "mindspore":
        os.environ.setdefault("GLOG_v", "3")  # errors only; its warnings tell of each connection
    if simulated:
        os.environ[_SIMULATED] = "1"
        from hp_testing import npu_sim

        if npu_sim.missing() is None:
            npu_sim.load()
    else:
        os.environ.pop(_SIMULATED, None)
    if os.environ[_DEVICE] == "cpu":
        # An accelerator's extension of torch is not needed, and not all can be loaded without their hardware.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def share_cores() -> None:
    """Let MindSpore compute in this process as it does on ranks; PyTorch does by what `select` has set."""
    if platform_name() == "mindspore" in sys.modules and missing() is None:
        _ranks().share_cores()


def device_type() -> str:
    """Name the kind of device that tests put their tensors on: "cpu", "cuda" or "npu".

    The same in the process that runs pytest and in the ranks.
    """
    selected = os.environ.get(_DEVICE)
    if selected:
        return selected
    from hp_platform.platforms.platform import get_platform

    return get_platform().devices.kind


def missing() -> str | None:
    """Say what the selected device needs and this machine lacks, None if nothing."""
    kind = os.environ.get(_DEVICE, "cpu")
    if kind == "cpu":
        return None
    if os.environ.get(_SIMULATED):
        from hp_testing import npu_sim

        needed = npu_sim.missing()
        return needed and f"--backend torch-npu-sim {needed}"
    from hp_platform.platforms.platform import get_platform

    platform = get_platform()
    present = platform.devices.present()
    if kind in present:
        return None
    device = {kind: name for name, kind in _KINDS.items()}.get(kind, kind) if platform.name == "mindspore" else kind
    return f"--backend {platform.name}-{device} needs a device of kind {kind}, this machine has: {', '.join(present)}"


def warning_filters() -> tuple[str, ...]:
    """List pytest's filters of warnings that are the device's own doing and not the tests'."""
    if os.environ.get(_DEVICE) != "npu":
        return ()
    # torch_npu's ways of copying a storage deeply, and of allocating what it communicates.
    return ("ignore:TypedStorage is deprecated:UserWarning", "ignore:Cannot create tensor with internal:UserWarning")


def as_tensor(array: Any, dtype: str | None = None) -> Any:
    """Make a tensor on the device in use.

    Args:
        array: an array, or what makes one.
        dtype: by its name, such as "bfloat16"; None keeps the array's.
    """
    import numpy as np

    values = np.asarray(array)
    return _ranks().as_tensor(values, dtype or values.dtype.name)


def as_array(tensor: Any) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    return _ranks().as_array(tensor)


def _ranks() -> Any:
    return importlib.import_module(f"hp_testing.{platform_name()}.ranks")
