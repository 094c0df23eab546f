"""Backward hooks of modules, with DTensors among inputs and outputs.

Note [Backward hooks of modules]
``register_full_backward_hook`` and ``register_full_backward_pre_hook`` are hooks of graph nodes that torch puts around
the module, so they would get local gradients. The object that torch makes for each call of a module with such hooks
notes the layouts of inputs and outputs, and the user's hooks get and return DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.backward.own_functions import going_on, whole_gradient
from hp_dtensor.torch.dtensor import DTensor

_hooks: Any = BackwardHook
_set_up_input, _set_up_output = _hooks.setup_input_hook, _hooks.setup_output_hook
Specs = list[TensorSpec | None]


def _specs(values: Any) -> Specs:
    values = values if isinstance(values, tuple) else (values,)
    return [value._spec if isinstance(value, DTensor) else None for value in values]


def _of_inputs(self: Any, args: Any) -> Any:
    self._layouts = _specs(args)
    return _set_up_input(self, args)


def _of_outputs(self: Any, result: Any) -> Any:
    inputs, outputs = self._layouts, _specs(result)
    if any(inputs) or any(outputs):
        self.user_hooks = [functools.partial(_call, hook, inputs, outputs) for hook in self.user_hooks]
        self.user_pre_hooks = [functools.partial(_call_before, hook, outputs) for hook in self.user_pre_hooks]
    return _set_up_output(self, result)


def _call(hook: Callable[..., Any], inputs: Specs, outputs: Specs, module: Any, into: Any, out: Any) -> Any:
    """Call a ``full_backward_hook`` of the user's."""
    return _local(hook(module, _whole(into, inputs), _whole(out, outputs)), inputs, module)


def _call_before(hook: Callable[..., Any], outputs: Specs, module: Any, out: Any) -> Any:
    """Call a ``full_backward_pre_hook`` of the user's."""
    return _local(hook(module, _whole(out, outputs)), outputs, module)


def _whole(grads: Sequence[Any], specs: Specs) -> tuple[Any, ...]:
    return tuple(whole_gradient(grad, spec) for grad, spec in zip(grads, specs, strict=True))


def _local(grads: Any, specs: Specs, module: Any) -> Any:
    """Return what a hook returned as autograd goes on with it: this rank's parts, laid out as the gradients arrived."""
    if grads is None:
        return None
    grads = grads if isinstance(grads, tuple) else (grads,)
    return tuple(_part(grad, spec, module) for grad, spec in zip(grads, specs, strict=False)) + grads[len(specs) :]


def _part(grad: Any, spec: TensorSpec | None, module: Any) -> Any:
    if spec is None or grad is None:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad
    if not isinstance(grad, DTensor) or grad._spec.shape != spec.shape:
        kind = "a DTensor" if isinstance(grad, DTensor) else "a plain tensor"
        raise RuntimeError(
            f"a backward hook of {type(module).__name__} returned {kind} of shape {tuple(grad.shape)} for the gradient"
            f" of a DTensor of shape {tuple(spec.shape)} placed {spec.placements}; return a DTensor of that shape, or"
            " None"
        )
    parts = tuple(placement.is_partial() for placement in spec.placements)
    moved: Any = autograd.convert(grad, autograd.grad_spec(spec), parts if any(parts) else None)
    part = going_on(moved)
    if not torch.is_grad_enabled():
        moved._holds = part
    return part


def install() -> None:
    """Let torch's object for a module's call note layouts; called once, when hp_dtensor's torch side is imported."""
    _hooks.setup_input_hook, _hooks.setup_output_hook = _of_inputs, _of_outputs
