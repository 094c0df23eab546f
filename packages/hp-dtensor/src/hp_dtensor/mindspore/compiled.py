"""Refusal of code that would treat a DTensor as its local tensor: ``ms.jit``, graph mode, ``Tensor(x)``, writes.

A compiled graph treats a DTensor as a plain local tensor: it would compute on this rank's shard and return the result.
Graphs are not intercepted, so their inputs are searched for DTensors before a graph is compiled or run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from mindspore import Parameter, Tensor, nn
from mindspore.graph import api, jit_trace
from mindspore.graph._utils import pijit_context

from hp_dtensor.mindspore.backward.autograd import local_only
from hp_dtensor.mindspore.dtensor import DTensor

_DEEPEST = 4
"""The depth to which nested containers, closures and bound methods are searched."""


def _reached(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors among arguments, closures and Cells' parameters, each with a description of its origin."""
    if isinstance(value, Tensor):
        yield "", value
    elif depth > _DEEPEST:
        return
    elif isinstance(value, nn.Cell):
        for name, cell in value.cells_and_names():
            for key, parameter in cell._params.items():
                if parameter is not None:
                    yield f"{f'{name}.{key}' if name else key} of {type(value).__name__}", parameter
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _reached(item, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _reached(item, depth + 1)
    elif isinstance(value, (MethodType, functools.partial)):
        parts = (value.__self__, value.__func__) if isinstance(value, MethodType) else (value.func, *value.args)
        for part in parts:
            yield from _reached(part, depth + 1)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from _reached(content, depth + 1)
        for name in value.__code__.co_names:
            content = value.__globals__.get(name)
            if isinstance(content, (Tensor, nn.Cell)):
                yield from _reached(content, depth + 1)


def _refuse(what: str, *values: Any) -> None:
    """Refuse to compile code that reaches a DTensor, or a parameter that is only temporarily gathered in a Cell.

    Raises:
        NotImplementedError: it reaches one.
    """
    if local_only():
        return
    for origin, tensor in _reached(values, -1):
        if isinstance(tensor, DTensor):
            text = f"a DTensor of shape {tensor._spec.shape} placed {tensor._spec.placements}"
        elif origin and not isinstance(tensor, Parameter):
            text = f"gathered by fully_shard for this forward only (shape {tuple(tensor.shape)})"
        else:
            continue
        name = f"{origin} is" if origin else "it is called with, or closes over,"
        raise NotImplementedError(
            f"{what} is compiled (ms.jit or graph mode), and {name} {text}: a compiled graph would treat each"
            " rank's local tensor as the full one. Run it in PyNative mode (no ms.jit around it,"
            " mindspore.set_context(mode=mindspore.PYNATIVE_MODE)), or compile a function of plain local tensors and"
            " call that in custom_shard"
        )


def _refuse_copy(input_data: Any = None, *args: Any, **kwargs: Any) -> None:
    """Refuse ``Tensor(x)`` of a DTensor.

    Raises:
        ValueError: this rank has only a part of it.
    """
    if isinstance(input_data, DTensor) and not local_only() and not input_data._spec.replicated:
        raise ValueError(
            f"mindspore.Tensor(x) of a DTensor of shape {input_data._spec.shape} placed {input_data._spec.placements}"
            " would have only this rank's part; write x.full_tensor() for the global tensor, x.to_local() for the part"
        )


def _refuse_write(target: Any, *values: Any, **named: Any) -> None:
    """Refuse to write a DTensor to a plain tensor, which would get this rank's part.

    Raises:
        ValueError: the value is a DTensor, of which this rank has only a part.
    """
    value = next((each for each in (*values, *named.values()) if isinstance(each, DTensor)), None)
    if value is None or isinstance(target, DTensor) or local_only() or value._spec.replicated:
        return
    raise ValueError(
        f"a plain tensor of shape {tuple(target.shape)} would get this rank's part of a DTensor of shape"
        f" {value._spec.shape} placed {value._spec.placements}; write to a DTensor (distribute_tensor(parameter, mesh,"
        " placements)), or pass x.full_tensor()"
    )


def _refuse_parameter(kind: type) -> None:
    """Refuse ``Parameter(x)`` of a DTensor.

    Raises:
        TypeError: a Parameter is made first, and then distributed.
    """
    if issubclass(kind, DTensor) and not local_only():
        raise TypeError(
            "mindspore.Parameter(x) of a DTensor: make the Parameter first, and distribute it:"
            " distribute_tensor(Parameter(tensor, name), mesh, placements)"
        )


def _refuse_bprop(self: nn.Cell, *args: Any, **kwargs: Any) -> None:
    """Refuse a Cell with its own ``bprop`` on DTensors.

    Raises:
        NotImplementedError: the method would get each rank's local tensor.
    """
    if local_only() or type(self).__module__.startswith("mindspore."):  # MindSpore's recomputation differentiates again
        return
    dtensors = [value for value in (*args, *kwargs.values(), *self.get_parameters()) if isinstance(value, DTensor)]
    if dtensors:
        spec = dtensors[0]._spec
        raise NotImplementedError(
            f"{type(self).__name__} defines its own bprop and is called with a DTensor of shape {spec.shape} placed"
            f" {spec.placements}: bprop would get each rank's local tensor as the full one. Write it as an"
            " hp_dtensor.DFunction, or call the Cell in hp_dtensor.custom_shard"
        )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Call ``check`` with the arguments of ``owner.name`` before it; the replacement is made once per process."""
    plain = getattr(owner, name)
    if hasattr(plain, "_refuses_dtensors"):
        return

    @functools.wraps(plain)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return plain(*args, **kwargs)

    checked._refuses_dtensors = True  # type: ignore[attr-defined]
    setattr(owner, name, checked)


def install() -> None:
    """Check what is compiled, by each of MindSpore's ways to do so, and what takes local tensors; once per process."""
    _before(sys.modules[Tensor.__module__], "_convert_numpy_array", _refuse_copy)  # Tensor's constructor calls it
    _before(Parameter, "_get_combined_class", _refuse_parameter)  # Parameter's calls it for a class of its own
    _before(Parameter, "set_data", _refuse_write)
    _before(Tensor, "assign_value", _refuse_write)
    _before(Tensor, "copy_", _refuse_write)
    _before(Tensor, "__setitem__", lambda target, key, value: _refuse_write(target, value))
    _before(
        api._JitExecutor,
        "compile",
        lambda self, method, *args, **kwargs: _refuse(_name(self.fn), self.obj, self.fn, args, kwargs),
    )
    _before(
        api._CellGraphExecutor, "compile", lambda self, obj, *args, **kwargs: _refuse(_name(obj), obj, args, kwargs)
    )
    _before(nn.Cell, "_call_custom_bprop", _refuse_bprop)
    _before(pijit_context, "PreJit", lambda args, kwargs: _refuse("a function", args, kwargs))
    _before(pijit_context.PIJitCaptureContext, "__enter__", lambda self: _refuse(_name(self.fn), self.fn))
    _before(jit_trace, "_jit_trace_begin", lambda name, *args, **kwargs: _refuse(name.split("#")[0], args))
