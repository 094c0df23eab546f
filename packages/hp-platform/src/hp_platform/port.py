"""Protocols that a framework implements for hp-platform: primitives, without the checks of the neutral modules.

`Group` and `Tensor` are the framework's own process group and tensor. Each protocol is implemented by the module of
its name in the framework's folder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from hp_platform.platforms.ports import load_port

Group = Any
Tensor = Any


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a kind of device with a framework; neutral code reads these, never the kind's name.

    Attributes:
        streams: work on a side stream runs beside the current one; else `devices.stream` may raise.
        pinned_memory: the host's memory can be pinned, so that copies run beside the computation.
        native_collectives: the backend has every collective, and one with `async_op` runs beside the computation; else
            some are emulated, and each has done its work when the call returns.
        fused_operators: the device has the operators of `hp_platform.fused` in one piece; else they are composed of
            others.
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


class Collectives(Protocol):
    """Communication inside a group, of contiguous tensors whose sizes fit.

    With `async_op` a primitive returns its handle. Else it returns a handle to be waited for at once, or None when it
    is done.
    """

    def all_reduce(self, tensor: Tensor, op: str, group: Group, async_op: bool) -> Handle | None: ...

    def all_gather(self, output: Tensor, tensor: Tensor, group: Group, async_op: bool) -> Handle | None: ...

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: str, group: Group, async_op: bool
    ) -> Handle | None: ...

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        received: list[int],
        sent: list[int],
        group: Group,
        async_op: bool,
    ) -> Handle | None:
        """Exchange rows, so many from and to each rank; empty lists are equal numbers."""
        ...

    def broadcast(self, tensor: Tensor, group_src: int, group: Group, async_op: bool) -> Handle | None: ...

    def send(self, tensor: Tensor, dst: int, group: Group, tag: int, async_op: bool) -> Handle | None: ...

    def recv(self, tensor: Tensor, src: int, group: Group, tag: int, async_op: bool) -> Handle | None: ...

    def has_tags(self, group: Group, device: Any) -> bool:
        """Tell whether messages between two ranks are told apart by their tags."""
        ...

    def receives_ahead(self, group: Group, device: Any) -> bool:
        """Tell whether a receive may be posted before its message is sent, and holds up nothing else meanwhile."""
        ...

    def barrier(self, group: Group) -> Handle | None: ...

    def from_bytes(self, data: bytes, group: Group) -> Tensor:
        """Make a tensor of bytes where the group communicates."""
        ...

    def to_bytes(self, tensor: Tensor) -> bytes:
        """Return the bytes of such a tensor."""
        ...

    def from_numbers(self, numbers: Sequence[int | float], group: Group) -> Tensor:
        """Make a tensor of 64-bit integers, or of float64 if any number is a float, where the group communicates."""
        ...

    def to_numbers(self, tensor: Tensor) -> list[Any]:
        """Return the numbers of such a tensor."""
        ...

    def averages(self, tensor: Tensor, group: Group) -> bool:
        """Tell whether the backend averages by itself; where not, sums are divided."""
        ...

    def divide(self, tensor: Tensor, size: int) -> None:
        """Divide in place, outside of autograd."""
        ...

    def pending(self, work: Handle, kind: str, group: Group) -> Handle:
        """Make the handle that a caller gets of the one that a primitive returned."""
        ...

    def raise_if_lost(self, error: RuntimeError, kind: str, group: Group) -> None:
        """Raise LostRankError in place of a backend's error, where the framework can tell that a rank was lost."""
        ...


