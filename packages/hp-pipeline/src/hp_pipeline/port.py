"""What a framework supplies to hp-pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_platform.extend import load_port

Tensor = Any


class Deferred(Protocol):
    """Gradients of weights that a backward put off."""

    def run(self) -> None:
        """Compute them, and give them to the parameters."""
        ...


class Arrival(Protocol):
    """Tensors that came from another stage, at the root of a stage's graph."""

    tensors: Sequence[Tensor]

    def gradients(self) -> list[Tensor | None]:
        """Take the gradients that a backward left for the tensors, one each; None where there is none."""
        ...


class ShardedModule(Protocol):
    """A module whose parameters are sharded: what hp-fsdp's ``fully_shard`` and torch's make of one."""

    def unshard(self, async_op: bool = False) -> Any: ...

    def reshard(self) -> None: ...

    def set_is_last_backward(self, is_last_backward: bool) -> None: ...

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None: ...

    def set_reshard_after_backward(self, reshard_after_backward: bool) -> None: ...


class SwapGroup(Protocol):
    """What one forward saved: hp-offload's groups of storages."""

    def launch_offload(self) -> None: ...

    def wait_offload(self) -> None: ...

    def launch_load(self) -> None: ...

    def wait_load(self) -> None: ...


class Swapper(Protocol):
    """Moves what is saved for backward to the host and back: ``hp_offload.SwapManager``."""

    def saving(self, name: str, module: Any) -> AbstractContextManager[SwapGroup]:
        """Put what is saved while inside into a group of its own; a module's parameters stay."""
        ...


class Port(Protocol):
    """Tensors, trees and backward; `<framework>/port.py`."""

    def is_module(self, value: Any) -> bool: ...

    def refuse_stage(self, module: Any) -> str | None:
        """Say why something cannot be a stage, or None."""
        ...

    def call_of(self, module: Any) -> Callable[..., Any]:
        """Return the function whose signature is that of a call of a stage's module."""
        ...

    def is_recording(self) -> bool:
        """Tell whether a graph is recorded here."""
        ...

    def is_tensor(self, value: Any) -> bool: ...

    def device_of(self, module: Any) -> Any:
        """Return the device of a module's first parameter, or the current one."""
        ...

    def refuse(self, tensor: Tensor, device: Any) -> str | None:
        """Say why a tensor cannot be sent from a stage of a device to another stage, or None."""
        ...

    def sends_distributed(self) -> bool:
        """Tell whether distributed tensors may go from stage to stage."""
        ...

    def flatten(self, tree: Any) -> tuple[list[Any], Any]:
        """Return the leaves of a nest of containers, and what ``unflatten`` and pickle take."""
        ...

    def unflatten(self, leaves: Sequence[Any], structure: Any) -> Any: ...

    def describe(self, tensor: Tensor) -> Any:
        """Return what ``empty`` takes on another rank; it is pickled and compared."""
        ...

    def empty(self, description: Any, device: Any) -> Tensor: ...

    def of_one_element(self, device: Any) -> Tensor:
        """Return a tensor of one element, whatever its value."""
        ...

    def sendable(self, tensor: Tensor) -> Tensor:
        """Return the values in contiguous memory, without their graph."""
        ...

    def version(self, tensor: Tensor) -> int:
        """Return a number that changes where somebody writes to the tensor, if the framework can tell."""
        ...

    def equal(self, one: Tensor, other: Tensor) -> bool:
        """Tell whether two tensors have the same values."""
        ...

    def memory(self, tensor: Tensor) -> tuple[int, int]:
        """Return the addresses of a tensor's first byte and of the one after its last; the same if not known."""
        ...

    def needs_gradient(self, tensor: Tensor) -> bool: ...

    def arrive(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> Arrival:
        """Put what was received at the root of a graph; those that are needed get gradients, and may be written to.

        Those that are not needed may be other values than tensors.
        """
        ...

    def deferring(self, module: Any) -> tuple[Deferred, Any]:
        """Return where gradients of weights are put off to, and the context for the forward that does so."""
        ...

    def prepare_split(self, module: Any) -> None:
        """Let a module's heavy operations ask for their frame."""
        ...

    def sharded_modules(self, module: Any) -> list[ShardedModule]:
        """List the modules inside, the module itself too, whose parameters a schedule gathers; outer before inner."""
        ...

    def outermost(self, modules: Sequence[ShardedModule]) -> list[ShardedModule]:
        """Leave of sharded modules those that are inside no other."""
        ...

    def reduce_gradients(self, module: ShardedModule, fill: bool) -> None:
        """Start to reduce what backwards without a reduction have left, in an outermost module and those inside.

        Args:
            module: the module.
            fill: gradients may be missing on this rank alone; it takes part with zeros.
        """
        ...

    def without_gradients(self) -> Any:
        """Return a context in which no graph is recorded."""
        ...

    def recording(self) -> Any:
        """Return a context in which a graph is recorded."""
        ...

    def surroundings(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what another thread enters to compute as this one does; None where steps must run in this thread."""
        ...

    def hooked(self, tree: Any, backward: Callable[[], None]) -> Any:
        """Pass a nest on; call a function when the gradients of its tensors are there, before they go further."""
        ...

    def backward(
        self,
        module: Any,
        arrivals: Sequence[Any],
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        deferred: Deferred | None,
    ) -> None:
        """Run backward from outputs of a module, to its parameters and to what had arrived.

        What is computed again meanwhile puts gradients of weights off as its first computation did, to ``deferred``.
        """
        ...

    def named_parameters(self, module: Any) -> dict[str, Any]:
        """Return a module's parameters by all their names; none of what is no module."""
        ...

    def describe_parameter(self, parameter: Any) -> str:
        """Return what must be equal for two ranks to hold copies of one parameter, and that it can be compared.

        Raises:
            NotImplementedError: it cannot be shared.
        """
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor, which shares its memory."""
        ...

    def device_of_tensor(self, tensor: Tensor) -> Any: ...

    def fill(self, parameter: Any, value: Tensor) -> None:
        """Write values to this rank's part of a parameter."""
        ...

    def gradient(self, parameter: Any) -> Tensor | None:
        """Return the gradient that backward has left for a parameter."""
        ...

    def set_gradient(self, parameter: Any, gradient: Tensor | None) -> None: ...

    def gradient_of(self, parameter: Any, value: Tensor) -> Tensor:
        """Return values as a gradient of a parameter's layout."""
        ...

    def added(self, gradient: Tensor, other: Tensor) -> Tensor:
        """Return the sum of two gradients of one parameter; it may be written into the first."""
        ...

    def take_gradient(self, parameter: Any) -> Tensor | None:
        """Return a parameter's gradient as the framework's optimizers take it, and set it back to none."""
        ...

    def scaled(self, loss: Tensor, factor: float) -> Tensor:
        """Return the gradient that a scalar loss begins backward with."""
        ...

    def detach(self, tensor: Tensor) -> Tensor: ...

    def copied(self, tensor: Tensor) -> Tensor:
        """Return the values in memory of their own, without their graph."""
        ...

    def cut(self, tensor: Tensor, dim: int, parts: int) -> list[Tensor]:
        """Cut a tensor into so many equal views."""
        ...

    def concatenate(self, tensors: Sequence[Tensor], dim: int) -> Tensor: ...

    def shape(self, tensor: Tensor) -> tuple[int, ...]: ...


Function = Callable[..., Any]


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
