"""The protocols that a framework implements for hp-fsdp."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from hp_dtensor import DeviceMesh
from hp_fsdp.explanation.memory import BucketBytes, Event, MemoryPoint, MemoryRow, Overlap
from hp_fsdp.options import GroupOptions
from hp_platform.extend import load_port

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The structure of a framework's modules.

    Attributes:
        parameters: attribute that maps names to parameters.
        children: attribute that maps names to modules.
        sharded: class of sharded modules.
        computes: tells if a module has a forward of its own.
        nbytes: size of a parameter, unsharded.
    """

    parameters: str
    children: str
    sharded: type
    computes: Callable[[Any], bool]
    nbytes: Callable[[Any], int]

    def children_of(self, module: Any) -> Iterator[Any]:
        """Return the modules directly inside."""
        return (child for child in getattr(module, self.children).values() if child is not None)

    def modules(self, module: Any) -> list[Any]:
        """Return ``module`` and all modules inside, each once, outer before inner."""
        modules: dict[int, Any] = {}
        stack = [module]
        while stack:
            current = stack.pop()
            if id(current) not in modules:
                modules[id(current)] = current
                stack += reversed(list(self.children_of(current)))
        return list(modules.values())

    def uses(self, module: Any) -> Iterator[Any]:
        """Yield each parameter of ``module``, as often as it is registered."""
        for each in self.modules(module):
            yield from (parameter for parameter in getattr(each, self.parameters).values() if parameter is not None)

    def bytes_of(self, module: Any, taken: Collection[int] = ()) -> int:
        """Return the bytes of the parameters of a module that no group has yet.

        Args:
            module: the module.
            taken: ids of parameters to leave out.
        """
        return sum(self.nbytes(parameter) for parameter in self.free(module) if id(parameter) not in taken)

    def free(self, module: Any) -> list[Any]:
        """Return the parameters of a module that no group has yet, each once."""
        owned = {
            id(parameter)
            for each in self.modules(module)
            if isinstance(each, self.sharded)
            for parameter in self.uses(each)
        }
        return list({id(p): p for p in self.uses(module) if id(p) not in owned}.values())


@dataclass(frozen=True, slots=True)
class Broadcaster:
    """Sends values of rank 0 to all others.

    Attributes:
        is_tensor: tells tensors, which are sent one by one.
        broadcast_object: returns rank 0's object on every rank; others pass None.
        broadcast_tensor: returns rank 0's tensor on every rank; others pass None, and all the shape and the dtype.
    """

    is_tensor: Callable[[Any], bool]
    broadcast_object: Callable[[Any], Any]
    broadcast_tensor: Callable[[Any, tuple[int, ...], Any], Any]


class Sharding(Protocol):
    """Shard modules; `<framework>/api.py`.

    Attributes:
        MODULE: the class of modules.
        FORWARD: name of their method that computes.
        MANAGED: the class of a group's parameters, made of a name and a parameter.
        DTYPE: the class of dtypes.
        ZERO_COPY: collectives read and write the parameters' memory.
        ANY_DIM: parameters can be sharded along any dim.
        BACKWARD_RETURNS_GRADIENTS: a backward pass returns its gradients, and waits for their reductions.
    """

    MODULE: type
    FORWARD: str
    MANAGED: type
    DTYPE: type
    ZERO_COPY: bool
    ANY_DIM: bool
    BACKWARD_RETURNS_GRADIENTS: bool

    def modules_of(self, module: Any) -> Sequence[Any]:
        """List the modules of a group: one, or several where the framework allows it."""
        ...

    def anatomy(self) -> Anatomy:
        """Return the structure of modules."""
        ...

    def check_contents(self, modules: Sequence[Any], ignored_params: Collection[Any]) -> None:
        """Raise NotImplementedError for modules inside that cannot be sharded."""
        ...

    def device_of(self, modules: Sequence[Any], parameters: Sequence[Any], mesh: DeviceMesh) -> Any:
        """Return the device of the shards, to which buffers are moved as well; None if there is no choice."""
        ...

    def watch_optimizers(self) -> None:
        """Check the parameters of optimizers from now on, before their first step."""
        ...

    def make_group(
        self,
        modules: Sequence[Any],
        parameters: Sequence[Any],
        axes: Any,
        device: Any,
        options: GroupOptions,
        ignored: Sequence[Any],
    ) -> None:
        """Shard the parameters as one group, and give the modules sharded classes."""
        ...


