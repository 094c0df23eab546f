"""Dispatch: a torch function on DTensors becomes a plan, made once; plain operands and results (``out=``) on the way.

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

from hp_dtensor.functions import replicates_plain
from hp_dtensor.layout.placements import Replicate, kind_of
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.rules import planning
from hp_dtensor.rules.factors import NoLegalPlacement
from hp_dtensor.torch.backward import autograd_functions
from hp_dtensor.torch.backward.compat import is_local_call
from hp_dtensor.torch.compile.overrides import Override
from hp_dtensor.torch.compile.overrides import compiler as _compiler
from hp_dtensor.torch.dtensor import DTensor, wrap
from hp_dtensor.torch.ops.dispatching import calls
from hp_dtensor.torch.ops.dispatching.calls import is_operator, name_of, tensors_of
from hp_dtensor.torch.ops.dispatching.plans import Plan, make_plan
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_dtensor.torch.views.moved_view import PartOfView
from hp_dtensor.torch.views.overlaps import apart, refuse_overlaps, refuse_overlaps_of_call
from hp_platform.extend import map_nested, when_groups_end
from hp_platform.torch.internals import is_transformed, plainly, torch_function_enabled

Tensor = torch.Tensor
_SIZED = ("view", "reshape", "expand", "repeat", "tile", "narrow", "unfold", "unflatten", "new_zeros", "new_ones")
_TAKE_NUMBERS = {getattr(owner, name) for owner in (Tensor, torch) for name in _SIZED if hasattr(owner, name)}
"""Functions whose arguments after the first are sizes: models compute them as tensors, too."""

_SHARED = (
    " Where two modules share it as their weight, give both a style. A module with a style's name takes and returns"
    " DTensors; one with its class, such as ColwiseParallel(), plain tensors."
)


def replicate_plain(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Plain tensors as replicated DTensors: scalars always, others where the user said so.

    Raises:
        ValueError: others (a TypeError would be taken for an operator that is not supported).
        RuntimeError: others, where the DTensor says of itself (``_meets_plain``) why it meets none.
    """
    some = next(tensor for tensor in tensors_of(args, kwargs) if type(tensor) is DTensor)
    mesh = some._spec.mesh

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or type(value) is DTensor:
            return value
        if func in _TAKE_NUMBERS and not value.dim() and not value.is_floating_point():
            return int(value)
        if is_transformed(value):
            autograd_functions.refuse("a transform of torch.func around an operation", some)
        if type(value) is not Tensor and not isinstance(value, (torch.nn.Parameter, PartOfView)):
            raise ValueError(f"{name_of(func)}: a {kind_of(value)} can't be mixed with DTensors of hp_dtensor")
        if value.dim() and not replicates_plain():
            if why := some.__dict__.get("_meets_plain"):
                raise RuntimeError(f"{name_of(func)}: {why}")
            shared = _SHARED if hasattr(some, "_is_param") else ""
            raise ValueError(
                f"{name_of(func)}: a plain tensor of shape {tuple(value.shape)} meets a DTensor of shape"
                f" {tuple(some.shape)} placed {some._spec.placements}. Distribute it (distribute_tensor or"
                " DTensor.from_local), or take plain tensors as replicated: `with hp_dtensor.implicit_replication():`"
                + shared
            )
        alias = (
            plainly(Tensor.view_as, (), (value, value)) if value.requires_grad else plainly(Tensor.detach, (), (value,))
        )
        return wrap(alias, TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, value.shape))

    return map_nested(change, tuple(args)), {k: map_nested(change, v) for k, v in kwargs.items()}


def writes_plain(func: Any, first: Any) -> bool:
    """Tell whether a function writes into its first operand, and that is a plain tensor."""
    if type(first) is DTensor or not isinstance(first, Tensor):
        return False
    return name_of(func).rstrip(")").endswith("_") and not name_of(func).endswith("__")


