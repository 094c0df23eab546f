"""Dispatch: a torch function on DTensors becomes a plan, made once for each combination of layouts and arguments.

Note [What a plan is found by]
The function, the layouts (interned, with global shapes in them) and every other argument. Floats stand for their type:
no rule reads a float, and a schedule's learning rate would fill the cache; a handler of a function whose result's shape
depends on a float adds it to the key. The cache is emptied when it has many entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.rules import planning
from hp_dtensor.rules.factors import NoLegalPlacement
from hp_dtensor.torch.backward.compat import is_local_call
from hp_dtensor.torch.compile.overrides import Override
from hp_dtensor.torch.compile.overrides import compiler as _compiler
from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.dispatching import calls
from hp_dtensor.torch.ops.dispatching.calls import is_operator, name_of, tensors_of
from hp_dtensor.torch.ops.dispatching.plain import replicate_plain, write_into_plain, write_out, writes_plain
from hp_dtensor.torch.ops.dispatching.plans import Plan, make_plan
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_dtensor.torch.views.overlaps import apart, refuse_overlaps
from hp_platform.extend import when_groups_end

_impl: Any = torch._C._disabled_torch_function_impl
_enabled = torch._C._is_torch_function_enabled
Tensor = torch.Tensor
_PLANS: dict[Any, Any] = {}
when_groups_end(_PLANS.clear)
_LIMIT = 1 << 16
_SPECIAL: dict[Any, Any] = {}
_NAMES = {"axis": "dim", "keepdims": "keepdim"}
"""Names of numpy's, which torch's functions take as well; one has them for its own."""


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        if kwargs:
            if len(kwargs) == 1 and len(args) == 1:
                [(name, value)] = kwargs.items()
                kind = type(value)
                plan = _PLANS[
                    func, 1, args[0]._spec, name, value._spec if kind is DTensor else float if kind is float else value
                ]
            else:
                plan = _PLANS[
                    (
                        func,
                        len(args),
                        *[a._spec if type(a) is DTensor else float if type(a) is float else a for a in args],
                        *kwargs,
                        *[v._spec if type(v) is DTensor else float if type(v) is float else v for v in kwargs.values()],
                    )
                ]
        else:
            count = len(args)
            if count == 2:
                a, b = args
                b_type = type(b)
                plan = _PLANS[
                    func,
                    a._spec if type(a) is DTensor else a,
                    b._spec if b_type is DTensor else float if b_type is float else b,
                ]
            elif count == 1:
                plan = _PLANS[func, args[0]._spec]
            else:
                plan = _PLANS[
                    (func, *[a._spec if type(a) is DTensor else float if type(a) is float else a for a in args])
                ]
    except (KeyError, TypeError, AttributeError):
        plan = None
    if plan is None:  # outside the handler: an error of the operation has nothing to do with the one that was caught
        return dispatch(func, types, args, kwargs)
    if plan.direct:
        out = _impl(func, types, args, kwargs) if kwargs else _impl(func, types, args)
        out.__class__ = DTensor
        out._spec = plan.spec
        return out if plan.finish is None else plan.finish(out, args, kwargs or {})
    if plan.call is not None:
        out = _impl(plan.call, types, (args[0], *plan.tail))
        out.__class__ = DTensor
        out._spec = plan.spec
        return out if plan.finish is None else plan.finish(out, args, kwargs or {})
    if plan.plain:
        return _impl(func, types, args, kwargs) if kwargs else _impl(func, types, args)
    return plan.run(args, kwargs)


class _Unhashable(Exception):
    pass


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is DTensor:
        return value._spec
    if kind is float or kind is int or kind is str or value is None:
        return float if kind is float else value
    if kind is bool:
        return (bool, value)
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind is list, *map(_part, value))
    if kind is slice:
        return (slice, _part(value.start), _part(value.stop), _part(value.step))
    if isinstance(value, Tensor):
        raise _Unhashable
    return value


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    if kwargs:
        return (
            func,
            "*",
            *map(_part, args),
            *[part for name, value in kwargs.items() for part in (name, _part(value))],
        )
    return (func, "*", *map(_part, args))


def _key_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return the key of a call; None if an argument is a plain tensor."""
    try:
        key = _key(func, args, kwargs)
        hash(key)
    except _Unhashable:
        return None
    except TypeError as error:
        raise TypeError(f"{name_of(func)}: an argument of a DTensor operation can't be hashed: {error}") from None
    return key


