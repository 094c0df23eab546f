"""Custom ``autograd.Function``s, checkpoints, hooks of modules and torch.func transforms with DTensors.

Note [Custom autograd functions]
``Function.apply`` is not intercepted: its ``forward`` gets DTensors, but its node belongs to the local tensor, so
``backward`` would get local gradients, and saved results as plain tensors. A reduction over them would silently be
local. So ``apply`` is replaced, as are the functions that wrap for transforms (Note [Transforms are not intercepted]):
if an argument is a DTensor, a subclass of the function is applied instead. Its ``backward`` gets gradients as DTensors
and returns local ones to autograd; its ``ctx`` stores the layouts of saved tensors. Forward and backward run with
interception on, the engine's part of ``apply`` with interception off, so hooks of saved tensors get local tensors, as
they do from operations.

Note [Arguments of checkpoints]
torch's non-reentrant checkpoints save their arguments for the recomputation, and hooks of saved tensors, such as those
of a checkpoint around it, return plain tensors. The layouts are stored beside them.

Note [Backward hooks of modules]
``register_full_backward_hook`` and ``register_full_backward_pre_hook`` are hooks of graph nodes that torch puts around
the module, so they would get local gradients. The object that torch makes for each call of a module with such hooks
notes the layouts of inputs and outputs, and the user's hooks get and return DTensors.

Note [Transforms are not intercepted]
``torch.func.grad``, ``vjp``, ``vmap`` and so on wrap their arguments in C++, bypassing ``__torch_function__`` and the
methods of a tensor's class. Inside the transform a DTensor would be a plain tensor of the local shape, and the result
silently wrong. So the functions of ``torch._functorch`` that wrap are replaced by ones that check the class first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils.checkpoint
from torch.autograd.function import once_differentiable
from torch.utils.hooks import BackwardHook

from hp_dtensor.functions import replicates_plain
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.compile.overrides import compiler as _compiler
from hp_dtensor.torch.dtensor import DTensor, local_of, local_view, wrap
from hp_dtensor.torch.views.moved_view import MovedView
from hp_platform.torch.internals import (
    plainly,
    torch_function_enabled,
    variable_functions,
    with_torch_function,
)

_Function: Any = torch.autograd.Function
_apply: Any = vars(_Function)["apply"].__func__
T = torch.Tensor
_ONCE = once_differentiable(lambda ctx: None).__code__
Specs = list[TensorSpec | None]
_running: list[_Call] = []


class _Call:
    """The layouts of one call's arguments and results, None for those that are not DTensors."""

    def __init__(self) -> None:
        self.arguments: Specs = []
        self.results: Specs = []


def _spec(value: Any) -> TensorSpec | None:
    return value._spec if isinstance(value, DTensor) else None


def _laid_out(value: Any, spec: TensorSpec | None) -> Any:
    """Return a value as the DTensor that it was."""
    if spec is None or not isinstance(value, T) or isinstance(value, DTensor):
        return value
    with torch.enable_grad():  # it is off in backward, but the view must require gradients if the value does
        return wrap(plainly(T.view_as, (), (value, value)), spec)


class _Context:
    """The ``ctx`` of a custom function: saved DTensors are DTensors when it reads them."""

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved: Specs = [_spec(tensor) for tensor in tensors]
        super().save_for_backward(*tensors)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return _all_laid_out(super().saved_tensors, self._saved)  # type: ignore[misc]


def _all_laid_out(values: Sequence[Any], specs: Sequence[TensorSpec | None]) -> tuple[Any, ...]:
    return tuple(_laid_out(value, spec) for value, spec in zip(values, specs, strict=True))


