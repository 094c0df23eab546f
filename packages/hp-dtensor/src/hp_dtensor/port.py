"""Protocols of the primitives that a framework supplies, each implemented by a module of its folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hp_platform.extend import load_port

if TYPE_CHECKING:
    from hp_dtensor.layout.placements import Placement
    from hp_dtensor.layout.spec import TensorSpec
    from hp_dtensor.mesh.device_mesh import DeviceMesh


Module = Any
Tensor = Any


class Tensors(Protocol):
    """DTensors and their local tensors; ``<framework>/dtensor.py``.

    Attributes:
        DTensor: the class, whose base is the framework's class of tensors.
    """

    DTensor: Any

    def wrap(self, local: Tensor, spec: TensorSpec) -> Any:
        """Turn a local tensor itself into a DTensor."""
        ...

    def local_of(self, tensor: Tensor) -> Tensor:
        """Return the local tensor as a plain tensor, in the graph; return a plain tensor unchanged."""
        ...

    def local_view(self, tensor: Tensor) -> Tensor:
        """Return the local tensor as a plain tensor outside autograd."""
        ...

    def redistribute(self, x: Any, spec: TensorSpec) -> Any:
        """Return a DTensor in another layout of its mesh."""
        ...

    def redistribute_shared(self, x: Tensor, spec: TensorSpec, src: TensorSpec | None = None) -> Any:
        """Redistribute once for several readers; ``src`` is the layout of a plain tensor."""
        ...


class Gradients(Protocol):
    """Local values in autograd's graph; ``<framework>/backward/autograd.py``."""

    def convert(self, x: Any, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> Tensor:
        """Return a DTensor's local value in a layout; ``vary`` marks the axes where the reader's result varies."""
        ...

    def local_mode(self) -> AbstractContextManager[Any]:
        """Return a context in which DTensors act as their local tensors."""
        ...


class Functions(Protocol):
    """Values with gradients; ``<framework>/functions.py``."""

    def value_and_grad(self, fn: Any, grad_position: Any, weights: Any, has_aux: bool) -> Any:
        """See `hp_dtensor.parallelize_value_and_grad`."""
        ...


class Creation(Protocol):
    """DTensors from whole tensors and from nothing, and modules of them; ``<framework>/api.py``."""

    def check_whole(self, tensor: Tensor) -> str:
        """Raise TypeError for a tensor of another library; return the kind of device of a default mesh."""
        ...

    def check_mesh(self, mesh: DeviceMesh, what: str) -> None:
        """Raise NotImplementedError where the framework has no empty parts for a rank outside the mesh."""
        ...

    def records(self, tensor: Tensor) -> bool:
        """Tell whether a plain tensor is in a graph that is recorded, or a leaf that gets a gradient."""
        ...

    def part_of(self, local: Tensor, spec: TensorSpec) -> Tensor:
        """Check that a plain local tensor is this rank's part; on a rank outside the mesh return an empty part."""
        ...

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a plain tensor into contiguous memory, outside autograd."""
        ...

    def attached(self, local: Tensor, spec: TensorSpec, gradient: TensorSpec | None) -> Tensor:
        """Return a new tensor on a local tensor's memory, in its graph; its gradient leaves in layout ``gradient``."""
        ...

    def detaches(self, tensor: Tensor) -> str | None:
        """Return the call that leaves a graph, if the tensor is in one; None otherwise."""
        ...

    def shard(self, tensor: Tensor, spec: TensorSpec, src_data_rank: int | None) -> Any:
        """Make this rank's part of a plain whole tensor, in memory of its own, the DTensor."""
        ...

    def make(self, what: str, spec: TensorSpec, dtype: Any, requires_grad: bool, value: Any) -> Any:
        """Make a DTensor by the factory ``what``; ``value`` is that of ``full``."""
        ...

    def submodules(self, module: Module) -> Iterable[tuple[str, Module]]:
        """List the modules inside, the module itself first, each once."""
        ...

    def partition(self, partition_fn: Any, name: str, module: Module, mesh: DeviceMesh) -> None:
        """Call ``partition_fn``, which may replace the module's own parameters."""
        ...

    def replicate_parameters(self, module: Module, mesh: DeviceMesh) -> None:
        """Make the plain parameters that the module itself has replicated DTensors."""
        ...


class Modules(Protocol):
    """Modules and their parameters; ``<framework>/shard_module.py``.

    Attributes:
        Tensor: the framework's class of tensors.
    """

    Tensor: type

    def named_modules(self, module: Module) -> dict[str, Module]:
        """List all modules inside, the module itself among them, each under every name that it has."""
        ...

    def named_parameters(self, module: Module) -> dict[str, Any]:
        """List all parameters, each under every name that it has."""
        ...

    def distribute(
        self, module: Module, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
    ) -> None:
        """Turn all parameters into DTensors in place, replicated on ``rest`` if ``placed`` doesn't name them."""
        ...


class Watched(Protocol):
    """The running modules while a `CommDebugMode` is active."""

    def start(self) -> None:
        """Start to track the running modules."""
        ...

    def stop(self) -> None:
        """Stop, and remove all hooks from modules."""
        ...

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Return the phase and the module of the program at this frame."""
        ...


class Debug(Protocol):
    """Attribution of collectives to modules; ``<framework>/debug.py``.

    Attributes:
        Modules: makes a `Watched`.
    """

    Modules: Any


@functools.cache
def tensors() -> Tensors:
    """Return the framework's `Tensors`."""
    return load_port(Tensors, "dtensor")


@functools.cache
def gradients() -> Gradients:
    """Return the framework's `Gradients`."""
    return load_port(Gradients, "backward.autograd")


@functools.cache
def functions() -> Functions:
    """Return the framework's `Functions`."""
    return load_port(Functions, "functions")


@functools.cache
def creation() -> Creation:
    """Get what makes DTensors."""
    return load_port(Creation, "api")


@functools.cache
def modules() -> Modules:
    """Return the framework's `Modules`."""
    return load_port(Modules, "api")


@functools.cache
def debug() -> Debug:
    """Return the framework's `Debug`."""
    return load_port(Debug, "modules")