def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on DTensors: special functions by their handler, others by their plan."""
    if _compiler._is_compiling_flag or _is_local(func, kwargs):
        return _impl(func, types, args, kwargs or {})
    if is_operator(func) and func not in _SPECIAL and func not in BINDINGS:
        public = calls.public_call(func, lambda function: function in _SPECIAL or function in BINDINGS)
        if public is not None:
            return public(*args, **(kwargs or {}))
    if kwargs and kwargs.get("out") is not None:
        return write_out(func, args, kwargs)
    if kwargs and not _NAMES.keys().isdisjoint(kwargs) and func is not torch.segment_reduce:
        named: Any = {_NAMES.get(name, name): value for name, value in kwargs.items()}
        return func(*args, **named)
    if kwargs and type(kwargs.get("alpha")) is DTensor:  # a number (LBFGS's step size), not an operand
        kwargs = {**kwargs, "alpha": kwargs["alpha"].item()}
    if kwargs and not args and "tensors" in kwargs:
        args, kwargs = (kwargs["tensors"],), {name: value for name, value in kwargs.items() if name != "tensors"}
    special = _SPECIAL.get(func)
    if special is not None:
        if args and type(args[0]) is not DTensor and writes_plain(func, args[0]):
            return write_into_plain(func, args, kwargs or {})
        return special(func, args, kwargs or {})
    key = _key_of(func, args, kwargs)
    if key is None:
        if args and type(args[0]) is not DTensor and writes_plain(func, args[0]):
            return write_into_plain(func, args, kwargs or {})
        return dispatch(func, types, *replicate_plain(func, args, kwargs or {}))
    plan = _PLANS.get(key)
    if plan is None:
        by_name = _SPECIAL.get(("torch.nn.init", getattr(func, "__name__", "")))
        if by_name is not None:  # transformers puts functions of its own in torch.nn.init's place
            return by_name(func, args, kwargs or {})
        if func is torch.where and len(args) + len(kwargs or {}) == 1:
            return _SPECIAL["the places where", func](func, args, kwargs or {})
        plan = plan_of(key, func, args, kwargs or {})
        if plan.hot:
            short = [a._spec if type(a) is DTensor else float if type(a) is float else a for a in args]
            if kwargs:
                values = [v._spec if type(v) is DTensor else float if type(v) is float else v for v in kwargs.values()]
                short = [len(args), *short, *kwargs, *values]
            with contextlib.suppress(TypeError):  # a list among the arguments: found by the long key alone
                _PLANS[(func, *short)] = plan
    return plan.run(args, kwargs)


def _is_local(func: Any, kwargs: Any) -> bool:
    """Tell whether an operator is called on what are local parts already, in a compiled graph or in a mode.

    See Note [Operators in compiled graphs] and Note [Shapes in dispatch modes] in `hp_dtensor.torch.backward.compat`.
    """
    return (is_operator(func) or bool(kwargs and "out" in kwargs)) and is_local_call()


def plan_of(key: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a plan and store it under ``key``."""
    plan = _make(func, args, kwargs)
    _keep(key, plan)
    return plan


def _keep(key: Any, plan: Any) -> None:
    if len(_PLANS) > _LIMIT:
        _PLANS.clear()
    _PLANS[key] = plan


def remember_plain(func: Any, spec: TensorSpec) -> None:
    """From now on ``func`` of one tensor in this layout runs on the local tensor without asking its handler."""
    plan = Plan(func, [], [], single=False, hot=True)
    plan.plain = True
    _keep((func, spec), plan)


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    binding = BINDINGS.get(func)
    if binding is None:
        shown = ", ".join(
            f"{tuple(t.shape)} {t._spec.placements}" for t in tensors_of(args, kwargs) if type(t) is DTensor
        )
        raise NotImplementedError(
            f"no sharding rule for {name_of(func)} (DTensors: {shown}). {calls.advice(func, args, kwargs)}"
        )
    mesh_of(func, args, kwargs)
    try:
        return make_plan(func, binding, args, kwargs)
    except NoLegalPlacement as error:
        raise RuntimeError(f"{name_of(func)}: {error}") from None


