"""PyTorch's kinds of device, by `torch.accelerator` and the kind's device module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hp_platform.devices import devices
from hp_platform.port import Capabilities


def version() -> str:
    """Name the framework and its version."""
    return f"torch {torch.__version__}"


def present() -> tuple[str, ...]:
    """List the kinds that this machine has: "cpu", and the accelerator's if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def capabilities(kind: str) -> Capabilities:
    """Tell what a kind of device can do."""
    accelerator = kind != "cpu"
    return Capabilities(
        streams=accelerator, pinned_memory=accelerator, native_collectives=True, fused_operators=kind == "npu"
    )


def count(kind: str) -> int:
    """Count the accelerators."""
    return torch.accelerator.device_count()


def device_module(kind: str) -> Any:
    """Get `torch.cpu`, `torch.cuda` or `torch.npu`."""
    return torch.get_device_module(kind)


def current_device(kind: str) -> torch.device:
    """Get the device of this process."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def kind_of(device: torch.device) -> str:
    """Name the kind of a tensor's device."""
    return device.type


def has_memory(tensor: torch.Tensor | torch.UntypedStorage) -> bool:
    """Tell whether a tensor or a storage has memory; on the meta device it has a size alone."""
    return tensor.device.type != "meta"


def host_device() -> torch.device:
    """Get the device of the host's memory."""
    return torch.device("cpu")


def set_device(kind: str, index: int) -> None:
    """Use the device of this index; on CPU there is one and nothing to do."""
    if kind != "cpu":
        torch.accelerator.set_device_index(index)


def synchronize(kind: str) -> None:
    """Wait for the work queued on the current device; a CPU queues none."""
    if kind != "cpu":
        torch.accelerator.synchronize()


def stream(kind: str) -> Any:
    """Make a side stream; on CPU one that runs nothing aside."""
    return device_module(kind).Stream()


def cores(kind: str) -> dict[str, int]:
    """Count an accelerator's cores, by kind of core."""
    module, index = device_module(kind), torch.accelerator.current_device_index()
    if kind == "npu" and hasattr(module, "set_stream_limit"):
        limit = module.get_device_limit(index)
        return {"cube": limit["cube_core_num"], "vector": limit["vector_core_num"]}
    green = getattr(module, "green_contexts", None) if kind == "cuda" else None
    if green is not None and green.SUPPORTED and hasattr(green.GreenContext, "Stream"):
        return {"cube": module.get_device_properties(index).multi_processor_count}
    missing = {
        "npu": "torch.npu has no set_stream_limit; torch_npu 2.13 has it",
        "cuda": "torch.cuda has no green contexts with streams; builds of PyTorch 2.13 for CUDA have them",
    }
    raise RuntimeError(
        f"{version()} can't limit a stream to some cores: {missing.get(kind, f'it has no way to do so on {kind}')}"
    )


def share(kind: str, stream: Any, cube: int | None, vector: int | None) -> tuple[Any, Callable[[], None]]:
    """Limit a stream; on CUDA, make one that is limited."""
    if kind == "npu":
        numbers = (-1 if number is None else number for number in (cube, vector))
        module = device_module(kind)
        module.set_stream_limit(stream, *numbers)
        return stream, lambda: module.reset_stream_limit(stream)
    limited = _green_context(torch.accelerator.current_device_index(), cube).Stream()
    limited.wait_stream(stream)
    return limited, lambda: stream.wait_stream(limited)


@cache
def _green_context(index: int, multiprocessors: int) -> Any:
    """Get the green context of so many multiprocessors: kept, since its end would have to wait for its streams."""
    return torch.cuda.green_contexts.GreenContext.create(num_sms=multiprocessors, device_id=index)


def name(kind: str) -> str:
    """Name the current device as its maker does."""
    return device_module(kind).get_device_properties(torch.accelerator.current_device_index()).name


def total_memory(kind: str) -> int:
    """Get how many bytes the current device has."""
    return device_module(kind).get_device_properties(torch.accelerator.current_device_index()).total_memory


def peak_memory(kind: str) -> int:
    """Get the most bytes allocated so far."""
    return device_module(kind).max_memory_allocated()


def reset_peak_memory(kind: str) -> None:
    """Start the peak over."""
    device_module(kind).reset_peak_memory_stats()


def empty_cache(kind: str) -> None:
    """Give cached memory back."""
    device_module(kind).empty_cache()


host_observers: list[Callable[[torch.Tensor], None]] = []
"""Are told of each tensor that `empty_on_host` returns."""


def empty_on_host(size: int, dtype: torch.dtype, *, pin: bool = True, from_host: bool = False) -> torch.Tensor:
    """Allocate memory of the host, which dispatch modes do not see.

    Args:
        size: number of elements.
        dtype: of them.
        pin: page-locked, where the device copies from such memory beside the computation.
        from_host: for copies of tensors that are on the CPU whatever the device, which is never page-locked.
    """
    device = torch.device("cpu") if from_host else devices.host_device()
    with _disable_current_modes():
        pinned = pin and not from_host and devices.capabilities.pinned_memory
        memory = torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    for observer in host_observers:
        observer(memory)
    return memory
