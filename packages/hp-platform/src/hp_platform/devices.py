"""The kind of device in use."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from hp_platform.platforms.launchers import memory_bytes, peak_resident_bytes, processor_name, reset_peak_resident_bytes
from hp_platform.platforms.ports import choose_kind
from hp_platform.port import Capabilities, port


class Devices:
    """The kind of device that this process trains on; one object, `devices`."""

    @property
    def kind(self) -> str:
        """Name the kind, "cpu", "cuda" or "npu": what HYPER_PARALLEL_DEVICE says, else the accelerator, else "cpu"."""
        return self._kind

    @cached_property
    def _kind(self) -> str:
        own = port().devices
        return choose_kind(own.present, own.version())

    def present(self) -> tuple[str, ...]:
        """List the kinds that this machine has, "cpu" first."""
        return port().devices.present()

    @property
    def capabilities(self) -> Capabilities:
        """Tell what this kind of device can do."""
        return port().devices.capabilities(self.kind)

    @property
    def count(self) -> int:
        """Count the devices of this kind on this machine; a machine has one CPU."""
        return 1 if self.kind == "cpu" else port().devices.count(self.kind)

    def device_module(self) -> Any:
        """Get the framework's module for this kind of device, such as `torch.cuda`."""
        return port().devices.device_module(self.kind)

    def current_device(self) -> Any:
        """Get this process's device: a `torch.device`, or on MindSpore its name as tensors have it ("Ascend:0")."""
        return port().devices.current_device(self.kind)

    def kind_of(self, device: Any) -> str:
        """Name the kind of a tensor's device, "cpu", "cuda" or "npu": where kernels are chosen by it."""
        return port().devices.kind_of(device)

    def has_memory(self, tensor: Any) -> bool:
        """Tell whether a tensor or a storage has memory for its values: on torch's meta device it has a size alone."""
        return port().devices.has_memory(tensor)

    def host_device(self) -> Any:
        """Get the device of tensors in the host's memory: `torch.device("cpu")`, or on MindSpore its name, "CPU"."""
        return port().devices.host_device()

    def set_device(self, index: int) -> None:
        """Use the device of this index on this machine; MindSpore wants that before the first tensor is made."""
        port().devices.set_device(self.kind, index)

    def synchronize(self) -> None:
        """Wait for the work queued on the current device; what failed in it raises here."""
        port().devices.synchronize(self.kind)

    def stream(self) -> Any:
        """Make a side stream; on CPU PyTorch makes one that runs nothing aside.

        Raises:
            RuntimeError: MindSpore on CPU, which has none; `capabilities.streams` tells.
        """
        return port().devices.stream(self.kind)

    def name(self) -> str:
        """Name the current device as its maker does, such as "NVIDIA H100 80GB HBM3"."""
        return processor_name() if self.kind == "cpu" else port().devices.name(self.kind)

    def total_memory(self) -> int | None:
        """Get how many bytes the current device has, on CPU the whole machine; None where nobody says (MindSpore)."""
        return memory_bytes() if self.kind == "cpu" else port().devices.total_memory(self.kind)

    def peak_memory(self) -> int:
        """Get the most bytes allocated on the device so far, on CPU the process's largest resident size."""
        return peak_resident_bytes() if self.kind == "cpu" else port().devices.peak_memory(self.kind)

    def reset_peak_memory(self) -> None:
        """Start the peak over; on CPU where the system can (Linux), else it stays."""
        if self.kind == "cpu":
            reset_peak_resident_bytes()
        else:
            port().devices.reset_peak_memory(self.kind)

    def empty_cache(self) -> None:
        """Give cached device memory back; nothing is cached on CPU."""
        if self.kind != "cpu":
            port().devices.empty_cache(self.kind)


devices = Devices()