class ModelStates(Protocol):
    """Read and write the tensors of a model; `<framework>/state_dict.py`."""

    def entries(self, model: Any) -> dict[str, Any]:
        """Get the very objects that ``model.state_dict()`` holds, by unwrapped names, with shards registered."""
        ...

    def parameters(self, model: Any) -> Iterable[tuple[str, Any]]:
        """List the parameters by unwrapped names, under each name where one is tied, with shards registered."""
        ...

    def is_tensor(self, value: Any) -> bool:
        """Tell tensors, which are exported and filled, from the rest of a state."""
        ...

    def full(self, tensor: Any, *, on_host: bool) -> Any:
        """Gather the full tensor, in memory of its own; every rank of its mesh has to call it."""
        ...

    def part(self, tensor: Any, *, on_host: bool) -> Any:
        """Get a tensor that looks into this rank's part, or a copy of it on the host; a DTensor of a DTensor."""
        ...

    def fill(self, name: str, target: Any, source: Any) -> None:
        """Write a full tensor or a DTensor into a tensor of the model, each rank its part."""
        ...

    def takes_own_shape_only(self, target: Any) -> bool:
        """Tell whether a plain tensor of the model takes its own shape only; else the framework checks it."""
        ...

    def has_memory(self, target: Any) -> bool:
        """Tell whether a tensor of the model can be written."""
        ...

    def laid_out_like(self, target: Any, value: Any) -> Any:
        """Return this rank's part of a value as a tensor in the target's layout."""
        ...

    def load_extra(self, model: Any, extra: dict[str, Any]) -> None:
        """Hand modules the extra states that are no tensors."""
        ...

    def incompatible_keys(self, missing_keys: list[str], unexpected_keys: list[str]) -> Any:
        """Make the framework's named tuple of missing and unexpected keys."""
        ...

    def broadcaster(self, model: Any) -> Broadcaster:
        """Return the way from rank 0 to the ranks that share the model."""
        ...


class OptimizerStates(Protocol):
    """Read and write the states of one optimizer. Parameters are numbered in the optimizer's order."""

    @property
    def kind(self) -> str:
        """Get the optimizer's class name, for errors."""
        ...

    @property
    def parameters(self) -> Sequence[Any]:
        """List the parameters that it updates."""
        ...

    def states(self, names: Sequence[str], *, full: bool) -> dict[str, State]:
        """Get the states by the parameters' names; the same keys on all ranks if ``full``."""
        ...

    def groups(self) -> Iterable[tuple[State, Sequence[int]]]:
        """List the parameter groups: hyperparameters, and the members' numbers."""
        ...

    def loaded(self, number: int, name: str, key: str, value: Any) -> Any:
        """Take one state of a parameter; the result comes back in `load`."""
        ...

    def load(self, states: Mapping[int, State], groups: Sequence[State], *, strict: bool) -> None:
        """End the loading: states of the parameters that were found, hyperparameters of each group."""
        ...


class Optimizers(Protocol):
    """Read and write the states of optimizers; `<framework>/optimizers.py`."""

    def adapted(self, optimizers: Any) -> Sequence[OptimizerStates]:
        """Wrap one optimizer or several."""
        ...


