"""Devices on MindSpore: one class for the CPU and Ascend."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore
from mindspore.graph.api import _pynative_executor

from hp_platform.host import memory_bytes, peak_resident_bytes, reset_peak_resident_bytes
from hp_platform.protocols import Capabilities
from hp_platform.settings import choose_kind


class MindSporeDevices:
    """The kind of device that this process trains on."""

    @property
    def kind(self) -> str:
        """Name the kind: what HYPER_PARALLEL_DEVICE says, else "npu" where this machine has one, else "cpu"."""
        return self._kind

    @cached_property
    def _kind(self) -> str:
        return choose_kind(self.present, f"mindspore {mindspore.__version__}")

    def present(self) -> tuple[str, ...]:
        """List the kinds that this machine has: "cpu", and "npu" where there is Ascend."""
        found = mindspore.device_context.ascend.is_available()
        return ("cpu", "npu") if found else ("cpu",)

    @property
    def capabilities(self) -> Capabilities:
        """Tell what this kind of device can do."""
        ascend = self.kind == "npu"
        return Capabilities(streams=ascend, pinned_memory=ascend, native_collectives=ascend, fused_operators=ascend)

    @property
    def count(self) -> int:
        """Count the devices of this kind on this machine; one CPU."""
        return 1 if self.kind == "cpu" else mindspore.device_context.ascend.device_count()

    def device_module(self) -> Any:
        """Get `mindspore.runtime`, which has the streams and the memory of Ascend."""
        return mindspore.runtime

    def current_device(self) -> str:
        """Get the name of this process's device, as tensors have it: "CPU", or "Ascend:0"."""
        if self.kind == "cpu":
            return "CPU"
        return f"Ascend:{mindspore.context.get_context('device_id')}"

    def set_device(self, index: int) -> None:
        """Use the device of this index; MindSpore wants to be told once, before the first tensor is made."""
        if self.kind == "cpu":
            if mindspore.context.get_context("device_target") != "CPU":
                mindspore.set_device("CPU")
        else:
            mindspore.set_device("Ascend", index)

    def synchronize(self) -> None:
        """Wait for the work that was started; what failed in it raises here."""
        _pynative_executor.sync()
        if self.kind != "cpu":
            mindspore.runtime.synchronize()

    def stream(self) -> Any:
        """Make a side stream; only Ascend has them.

        Raises:
            RuntimeError: on CPU.
        """
        if not self.capabilities.streams:
            raise RuntimeError(
                "MindSpore has no streams on CPU: ask get_platform().devices.capabilities.streams before making one."
            )
        return mindspore.runtime.Stream()

    def total_memory(self) -> int | None:
        """Get how many bytes the machine has on CPU; None on Ascend, where MindSpore's answer is 0 until it is used."""
        return memory_bytes() if self.kind == "cpu" else None

    def peak_memory(self) -> int:
        """Get the most bytes allocated on the device so far, on CPU the process's largest resident size."""
        if self.kind != "cpu":
            return mindspore.runtime.max_memory_allocated()
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Start the peak over; on CPU where the system can (Linux), else it stays."""
        if self.kind != "cpu":
            mindspore.runtime.reset_max_memory_allocated()
            return
        reset_peak_resident_bytes()

    def empty_cache(self) -> None:
        """Give cached device memory back; on CPU MindSpore decides itself."""
        if self.kind != "cpu":
            mindspore.runtime.empty_cache()


devices = MindSporeDevices()
