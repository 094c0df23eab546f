"""Operators and methods that programs call all the time, on the class: planned without an interception.

``a + b`` on a tensor subclass costs a microsecond before ``__torch_function__`` begins. Where the plan is known
already, these run it at once; everything else goes the long way, to the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor.torch.compile.overrides import Override
from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.dispatch import _PLANS
from hp_dtensor.torch.views.overlaps import apart, refuse_overlaps

__all__ = ["install"]

_impl: Any = torch._C._disabled_torch_function_impl
_enabled = torch._C._is_torch_function_enabled
T = torch.Tensor


def _operator(name: str, func: Any) -> Callable[..., Any]:
    base = getattr(T, name)

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
    """Wrap an elementwise function that writes its tensor: operands in one layout, none partial, need no plan."""

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
    """Set them on DTensor; called once, when hp_dtensor's torch side is imported."""
    operators = {"__add__": T.add, "__sub__": T.sub, "__mul__": T.mul, "__truediv__": T.div, "__matmul__": T.matmul}
    for name, func in operators.items():
        setattr(DTensor, name, _operator(name, func))
    for name in ("view", "reshape", "transpose", "unsqueeze", "sum", "sqrt"):
        setattr(DTensor, name, _method(getattr(T, name)))
    for name in ("add_", "addcdiv_", "addcmul_", "copy_", "div_", "lerp_", "mul_", "sub_"):  # an optimizer's
        setattr(DTensor, name, _writing(getattr(T, name)))
