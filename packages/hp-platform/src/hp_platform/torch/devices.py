"""Devices on PyTorch: one class for every kind, by `torch.accelerator` and the kind's device module."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from hp_platform.host import memory_bytes, peak_resident_bytes, reset_peak_resident_bytes
from hp_platform.protocols import Capabilities
from hp_platform.settings import choose_kind


class TorchDevices:
    """The kind of device that this process trains on."""

    @property
    def kind(self) -> str:
        """Name the kind: what HYPER_PARALLEL_DEVICE says, else the accelerator of this machine, else "cpu"."""
        return self._kind

    @cached_property
    def _kind(self) -> str:
        return choose_kind(self.present, f"torch {torch.__version__}")

    def present(self) -> tuple[str, ...]:
        """List the kinds that this machine has: "cpu", and the accelerator's if there is one."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return ("cpu",) if accelerator is None else ("cpu", accelerator.type)

    @property
    def capabilities(self) -> Capabilities:
        """Tell what this kind of device can do."""
        accelerator = self.kind != "cpu"
        return Capabilities(
            streams=accelerator,
            pinned_memory=accelerator,
            native_collectives=True,
            fused_operators=self.kind == "npu",
        )

    @property
    def count(self) -> int:
        """Count the devices of this kind on this machine; one CPU."""
        return 1 if self.kind == "cpu" else torch.accelerator.device_count()

    def device_module(self) -> Any:
        """Get `torch.cpu`, `torch.cuda` or `torch.npu`."""
        return torch.get_device_module(self.kind)

    def current_device(self) -> torch.device:
        """Get the device of this process."""
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device(self.kind, torch.accelerator.current_device_index())

    def set_device(self, index: int) -> None:
        """Use the device of this index; on CPU there is one and nothing to do."""
        if self.kind != "cpu":
            torch.accelerator.set_device_index(index)

    def synchronize(self) -> None:
        """Wait for the work queued on the current device."""
        if self.kind != "cpu":
            torch.accelerator.synchronize()

    def stream(self) -> Any:
        """Make a side stream; on CPU one that runs nothing aside."""
        return self.device_module().Stream()

    def total_memory(self) -> int | None:
        """Get how many bytes the current device has, on CPU the whole machine."""
        if self.kind == "cpu":
            return memory_bytes()
        return self.device_module().get_device_properties(torch.accelerator.current_device_index()).total_memory

    def peak_memory(self) -> int:
        """Get the most bytes allocated on the device so far, on CPU the process's largest resident size."""
        if self.kind != "cpu":
            return self.device_module().max_memory_allocated()
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Start the peak over; on CPU where the system can (Linux), else it stays."""
        if self.kind != "cpu":
            self.device_module().reset_peak_memory_stats()
            return
        reset_peak_resident_bytes()

    def empty_cache(self) -> None:
        """Give cached device memory back; nothing is cached on CPU."""
        if self.kind != "cpu":
            self.device_module().empty_cache()


devices = TorchDevices()