class GradNorms(Protocol):
    """Sum over gradients; `<framework>/grad_norm.py`. ``pairs`` are parameters with their gradients."""

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Compute without recording for backward."""
        ...

    def pairs(self, parameters: Any, gradients: Any, where: str) -> list[tuple[Any, Any]]:
        """Check the arguments of ``where``, and return each parameter with its gradient; None if it has none."""
        ...

    def dtype_of(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Return the dtype to add in, the same on all ranks."""
        ...

    def power_sum(
        self,
        gradients: Sequence[Any],
        norm_type: float,
        dtype: Any,
        pairs: Sequence[tuple[Any, Any]],
        mesh: DeviceMesh | None,
    ) -> Any:
        """Sum ``|x| ** norm_type`` over this rank's gradients (``inf``: the largest), where ``mesh`` communicates."""
        ...

    def nonzero(
        self, gradients: Sequence[Any], dtype: Any, pairs: Sequence[tuple[Any, Any]], mesh: DeviceMesh | None
    ) -> Any:
        """Return for each gradient 1 where this rank has an element that is not zero, else 0; zero for None."""
        ...

    def block_sums(
        self,
        gradients: Sequence[Any],
        counts: Sequence[int],
        firsts: Sequence[int],
        norm_type: float,
        dtype: Any,
        mesh: DeviceMesh,
    ) -> Any:
        """Return one sum for each block of each gradient; zero for blocks of other ranks, and for None."""
        ...

    def total(self, sums: Any) -> Any:
        """Return the sum of all blocks' sums, by halves."""
        ...

    def number(self, total: Any) -> float:
        """Return a sum as a number; it waits for the device."""
        ...

    def of_number(self, number: float, double: bool, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Return a number as ``power_sum`` returns it, in float64 or float32."""
        ...

    def root(self, total: Any, norm_type: float, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Return the norm, given the power sum."""
        ...

    def scale(self, gradients: Sequence[Any], norm: Any, max_norm: float, foreach: bool | None) -> None:
        """Scale gradients in place so that ``norm`` is at most ``max_norm``."""
        ...


class Explaining(Protocol):
    """Count the memory of a sharded model; `<framework>/explain.py`."""

    def named_modules(self, model: Any) -> Iterable[tuple[str, Any]]:
        """List a module and the modules inside it, with their names."""
        ...

    def predicted_activations(self, model: Any, inputs: Any, activations: Any) -> Any:
        """Predict the activations of a forward on ``inputs``; refuse arguments that the framework does not support."""
        ...

    def overlap(self, root: Any) -> Overlap:
        """Return the communication that runs beside the computation."""
        ...

    def stays_gathered(self, group: Any) -> bool:
        """Tell whether a group stays gathered after a backward pass."""
        ...

    def bytes_of(self, bucket: Any) -> BucketBytes:
        """Return the sizes of a bucket."""
        ...

    def memory_rows(
        self,
        groups: Sequence[Any],
        events: Sequence[Event],
        memory: Sequence[MemoryPoint],
        optimizer: Any,
        predicted: Any,
        measured: Any,
    ) -> list[MemoryRow]:
        """Return one row for each kind of memory.

        Args:
            groups: the model's.
            events: of a step, predicted.
            memory: unsharded bytes over the last step; empty before it.
            optimizer: counts its states; None for none.
            predicted: the result of `predicted_activations`.
            measured: the result of `watch_activations`, if there is one.
        """
        ...


def sharding() -> Sharding:
    """Get the framework's way to shard modules."""
    return load_port(Sharding, "port")


def model_states() -> ModelStates:
    """Get the framework's way to read and write a model's tensors."""
    return load_port(ModelStates, "state_dict")


def optimizers() -> Optimizers:
    """Get the framework's way to read and write optimizers' states."""
    return load_port(Optimizers, "optimizers")


def grad_norms() -> GradNorms:
    """Get the framework's way to sum over gradients."""
    return load_port(GradNorms, "port")


def explaining() -> Explaining:
    """Get the framework's way to count memory."""
    return load_port(Explaining, "explain")