# ---- applying ----
def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``autograd.Function.apply`` if an argument is a DTensor: Note [Custom autograd functions]."""
    if torch_function_enabled() and any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
        local = _compiler._is_compiling_flag or cls.__module__.startswith("torch._functorch")  # compiled graphs
        if not local:
            return _apply_to_dtensors(cls, args, kwargs)
    return _apply(cls, *args, **kwargs)


def _apply_to_dtensors(cls: Any, args: Any, kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            _refuse_parts(cls, "is given", value)
    subclass = vars(cls).get("_of_dtensors")
    if subclass is None:
        subclass = cls._of_dtensors = _subclass(cls)
    call = _Call()
    _running.append(call)
    try:
        with autograd.local_mode():
            out = _apply(subclass, *args, **kwargs)
    finally:
        _running.pop()
    if not isinstance(out, tuple):
        return _labelled(out, call.results[0])
    return tuple(_labelled(value, spec) for value, spec in zip(out, call.results, strict=True))


def _labelled(value: Any, spec: TensorSpec | None) -> Any:
    """Return a result with its layout; torch replaces a result if ``forward`` returned an argument."""
    return wrap(value, spec) if spec is not None and type(value) is T else value


def _refuse_parts(cls: Any, verb: str, x: DTensor) -> None:
    if any(p.is_partial() and not p.is_partial("sum") for p in x._spec.placements):
        raise NotImplementedError(
            f"{cls.__name__}: an autograd.Function {verb} a DTensor of shape {tuple(x.shape)} placed {x.placements},"
            " for whose terms no gradient is defined: reduce_partial() it first"
        )


def _subclass(cls: Any) -> Any:
    """Return the function that is applied in place of ``cls``."""
    combined = cls.setup_context is _Function.setup_context

    @functools.wraps(cls.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call, operands = _running[-1], args[1:] if combined else args
        call.arguments = [_spec(value) for value in operands]
        if combined:
            args[0]._call = call
        with with_torch_function():
            out = cls.forward(*args, **kwargs)
            for value in out if isinstance(out, tuple) else (out,):
                _check_result(cls, value)
                call.results.append(_spec(value))
        return out

    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        ctx._call = _running[-1]
        with with_torch_function():
            return cls.setup_context(ctx, inputs, output)

    name = "backward" if cls.vjp is _Function.vjp else "vjp"
    members = {"forward": staticmethod(forward), name: staticmethod(_backward(cls, getattr(cls, name)))}
    if not combined:
        members["setup_context"] = staticmethod(setup_context)
    subclass: Any = type(cls)(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    own = subclass._backward_cls
    subclass._backward_cls = type(own.__name__, (_Context, own), {})
    return subclass


def _check_result(cls: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        _refuse_parts(cls, "returns", value)
    if type(value) is MovedView:
        raise NotImplementedError(
            f"{cls.__name__}: an autograd.Function returns a DTensor of shape {tuple(value.shape)} that is a view of"
            " another one and had to be moved: clone() it"
        )


# ---- gradients ----
def _backward(cls: Any, backward: Any) -> Callable[..., Any]:
    """Return ``backward`` as a function of local gradients, with DTensors inside."""
    once = getattr(backward, "__code__", None) is _ONCE
    plain = backward.__wrapped__ if once else backward

    def of_parts(ctx: Any, *grads: Any) -> Any:
        arguments, results = ctx._call.arguments, ctx._call.results
        if getattr(cls, "boxed_grads_call", False):
            [grads] = grads
        global_grads = [whole_gradient(grad, spec) for grad, spec in zip(grads, results, strict=True)]
        with with_torch_function():
            gradients = (
                plain(ctx, global_grads) if getattr(cls, "boxed_grads_call", False) else plain(ctx, *global_grads)
            )
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            own = [_part(cls, n, grad, spec) for n, (grad, spec) in enumerate(zip(gradients, arguments, strict=False))]
        return (*own, *gradients[len(arguments) :])

    return once_differentiable(of_parts) if once else of_parts


def whole_gradient(grad: Any, spec: TensorSpec | None) -> Any:
    """Return the gradient of a value of layout ``spec`` as a DTensor; autograd has this rank's part."""
    if grad is None or spec is None:
        return grad
    gradient, parts = autograd.grad_spec(spec), tuple(placement.is_partial() for placement in spec.placements)
    local = autograd.of_parts(grad, gradient, parts)
    whole: Any = wrap(plainly(T.view_as, (), (local, local)), gradient)
    whole._holds = grad  # as for hooks: `hp_dtensor.torch.backward.engine.on_local_gradient`
    return whole


def going_on(grad: DTensor) -> torch.Tensor:
    """Return a gradient as autograd goes on with it: a view that has no base, for ``grad`` may hold it."""
    return local_of(grad) if torch.is_grad_enabled() else local_view(grad)


