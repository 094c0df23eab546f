"""What each role of a platform has to offer, whatever the framework.

`Group` and `Tensor` are the framework's own process group and tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_platform.observing import Observer

Group = Any
Tensor = Any


@dataclass(frozen=True)
class Capabilities:
    """What a kind of device can do with a framework; neutral code asks this, and never for a name.

    Attributes:
        streams: work on a side stream runs beside the current one; else `Devices.stream` may raise.
        pinned_memory: the host's memory can be pinned, so that copies run beside the computation.
        native_collectives: the backend has every collective, and one with `async_op` runs beside the computation; else
            some are emulated, and each has done its work when the call returns.
        fused_operators: the device has the operators of `Fused` in one piece; else they are composed of others.
    """

    streams: bool
    pinned_memory: bool
    native_collectives: bool
    fused_operators: bool


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Make its result usable by what follows on the current stream (on CPU: block until it is done)."""
        ...


class Groups(Protocol):
    """Process groups; a process never makes two for one set of ranks."""

    def init_process_group(self, backend: str | None = None) -> None:
        """Initialise the default group; the platform adds its own options."""
        ...

    def is_initialized(self) -> bool:
        """Tell whether the default group exists."""
        ...

    def destroy(self, group: Group | None = None) -> None:
        """Destroy one group, or all of them."""
        ...

    def new_group(self, ranks: Sequence[int], pg_options: Any | None = None) -> Group:
        """Get the group of these global ranks; only its members call this.

        Args:
            ranks: global ranks, this one among them.
            pg_options: GroupOptions, or the framework's own, for the call that makes the group.
        """
        ...

    def ranks(self, group: Group | None = None) -> list[int]:
        """List the global ranks of a group, ascending."""
        ...

    def rank(self, group: Group | None = None) -> int:
        """Get this process's rank inside a group."""
        ...

    def size(self, group: Group | None = None) -> int:
        """Count the ranks of a group."""
        ...

    def backend(self, group: Group | None = None) -> str:
        """Name a group's backend."""
        ...

    def mark_created(self, groups: Iterable[Group]) -> None:
        """Register groups that were created elsewhere."""
        ...


class Collectives(Protocol):
    """Communication inside a group.

    Tensors are contiguous. `op` is one of sum, avg, min, max, product. With `async_op` a call returns a Handle and its
    result may be used after `wait()`, else it returns None.
    """

    observers: list[Observer]

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, group: Group, async_op: bool = False) -> Handle | None:
        """Reduce in place over the ranks."""
        ...

    def all_gather(self, output: Tensor, tensor: Tensor, *, group: Group, async_op: bool = False) -> Handle | None:
        """Concatenate each rank's tensor, all equal in size, on dim 0."""
        ...

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: str = "sum", *, group: Group, async_op: bool = False
    ) -> Handle | None:
        """Reduce over the ranks and keep this rank's equal piece of dim 0."""
        ...

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        group: Group,
        async_op: bool = False,
    ) -> Handle | None:
        """Send piece i of dim 0 to rank i, and receive one piece from each; None splits equally."""
        ...

    def broadcast(self, tensor: Tensor, group_src: int, *, group: Group, async_op: bool = False) -> Handle | None:
        """Copy from the rank `group_src` of the group."""
        ...

    def send(self, tensor: Tensor, dst: int, *, group: Group) -> None:
        """Send to the rank `dst` of the group."""
        ...

    def recv(self, tensor: Tensor, src: int, *, group: Group) -> None:
        """Receive from the rank `src` of the group."""
        ...

    def barrier(self, group: Group | None = None) -> None:
        """Wait until each rank of the group is here."""
        ...


class Devices(Protocol):
    """The kind of device in use."""

    @property
    def kind(self) -> str:
        """Name the kind: "cpu", "cuda" or "npu"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Tell what this kind of device can do."""
        ...

    @property
    def count(self) -> int:
        """Count the devices of this kind on this machine; a machine has one CPU."""
        ...

    def present(self) -> tuple[str, ...]:
        """List the kinds that this machine has, "cpu" first."""
        ...

    def current_device(self) -> Any:
        """Get the framework's device object of this process."""
        ...

    def set_device(self, index: int) -> None:
        """Use the device of this index on this machine."""
        ...

    def device_module(self) -> Any:
        """Get the framework's module for this kind of device."""
        ...

    def synchronize(self) -> None:
        """Wait for the work queued on the current device; what failed in it raises here."""
        ...

    def total_memory(self) -> int | None:
        """Get how many bytes the current device has, on CPU the whole machine; None where nobody says."""
        ...

    def peak_memory(self) -> int:
        """Get the highest memory use so far, in bytes."""
        ...

    def reset_peak_memory(self) -> None:
        """Start the peak over."""
        ...

    def stream(self) -> Any:
        """Make a side stream."""
        ...

    def empty_cache(self) -> None:
        """Give cached device memory back."""
        ...


class Random(Protocol):
    """The random generators."""

    def manual_seed(self, seed: int) -> None:
        """Seed every default generator, the same on every rank."""
        ...

    def seeded(self) -> int | None:
        """Get the seed last given to `manual_seed`, None if it was never called."""
        ...

    def get_state(self, device: Any) -> Any:
        """Get the state of a device's default generator."""
        ...

    def set_state(self, device: Any, state: Any) -> None:
        """Set the state of a device's default generator."""
        ...


class Fused(Protocol):
    """Operators that a device has in one piece, with their gradients."""

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        mask: Tensor | None = None,
        layout: str = "BSND",
    ) -> Tensor:
        """Attend: softmax(scale * q k^T) v."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        """Normalise the last dims, those of the weight."""
        ...

    def swiglu(self, gate_and_up: Tensor, dim: int = -1) -> Tensor:
        """Gate: silu(a) * b for the halves of a dim."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their places."""
        ...
