"""The kind of device in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from hp_platform.platforms.launchers import memory_bytes, peak_resident_bytes, processor_name, reset_peak_resident_bytes
from hp_platform.platforms.ports import choose_kind
from hp_platform.port import Capabilities, port


class CopyLink(Protocol):
    """The streams on which copies between device and host run, each in the order in which they are issued.

    `hp_offload.SwapManager` is one: parameters, activations and states that share it never compete for the bus.
    """

    @property
    def streams(self) -> tuple[Any, Any]:
        """Get the streams of copies to the host and to the device; None where copies are done at once."""
        ...

    def note(self, what: str, name: str) -> None:
        """Take note of an event, such as "load" of what is called `name`."""
        ...


class Share:
    """Cores that the work on a stream is limited to, until they are given back; made by `devices.share`.

    Attributes:
        stream: the stream to issue the work on.
    """

    def __init__(self, stream: Any, give_back: Callable[[], None]) -> None:
        self.stream = stream
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """End the limit; a second call does nothing. On a GPU the shared stream then waits for this one's work."""
        if self._give_back is not None:
            end, self._give_back = self._give_back, None
            end()

    def __enter__(self) -> Any:
        """Get the stream to issue the work on; at the end of the block the share is given back."""
        return self.stream

    def __exit__(self, *error: object) -> None:
        self.give_back()


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

    def cores(self) -> dict[str, int]:
        """Count the cores that the current device offers for shares: {"cube": 24, "vector": 48} on an NPU.

        A cube core multiplies matrices, a vector core does the rest. A GPU's multiprocessors do both and count as
        "cube", its only kind.

        Raises:
            RuntimeError: on a CPU, and where the framework in use can't limit a stream.
        """
        if self.kind == "cpu":
            raise RuntimeError(
                "the work on a stream is limited to some cores on an NPU or a GPU; this is a CPU, which runs it in the"
                " calling thread: leave devices.share and devices.cores out here"
            )
        return port().devices.cores(self.kind)

    def share(self, stream: Any, *, cube: int | None = None, vector: int | None = None) -> Share:
        """Limit the cores that the work on a stream may use, so that work on another stream finds some free.

        It is a limit, no reservation: others may use these cores as well, and two shares may be of the same ones. It
        is at once in force for what is issued from then on.

            with devices.share(devices.stream(), cube=8) as stream, devices.device_module().stream(stream):
                exchanged = pack(rows)  # beside what the current stream runs

        On an NPU the stream itself is limited, by `torch.npu.set_stream_limit` or `mindspore.runtime.set_stream_limit`;
        after a process's first limit torch_npu looks for one at every operator that it issues, to the process's end.
        CUDA limits no stream that exists: the share has another one, of a green context, which first waits for the work
        on ``stream``; the driver gives multiprocessors in groups (of 8 on an H100), so there may be a few more than
        asked for. Memory crosses over to it as to any other stream (`Tensor.record_stream`). A process keeps one green
        context for each number of multiprocessors. Nothing of this was run on a GPU or an NPU.

        Args:
            stream: a stream of the current device. On an NPU it has one limit of each kind: a second share replaces
                those that it names, and either share's end is the end of both.
            cube: so many cube cores, on a GPU multiprocessors, from 1 to what `cores` says. Default: all.
            vector: so many vector cores; an NPU alone has them. Default: all.

        Returns:
            The share. Work is issued on its ``stream``; `give_back`, or the end of a ``with`` block, ends it.

        Raises:
            RuntimeError: what `cores` raises.
            TypeError: a number that is no int.
            ValueError: neither is given, or more cores than the device has, or fewer than 1, or vector cores of a GPU.
        """
        have = self.cores()
        wanted = {name: number for name, number in (("cube", cube), ("vector", vector)) if number is not None}
        if not wanted:
            raise ValueError(f"devices.share: no number of cores is given; this device has {have}")
        for name, number in wanted.items():
            if type(number) is not int:
                raise TypeError(f"devices.share: {name} is {number!r}, expected an int, a number of cores")
            if not 1 <= number <= have.get(name, 0):
                limits = f"expected 1 to {have[name]}" if name in have else "whose cores are all of one kind, cube"
                raise ValueError(f"devices.share: {name}={number} on a device with {have} cores, {limits}")
        return Share(*port().devices.share(self.kind, stream, wanted.get("cube"), wanted.get("vector")))

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
