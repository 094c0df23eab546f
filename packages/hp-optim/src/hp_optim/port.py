"""Primitives that a framework supplies to hp-optim: its optimizers, and what they keep.

`Model`, `Optimizer` and `Parameter` are the framework's own; a group is a dictionary of hyperparameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hp_platform.extend import load_port

Model = Any
Optimizer = Any
Parameter = Any
State = dict[str, Any]


class Port(Protocol):
    """Optimizers of a framework; `<framework>/port.py`.

    Attributes:
        CLASSES: "adamw" and "muon", made of groups whose params are pairs of a name and a parameter.
    """

    CLASSES: Mapping[str, Any]

    def named_parameters(self, model: Model) -> list[tuple[str, Parameter]]:
        """List the parameters with their names, each once; ``model`` may be such a list."""
        ...

    def set_lr(self, group: State, value: float) -> None:
        """Set a group's learning rate; one that is a tensor is written."""
        ...

    def check_gradients(self, gradients: object) -> None:
        """Raise TypeError for gradients that are not passed as this framework needs them."""
        ...

    def step(self, optimizer: Optimizer, gradients: Sequence[Any] | None) -> None:
        """Update the parameters, with gradients in their order where these are not the parameters' own."""
        ...

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drop the gradients."""
        ...

    def states(self, optimizer: Optimizer) -> list[State]:
        """List the state of each parameter, in the order of the groups."""
        ...

    def swap(self, optimizers: Sequence[Optimizer], config: Any, link: Any) -> None:
        """Move the states of optimizers to the host; see `hp_optim.swapping`."""
        ...

    def load(self, optimizer: Optimizer, states: Sequence[State], groups: Sequence[State]) -> None:
        """Load the state of each parameter and the hyperparameters of each group."""
        ...


@functools.cache
def port() -> Port:
    """Get what the framework in use supplies."""
    return load_port(Port)
