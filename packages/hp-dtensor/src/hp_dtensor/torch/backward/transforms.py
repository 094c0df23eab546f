"""Transforms of torch.func and forward-mode differentiation: refused for DTensors, by name.

Note [Transforms are not intercepted]
``torch.func.grad``, ``vjp``, ``vmap`` and so on wrap their arguments in C++, bypassing ``__torch_function__`` and the
methods of a tensor's class. Inside the transform a DTensor would be a plain tensor of the local shape, and the result
silently wrong. So the functions of ``torch._functorch`` that wrap are replaced by ones that check the class first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap

from hp_dtensor.torch.dtensor import DTensor

_functorch: Any = torch._functorch  # type: ignore[attr-defined]
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


def is_wrapped(x: torch.Tensor) -> bool:
    """Tell whether a transform wrapped ``x``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]


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
    names: Any = torch._C._VariableFunctions  # type: ignore[attr-defined]
    return {getattr(names, name): _dual for name in _FORWARD.split() if hasattr(names, name)}
