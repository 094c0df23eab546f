"""PyTorch's kinds of device, by `torch.accelerator` and the kind's device module."""

from __future__ import annotations

from typing import Any

import torch

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