def write_into_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that writes into its first operand, a plain tensor, with gathered values.

    The plain tensor goes on being one, taken as replicated, and its gradient reaches the DTensors. A number goes into
    any: ``torch.nn.utils.clip_grad_norm_`` scales all gradients by one, of plain parameters too.

    Raises:
        ValueError: plain tensors are not taken as replicated here.
    """
    some = next((tensor for tensor in tensors_of(args, kwargs) if type(tensor) is DTensor and tensor.dim()), None)
    if some is not None and not replicates_plain():
        raise ValueError(
            f"{name_of(func)}: writing a DTensor of shape {tuple(some.shape)} into a plain tensor of shape"
            f" {tuple(args[0].shape)}; gather it first: full_tensor()"
        )
    named = {name: map_nested(_whole, value) for name, value in kwargs.items()}
    return func(*map_nested(_whole, args), **named)


def _whole(value: Any) -> Any:
    return value.full_tensor() if type(value) is DTensor else value


T = torch.Tensor
_FACTORIES = {torch.arange, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros}
"""They make the same on every rank."""


def write_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` with ``out=``, a DTensor or a tuple of them.

    Raises:
        RuntimeError: the results require gradients, or have another shape or a dtype that ``out`` can't hold, or
            ``out`` shows some of the elements that are read, not each at its own place.
        ValueError: plain tensors on one side, DTensors on the other, or a Partial to be written.
    """
    named = {name: value for name, value in kwargs.items() if name != "out"}
    several = isinstance(kwargs["out"], (list, tuple))
    outs = list(kwargs["out"]) if several else [kwargs["out"]]
    operands: list[Any] = list(tensors_of(args, named))
    what = f"{name_of(func)} with out="
    if not all(isinstance(tensor, DTensor) for tensor in outs):
        plain = next(tensor for tensor in outs if not isinstance(tensor, DTensor))
        raise ValueError(
            f"{what} a plain tensor of shape {tuple(plain.shape)}, of DTensors: the result is distributed; use the"
            " returned tensor, or copy_ its full_tensor()"
        )
    if func not in _FACTORIES and not any(isinstance(tensor, DTensor) for tensor in operands):
        raise ValueError(
            f"{what} a DTensor of shape {tuple(outs[0].shape)}, of nothing distributed: distribute them first"
            " (distribute_tensor or DTensor.from_local), or copy_ the distributed result"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*outs, *operands)):
        raise RuntimeError(
            f"{what}: functions with out= don't support automatic differentiation, and an argument requires gradients;"
            " use the returned tensor, or torch.no_grad()"
        )
    for tensor in outs:
        if tensor.is_partial():
            raise ValueError(f"{what} a DTensor placed {tensor.placements}: reduce_partial() it first")
    refuse_overlaps_of_call(func, args, kwargs)
    result = func(*args, **named)
    if func in _FACTORIES:
        result = wrap(result, TensorSpec.of(outs[0]._spec.mesh, [Replicate()] * outs[0]._spec.mesh.ndim, result.shape))
    for tensor, value in zip(outs, result if several else [result], strict=True):
        _check(what, tensor, value)
    for tensor, value in zip(outs, result if several else [result], strict=True):
        tensor.copy_(value)
    return type(result)(outs) if several else outs[0]


def _check(what: str, out: Any, value: Any) -> None:
    if out.shape != value.shape:
        raise RuntimeError(
            f"{what} a DTensor of shape {tuple(out.shape)}: the result has shape {tuple(value.shape)}, and a"
            " distributed tensor can't be resized; use the returned tensor"
        )
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(f"{what}: result type {value.dtype} can't be cast to the desired output type {out.dtype}")


