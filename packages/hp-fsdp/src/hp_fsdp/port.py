"""What a framework supplies to hp-fsdp."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hp_dtensor import DeviceMesh
from hp_fsdp.anatomy import Anatomy
from hp_fsdp.from_rank0 import Wire
from hp_fsdp.options import GroupOptions
from hp_platform.extend import load_port

__all__ = ["ModelStates", "OptimizerStates", "Optimizers", "Sharding", "model_states", "optimizers", "sharding"]


State = dict[str, Any]


class Sharding(Protocol):
    """Shard modules; `<framework>/api.py`.

    Attributes:
        DTYPE: the class of dtypes.
        ZERO_COPY: collectives read and write the parameters' memory.
        ANY_DIM: parameters can be sharded along another dim than the first.
        BACKWARD_RETURNS_GRADIENTS: a backward pass returns its gradients, so it waits for their reductions.
    """

    DTYPE: type
    ZERO_COPY: bool
    ANY_DIM: bool
    BACKWARD_RETURNS_GRADIENTS: bool

    def modules_of(self, module: Any) -> Sequence[Any]:
        """List the modules of a group: one, or several where the framework allows it."""
        ...

    def anatomy(self) -> Anatomy:
        """Get where modules have their parts."""
        ...

    def check_module(self, module: Any) -> None:
        """Raise for what `fully_shard` cannot be called on."""
        ...

    def shard(
        self,
        modules: Sequence[Any],
        mesh: DeviceMesh | None,
        options: GroupOptions,
        ignored_params: Collection[Any] = (),
    ) -> None:
        """Shard modules as one group, with arguments that were checked."""
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

    def load_extra(self, model: Any, extra: dict[str, Any]) -> None:
        """Hand modules the extra states that are no tensors."""
        ...

    def incompatible_keys(self, missing_keys: list[str], unexpected_keys: list[str]) -> Any:
        """Make the framework's named tuple of missing and unexpected keys."""
        ...

    def wire(self, model: Any) -> Wire:
        """Get how rank 0 sends to the ranks that share the model."""
        ...


class OptimizerStates(Protocol):
    """Read and write the states of one optimizer. Parameters are numbered in the optimizer's order."""

    @property
    def kind(self) -> str:
        """Get the optimizer's class name, for errors."""
        ...

    @property
    def parameters(self) -> Sequence[Any]:
        """List what it updates."""
        ...

    def states(self, names: Sequence[str], *, whole: bool) -> dict[str, State]:
        """Get the states by the parameters' names; the same keys on all ranks where ``whole``."""
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
    """Read and write the states of optimizers; `<framework>/optimizer_state.py`."""

    def adapted(self, optimizers: Any) -> Sequence[OptimizerStates]:
        """Wrap one optimizer or several."""
        ...


def sharding() -> Sharding:
    """Get the framework's way to shard modules."""
    return load_port(Sharding, "api")


def model_states() -> ModelStates:
    """Get the framework's way to read and write a model's tensors."""
    return load_port(ModelStates, "state_dict")


def optimizers() -> Optimizers:
    """Get the framework's way to read and write optimizers' states."""
    return load_port(Optimizers, "optimizer_state")
