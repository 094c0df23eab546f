"""MindSpore's kinds of device: the CPU and Ascend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore.graph.api import _pynative_executor

from hp_platform.port import Capabilities


def version() -> str:
    """Name the framework and its version."""
    return f"mindspore {mindspore.__version__}"


def present() -> tuple[str, ...]:
    """List the kinds that this machine has: "cpu", and "npu" where there is Ascend."""
    return ("cpu", "npu") if mindspore.device_context.ascend.is_available() else ("cpu",)


def capabilities(kind: str) -> Capabilities:
    """Tell what a kind of device can do."""
    ascend = kind == "npu"
    return Capabilities(streams=ascend, pinned_memory=ascend, native_collectives=ascend, fused_operators=ascend)


def count(kind: str) -> int:
    """Count the Ascend devices."""
    return mindspore.device_context.ascend.device_count()


def device_module(kind: str) -> Any:
    """Get `mindspore.runtime`, which has the streams and the memory of Ascend."""
    return mindspore.runtime


def current_device(kind: str) -> str:
    """Get the name of this process's device, as tensors have it: "CPU", or "Ascend:0"."""
    return "CPU" if kind == "cpu" else f"Ascend:{mindspore.context.get_context('device_id')}"


def kind_of(device: str) -> str:
    """Name the kind of a tensor's device, which has MindSpore's name."""
    return "cpu" if device == "CPU" else "npu"


def has_memory(tensor: Any) -> bool:
    """Tell that a tensor has memory; all do."""
    return True


def host_device() -> str:
    """Get the name of the host's device, as tensors have it."""
    return "CPU"


def set_device(kind: str, index: int) -> None:
    """Use the device of this index, once, before the first tensor is made."""
    if kind != "cpu":
        mindspore.set_device("Ascend", index)
    elif mindspore.context.get_context("device_target") != "CPU":
        mindspore.set_device("CPU")


def synchronize(kind: str) -> None:
    """Wait for the work that was started; what failed in it raises here."""
    _pynative_executor.sync()
    if kind != "cpu":
        mindspore.runtime.synchronize()


def stream(kind: str) -> Any:
    """Make a side stream; only Ascend has them."""
    if kind == "cpu":
        raise RuntimeError(
            "MindSpore has no streams on CPU: check get_platform().devices.capabilities.streams before creating one."
        )
    return mindspore.runtime.Stream()


def cores(kind: str) -> dict[str, int]:
    """Count Ascend's cores, by kind of core."""
    limit = mindspore.runtime.get_device_limit(mindspore.context.get_context("device_id"))
    return {"cube": limit["cube_core_num"], "vector": limit["vector_core_num"]}


def share(kind: str, stream: Any, cube: int | None, vector: int | None) -> tuple[Any, Callable[[], None]]:
    """Limit a stream."""
    numbers = (-1 if number is None else number for number in (cube, vector))
    mindspore.runtime.set_stream_limit(stream, *numbers)
    return stream, lambda: mindspore.runtime.reset_stream_limit(stream)


def name(kind: str) -> str:
    """Name the kind of device; MindSpore doesn't tell which of them it is."""
    return "Ascend"


def total_memory(kind: str) -> None:
    """Say nothing: MindSpore's answer is 0 until the device is used."""


def peak_memory(kind: str) -> int:
    """Get the most bytes allocated so far."""
    return mindspore.runtime.max_memory_allocated()


def reset_peak_memory(kind: str) -> None:
    """Start the peak over."""
    mindspore.runtime.reset_max_memory_allocated()


def empty_cache(kind: str) -> None:
    """Give cached memory back."""
    mindspore.runtime.empty_cache()
