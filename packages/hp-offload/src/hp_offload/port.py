"""Protocols that a framework implements for hp-offload: primitives, without the checks of the neutral modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_offload.saved import MemoryPlan, Saved
from hp_platform.extend import load_port

Tensor = Any
Module = Any
Storage = Any
Stream = Any
Event = Any
Buffer = Any


class Link(Protocol):
    """Copies between the device and the host's memory; `<framework>/port.py`.

    A stream is None where the device has none: a copy is then done when the call returns, and its event is None.
    """

    def streams(self) -> tuple[Stream | None, Stream | None]:
        """Make the streams of copies to the host and of copies to the device."""
        ...

    def storage(self, tensor: Any) -> Storage:
        """Get the memory that a tensor is a view of; a storage is its own."""
        ...

    def address(self, storage: Storage) -> int:
        """Get where memory begins; 0 where there is none: an empty, fake or meta tensor's."""
        ...

    def nbytes(self, storage: Storage) -> int: ...

    def on_host(self, storage: Storage) -> bool:
        """Tell whether memory is the host's."""
        ...

    def host(self, nbytes: int, from_host: bool) -> Buffer:
        """Allocate memory of the host for copies of other memory, pinned where a device copies from such memory aside.

        `from_host`: the other memory is the host's, too.
        """
        ...

    def copy_out(self, storages: list[Storage], buffer: Buffer, stream: Stream | None, after: Event) -> Event:
        """Copy storages to a buffer, one after the other at multiples of `ALIGNMENT`, after an event."""
        ...

    def copy_back(self, buffer: Buffer, nbytes: int, like: Storage, stream: Stream | None) -> tuple[Storage, Event]:
        """Copy a buffer's first bytes to new memory on the device of `like`."""
        ...

    def empty_like(self, storage: Storage) -> Storage:
        """Return a storage of no bytes on the same device, which keeps nothing alive."""
        ...

    def free(self, storage: Storage) -> None:
        """Give a storage's memory back; tensors on it have no values until it is filled."""
        ...

    def fill(self, storage: Storage, buffer: Buffer, nbytes: int, stream: Stream | None) -> Event:
        """Give a storage its memory back, with a buffer's bytes."""
        ...

    def wait(self, event: Event) -> None:
        """Make what is computed from here on wait for a copy."""
        ...


ALIGNMENT = 512
"""Bytes: storages that are copied as one begin at multiples, as the allocators of devices place them."""


class Port(Protocol):
    """Recomputation and saved tensors; `<framework>/port.py`."""

    def check_checkpoint(self, policy_fn: Callable[..., Any] | None, swap_inputs: bool) -> None:
        """Refuse options of checkpoint that the framework has no means for."""
        ...

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        policy_fn: Callable[..., Any] | None,
        context_fn: Callable[[], Any] | None,
        swap_inputs: bool,
        group_swap: bool,
        early_stop: bool,
    ) -> Any:
        """Call a function whose backward calls it again."""
        ...

    def swap(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        policy_fn: Callable[..., Any] | None,
        group: str,
        group_swap: bool,
    ) -> Any:
        """Call a function whose saved tensors go to the host."""
        ...

    def saving(self, run: Any, module: Module | None) -> AbstractContextManager[None]:
        """Put what is saved while inside into a `GroupRun`; a module's parameters and buffers stay."""
        ...

    def swap_tensor(self, tensor: Tensor, group: str, group_swap: bool) -> Tensor:
        """Return the tensor, such that what backward saves of it goes to the host."""
        ...

    def is_module(self, value: Any) -> bool: ...

    def is_tensor(self, value: Any) -> bool: ...

    def wrap(self, module: Module, around: Callable[..., Any]) -> Module:
        """Make a module's forward `around(forward, *args, **kwargs)`, with its parameters' names as they are."""
        ...

    def run_excluded(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, save_output: bool) -> Any:
        """Run a module's forward inside of a checkpoint as if it were outside."""
        ...

    def trace(
        self, model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[..., Tensor] | None
    ) -> list[Saved]:
        """Run one step of a model, and list what it saves."""
        ...

    def before_first_step(self, model: Module, action: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call an action once, with the arguments of the model's first call with gradients, before that call."""
        ...

    def apply(self, model: Module, plan: MemoryPlan) -> None:
        """Let the blocks of a model follow a plan."""
        ...

    def module_names(self, module: Module) -> list[str]:
        """List the names of the modules inside of one, its own, `""`, first."""
        ...

    def find_parts(self, model: Module, names: Sequence[str]) -> Any:
        """Find the parameters of modules that get a home, in parts that come and go together; refuse what can't."""
        ...

    def place(self, model: Module, found: Any, budget: int, ahead: int) -> Any:
        """Move parameters home and everything else to the device; return the `homes.placing.Visits` of the blocks."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)


@functools.cache
def link() -> Link:
    """Get the framework's copies."""
    return load_port(Link)
