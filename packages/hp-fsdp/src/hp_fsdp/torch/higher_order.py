"""Backward passes whose graph is kept (``create_graph=True``), as for a gradient penalty.

Note [Gradients of gradients]
    The graph of such a pass holds the unsharded parameters, so they stay gathered until the backward pass through it.
    That one may reach a parameter by the kept graph alone, past the hooks on the module's outputs. So each parameter
    gets a hook for its gradient, too, until the group is freed. And it may go on with the kept graph of a group whose
    own nodes have run: nodes are ordered by numbers that each of autograd's threads gives out by itself, and there is
    one for each device. So groups are freed at the end of that pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hp_fsdp.torch.group import ParameterGroup

__all__ = ["LateGradients", "check_differentiable"]

_plain = torch._C.DisableTorchFunctionSubclass
_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]


class LateGradients:
    """Hooks on the unsharded parameters of groups whose backward pass kept its graph."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._watched: dict[ParameterGroup, list[Any]] = {}

    @property
    def watching(self) -> bool:
        """True from a pass that kept its graph until one that doesn't is over."""
        return bool(self._handles)

    def watch(self, group: ParameterGroup, arrived: Callable[..., None]) -> None:
        """Calls ``arrived`` when one of the group's parameters gets a gradient."""
        with _plain():
            for parameter in group.parameters:
                if parameter.trains and parameter.unsharded is not None:
                    self._handles.append(parameter.unsharded.register_post_accumulate_grad_hook(arrived))

    def watch_once(self, group: ParameterGroup, arrived: Callable[..., None]) -> None:
        """`watch`, unless the parameters that the group has now are watched already."""
        parameters = [parameter.unsharded for parameter in group.parameters]
        watched = self._watched.get(group, ())
        if len(watched) != len(parameters) or any(a is not b for a, b in zip(watched, parameters, strict=True)):
            self._watched[group] = parameters
            self.watch(group, arrived)

    def forget(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()


def check_differentiable(group: ParameterGroup) -> None:
    """Raises where a backward pass with ``create_graph=True`` gives parameters gradients.

    Raises:
        NotImplementedError: they would lose their graph when they are reduced; or the group is deterministic.
    """
    if group.deterministic:
        raise NotImplementedError(
            f"fully_shard(deterministic=True): {group.name} ran backward with create_graph=True, whose second pass"
            " would count as a micro-batch of its own. Shard it without deterministic=True"
        )
    for parameter in group.parameters:
        gradient = None if parameter.unsharded is None else _get_grad(parameter.unsharded)
        if gradient is not None and gradient.requires_grad:
            raise NotImplementedError(
                f"fully_shard: {parameter.name!r} of {group.name} got a gradient by backward(create_graph=True), but"
                " reduced gradients have no graph. Take gradients with respect to activations or inputs instead:"
                " torch.autograd.grad(outputs, inputs, create_graph=True)"
            )