def mesh_of(func: Any, args: Any, kwargs: Any) -> DeviceMesh:
    """Return the mesh of the operands of a call.

    Raises:
        ValueError: they are on several.
    """
    return planning.mesh_of(name_of(func), [t for t in tensors_of(args, kwargs) if isinstance(t, DTensor)])


def planned(func: Any, args: Any, kwargs: Any, floats: Any = None) -> Any:
    """Run ``func`` by its plan, bypassing its special handler.

    Args:
        func: the torch function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        floats: what of its floats the plan depends on, see Note [What a plan is found by].
    """
    key = _key_of(func, args, kwargs)
    if key is None:
        return planned(func, *replicate_plain(func, args, kwargs), floats)
    return _found(key if floats is None else (*key, floats), func, args, kwargs).run(args, kwargs)


def plan_for(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the plan of a call with only DTensors, without running it."""
    return _found(_key(func, args, kwargs), func, args, kwargs)


def _found(key: Any, func: Any, args: Any, kwargs: Any) -> Any:
    plan = _PLANS.get(key)
    return plan_of(key, func, args, kwargs) if plan is None else plan


# ---- operators and methods that programs call all the time ----
# ``a + b`` on a tensor subclass costs a microsecond before ``__torch_function__`` begins. Where the plan is known
# already, these run it at once; everything else goes the long way, to the same plans.
def _operator(name: str, func: Any) -> Callable[..., Any]:
    base = getattr(Tensor, name)

    def apply(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is DTensor:
            plan = _PLANS.get((func, self._spec, other._spec))
        elif kind is float or kind is int:
            plan = _PLANS.get((func, self._spec, float if kind is float else other))
        else:
            return base(self, other)
        if plan is None or type(self) is not DTensor or not _enabled():
            return base(self, other)
        if plan.direct:
            out = _impl(func, (), (self, other))
            out.__class__ = DTensor
            out._spec = plan.spec
            return out
        return plan.run((self, other), None)

    return apply


def _method(base: Any) -> Override:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or type(self) is not DTensor or not _enabled():
            return base(self, *args, **kwargs)
        try:
            plan = _PLANS.get((base, self._spec, *args))
        except TypeError:  # a list among the arguments
            plan = None
        if plan is None:
            return base(self, *args)
        if plan.direct:
            out = _impl(base, (), (self, *args))
        elif plan.call is not None:
            out = _impl(plan.call, (), (self, *plan.tail))
        else:
            return plan.run((self, *args), None)
        out.__class__ = DTensor
        out._spec = plan.spec
        return out if plan.finish is None else plan.finish(out, (self, *args), kwargs)

    return Override(base, apply)


def _writing(base: Any) -> Override:
    """Run an elementwise function that writes its tensor: of operands in one layout, none partial, without a plan."""

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self._spec
        if type(self) is DTensor and not spec.partial and _enabled():
            for value in args:
                kind = type(value)
                if value._spec is not spec if kind is DTensor else kind is not float:
                    break
            else:
                if spec.thin and not spec.ragged and not apart(self, args):
                    refuse_overlaps(base.__name__, self, args)
                if not kwargs:
                    return _impl(base, (), (self, *args))
                if len(kwargs) == 1 and type(kwargs.get("value")) is float:
                    return _impl(base, (), (self, *args), kwargs)
        return base(self, *args, **kwargs)

    return Override(base, apply)


def install() -> None:
    """Put all on DTensor; called once, when hp_dtensor's torch side is imported."""
    DTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment,method-assign]
    operators = {
        "__add__": Tensor.add,
        "__sub__": Tensor.sub,
        "__mul__": Tensor.mul,
        "__truediv__": Tensor.div,
        "__matmul__": Tensor.matmul,
    }
    for name, func in operators.items():
        setattr(DTensor, name, _operator(name, func))
    for name in ("view", "reshape", "transpose", "unsqueeze", "sum", "sqrt"):
        setattr(DTensor, name, _method(getattr(Tensor, name)))
    for name in ("add_", "addcdiv_", "addcmul_", "copy_", "div_", "lerp_", "mul_", "sub_"):  # an optimizer's
        setattr(DTensor, name, _writing(getattr(Tensor, name)))