_PLANS: dict[Any, Any] = {}
when_groups_end(_PLANS.clear)
_LIMIT = 1 << 16
_SPECIAL: dict[Any, Any] = {}
_NAMES = {"axis": "dim", "keepdims": "keepdim"}
"""Names of numpy's, which torch's functions take as well; one has them for its own."""


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        count = len(args)
        a = args[0]
        if type(a) is not DTensor:
            plan = _PLANS[_short_key(func, args, kwargs)]
        elif kwargs:  # from here on `_short_key` written out, for the calls that programs make most
            if len(kwargs) == 1 and count < 3:
                [(name, value)] = kwargs.items()
                kind = type(value)
                value = value._spec if kind is DTensor else float if kind is float else value
                if count == 1:
                    plan = _PLANS[func, 1, a._spec, name, value]
                else:
                    b = args[1]
                    b_type = type(b)
                    b = b._spec if b_type is DTensor else float if b_type is float else b
                    plan = _PLANS[func, 2, a._spec, b, name, value]
            else:
                plan = _PLANS[
                    (
                        func,
                        count,
                        *[a._spec if type(a) is DTensor else float if type(a) is float else a for a in args],
                        *kwargs,
                        *[v._spec if type(v) is DTensor else float if type(v) is float else v for v in kwargs.values()],
                    )
                ]
        elif count == 2:
            b = args[1]
            b_type = type(b)
            plan = _PLANS[func, a._spec, b._spec if b_type is DTensor else float if b_type is float else b]
        elif count == 1:
            plan = _PLANS[func, a._spec]
        else:
            plan = _PLANS[(func, *[a._spec if type(a) is DTensor else float if type(a) is float else a for a in args])]
    except (KeyError, TypeError, AttributeError, IndexError):
        plan = None
    if plan is None:  # outside the handler: an error of the operation has nothing to do with the one that was caught
        return dispatch(func, types, args, kwargs)
    if plan.direct:
        out = plainly(func, types, args, kwargs) if kwargs else plainly(func, types, args)
        out.__class__ = DTensor
        out._spec = plan.spec
        return out if plan.finish is None else plan.finish(out, args, kwargs or {})
    if plan.call is not None:
        out = plainly(plan.call, types, (args[0], *plan.tail))
        out.__class__ = DTensor
        out._spec = plan.spec
        return out if plan.finish is None else plan.finish(out, args, kwargs or {})
    if plan.plain:
        return plainly(func, types, args, kwargs) if kwargs else plainly(func, types, args)
    return plan.run(args, kwargs)


def _short(value: Any) -> Any:
    kind = type(value)
    return value._spec if kind is DTensor else float if kind is float else value


def _short_key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the key by which `_torch_function` finds a plan."""
    if args and type(args[0]) in (list, tuple):
        return _key_of_list(func, args, kwargs)
    short = map(_short, args)
    return (func, len(args), *short, *kwargs, *map(_short, kwargs.values())) if kwargs else (func, *short)


def _key_of_list(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the short key of a call with a list of DTensors first, as `torch.cat` has it.

    Raises:
        AttributeError: one of the list is not a DTensor.
    """
    first, *others = args
    key = (func, type(first), len(first), *[tensor._spec for tensor in first], *map(_short, others))
    return (*key, *kwargs, *map(_short, kwargs.values())) if kwargs else key


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
        return plainly(func, types, args, kwargs or {})
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
            with contextlib.suppress(TypeError, AttributeError):  # a list elsewhere, or of plain tensors too
                short = _short_key(func, args, kwargs)
                # With tensors in a tuple, which a key would keep alive, it is found by the long key alone.
                if next(tensors_of(short, {}), None) is None:
                    _PLANS[short] = plan
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
        if plan is None or type(self) is not DTensor or not torch_function_enabled():
            return base(self, other)
        if plan.direct:
            out = plainly(func, (), (self, other))
            out.__class__ = DTensor
            out._spec = plan.spec
            return out
        return plan.run((self, other), None)

    return apply


def _method(base: Any) -> Override:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or type(self) is not DTensor or not torch_function_enabled():
            return base(self, *args, **kwargs)
        try:
            plan = _PLANS.get((base, self._spec, *args))
        except TypeError:  # a list among the arguments
            plan = None
        if plan is None:
            return base(self, *args)
        if plan.direct:
            out = plainly(base, (), (self, *args))
        elif plan.call is not None:
            out = plainly(plan.call, (), (self, *plan.tail))
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
        if type(self) is DTensor and not spec.partial and torch_function_enabled():
            for value in args:
                kind = type(value)
                if value._spec is not spec if kind is DTensor else kind is not float:
                    break
            else:
                if spec.thin and not spec.ragged and not apart(self, args):
                    refuse_overlaps(base.__name__, self, args)
                if not kwargs:
                    return plainly(base, (), (self, *args))
                if len(kwargs) == 1 and type(kwargs.get("value")) is float:
                    return plainly(base, (), (self, *args), kwargs)
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