class Groups(Protocol):
    """Process groups of the framework. None of these keeps track of what was made.

    Attributes:
        TIMEOUTS: a group may have a timeout of its own.
    """

    TIMEOUTS: bool

    def initialize(
        self,
        backend: str | None,
        init_method: str | None,
        timeout: timedelta | None,
        world_size: int,
        rank: int,
        store: Any,
        pg_options: Any,
        device_id: Any,
    ) -> None:
        """Make the default group; refuse what the backend lacks."""
        ...

    def lone_store(self) -> Any:
        """Make the store of a world of one rank."""
        ...

    def local_store(self, world_size: int, port: int | None) -> tuple[Any, int]:
        """Make a store for the ranks of this machine at a free port, or join the one at a port; get it and its port."""
        ...

    def world(self) -> Group | None:
        """Get the default group, None where there is none."""
        ...

    def create(
        self, ranks: tuple[int, ...], number: int, timeout: timedelta | None, pg_options: Any, group_desc: str | None
    ) -> Group:
        """Make the group of ascending global ranks, each of which calls this, and nobody else.

        `number` says how many groups of these ranks were made before, for a name that no other has.
        """
        ...

    def destroy(self, group: Group | None) -> None: ...

    def members(self, group: Group) -> Sequence[int]:
        """List the global ranks in the order of their ranks inside the group."""
        ...

    def rank(self, group: Group) -> int: ...

    def size(self, group: Group) -> int: ...

    def backend(self, group: Group) -> str: ...

    def is_group(self, value: object) -> bool:
        """Tell whether a value is a group that this process is in, not what stands for one that it is not in."""
        ...

    def meet(self, ranks: Sequence[int], patiently: bool) -> None:
        """Let the ranks of a group learn of each other, so that the loss of one can be told; `patiently` at init."""
        ...

    def networks(self, ranks: Sequence[int]) -> list[str] | None:
        """Get what global ranks named as their networks when they met; None where one of them is not known."""
        ...

    def leave(self) -> None:
        """Forget the default group, which is gone."""
        ...

    def can_disconnect(self) -> bool:
        """Tell whether this process can break its connections while others wait in collectives."""
        ...

    def disconnect(self) -> None:
        """Break this process's connections to the other ranks."""
        ...

    def give_up(self, text: str) -> None:
        """Tell the other ranks what this one raised, and end the collectives of all, where that can be done."""
        ...


class Devices(Protocol):
    """The kinds of device of a framework: "cpu", "cuda", "npu". Counts, memory and caches are asked of accelerators."""

    def version(self) -> str:
        """Name the framework and its version, for errors."""
        ...

    def present(self) -> tuple[str, ...]:
        """List the kinds that this machine has, "cpu" first."""
        ...

    def capabilities(self, kind: str) -> Capabilities: ...

    def count(self, kind: str) -> int: ...

    def device_module(self, kind: str) -> Any: ...

    def current_device(self, kind: str) -> Any: ...

    def kind_of(self, device: Any) -> str:
        """Name the kind of a tensor's device."""
        ...

    def has_memory(self, tensor: Tensor) -> bool:
        """Tell whether a tensor or a storage has memory for its values, as one on torch's meta device has not."""
        ...

    def host_device(self) -> Any:
        """Get the device of the host's memory."""
        ...

    def set_device(self, kind: str, index: int) -> None: ...

    def synchronize(self, kind: str) -> None: ...

    def name(self, kind: str) -> str: ...

    def total_memory(self, kind: str) -> int | None: ...

    def peak_memory(self, kind: str) -> int: ...

    def reset_peak_memory(self, kind: str) -> None: ...

    def stream(self, kind: str) -> Any: ...

    def cores(self, kind: str) -> dict[str, int]:
        """Count an accelerator's cores, "cube" and, where they are cores of their own, "vector".

        Raises:
            RuntimeError: the framework can't limit a stream to some of them.
        """
        ...

    def share(self, kind: str, stream: Any, cube: int | None, vector: int | None) -> tuple[Any, Callable[[], None]]:
        """Limit a stream of the current device; returns the stream to issue work on, and what ends the limit."""
        ...

    def empty_cache(self, kind: str) -> None: ...


class Random(Protocol):
    """The random generators of a framework."""

    def seed(self, seed: int) -> None:
        """Seed the default generators of all devices."""
        ...

    def get_state(self, device: Any) -> Any: ...

    def set_state(self, device: Any, state: Any) -> None: ...


class Fused(Protocol):
    """Operators that a device has in one piece, with their gradients, of arguments that fit."""

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        mask: Tensor | None,
        layout: str,
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def swiglu(self, gate_and_up: Tensor, dim: int) -> Tensor: ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class Port(Protocol):
    """The modules of a framework."""

    @property
    def collectives(self) -> Collectives: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def devices(self) -> Devices: ...

    @property
    def random(self) -> Random: ...

    @property
    def fused(self) -> Fused: ...


@functools.cache
def port() -> Port:
    """Get the port to the platform in use."""
    return load_port(Port)