def _part(cls: Any, index: int, grad: Any, spec: TensorSpec | None) -> Any:
    """Return an argument's gradient for autograd: this rank's part, or the global value for a plain argument."""
    if spec is None or grad is None:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad
    if not isinstance(grad, DTensor):
        if not isinstance(grad, T) or (grad.dim() and not replicates_plain()):
            shown = f"a plain tensor of shape {tuple(grad.shape)}" if isinstance(grad, T) else type(grad).__name__
            raise TypeError(
                f"{cls.__name__}.backward: the gradient of argument {index}, a DTensor of shape {tuple(spec.shape)}"
                f" placed {spec.placements}, is {shown}; it has to be a DTensor, or None. Give the function"
                " to_local() to compute with local parts"
            )
        grad = wrap(grad.view_as(grad), TensorSpec.of(spec.mesh, (Replicate(),) * spec.mesh.ndim, grad.shape))
    if tuple(grad.shape) != tuple(spec.shape):
        try:
            grad = grad.sum_to_size(spec.shape)
        except RuntimeError:
            raise RuntimeError(
                f"{cls.__name__}.backward: the gradient of argument {index} has shape {tuple(grad.shape)}, the argument"
                f" has {tuple(spec.shape)}"
            ) from None
    parts = tuple(placement.is_partial() for placement in spec.placements)
    return local_of(autograd.convert(grad, autograd.grad_spec(spec), parts if any(parts) else None))


# ---- checkpoints ----
def _keep_layouts(frame: Any) -> None:
    """Make the arguments that checkpoints save come back as DTensors.

    Args:
        frame: torch's class for the state of one checkpoint.
    """
    save, load = frame.save_inputs, frame.get_inputs

    @functools.wraps(save)
    def save_inputs(self: Any, *args: Any) -> None:
        self._layouts = [_spec(value) for value in args]
        with autograd.local_mode():
            save(self, *args)

    @functools.wraps(load)
    def get_inputs(self: Any) -> Any:
        return list(_all_laid_out(load(self), self._layouts))

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs


def install() -> None:
    """Install the replacements; called once, when hp_dtensor's torch side is imported."""
    _Function.apply = classmethod(functools.wraps(_apply)(apply))
    frame = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
    if hasattr(frame, "save_inputs") and hasattr(frame, "get_inputs"):  # older versions of torch apply a Function
        _keep_layouts(frame)


_hooks: Any = BackwardHook
_set_up_input, _set_up_output = _hooks.setup_input_hook, _hooks.setup_output_hook


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
    return (
        tuple(_hook_gradient(grad, spec, module) for grad, spec in zip(grads, specs, strict=False))
        + grads[len(specs) :]
    )


def _hook_gradient(grad: Any, spec: TensorSpec | None, module: Any) -> Any:
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


def install_hooks() -> None:
    """Let torch's object for a module's call note layouts; called once, when hp_dtensor's torch side is imported."""
    _hooks.setup_input_hook, _hooks.setup_output_hook = _of_inputs, _of_outputs


_functorch: Any = torch._functorch
_WRAPPING = {
    _functorch.eager_transforms: {
        "_wrap_for_grad": "grad, vjp, jacrev",
        "_wrap_functional_tensor": "functionalize",
    },
    _functorch.vmap: {"_add_batch_dim": "vmap, jacfwd", "_remove_batch_dim": "vmap, jacfwd"},
}
_FORWARD = "_make_dual _unpack_dual"


def refuse(transform: str, x: DTensor) -> NoReturn:
    """Refuse a DTensor as an argument of a transform.

    Args:
        transform: its name.
        x: the DTensor.
    """
    raise NotImplementedError(
        f"{transform} of a DTensor of shape {tuple(x._spec.shape)} placed {x._spec.placements} is not supported: the"
        " transform would see this rank's part as a plain tensor. Use torch.autograd.grad (jacobian and hessian of"
        " torch.autograd.functional work), hp_dtensor.parallelize_value_and_grad, or transform a function of local"
        " tensors inside of hp_dtensor.custom_shard"
    )


def _watched(wrapping: Callable[..., Any], transform: str) -> Callable[..., Any]:
    @functools.wraps(wrapping)
    def look(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, DTensor):
            refuse(f"torch.func ({transform})", x)
        return wrapping(x, *args, **kwargs)

    return look


def watch() -> None:
    """Make the transforms refuse DTensors; see Note [Transforms are not intercepted]. Called once."""
    for module, functions in _WRAPPING.items():
        for name, transform in functions.items():
            if hasattr(module, name):
                setattr(module, name, _watched(getattr(module, name), transform))


def _dual(func: Any, args: Any, kwargs: Any) -> NoReturn:
    dtensor = next(value for value in args if isinstance(value, DTensor))
    refuse("forward-mode differentiation (torch.func.jvp, jacfwd, hessian, forward_ad)", dtensor)


def special() -> dict[Any, Any]:
    """Return the handlers of the functions that create and unpack dual tensors."""
    return {getattr(variable_functions, name): _dual for name in _FORWARD.split() if hasattr(variable_functions, name)}
