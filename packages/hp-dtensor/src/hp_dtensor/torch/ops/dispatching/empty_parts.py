"""Operations on a rank that has nothing of their operands, in a graph like that of the other ranks.

Note [The graph of nothing]
Of no elements, some of torch's functions give a gradient that is in no graph, or is in one where others are not. Ranks
whose gradients differ so record different moves, and where the gradient is differentiated they would wait for each
other ever after. A rank without elements comes to the graph of the others by two ways:

- Kernels that know the gradient of nothing (``cumprod``, ``var``, attention) compute on one element, a number that
  nobody reads, and nothing of the result is taken.
- A view that is taken again after a write goes by ``as_strided``, whose gradient for nothing is zeros. Such views are
  recorded as the functions that they are: autograd's view replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _force_original_view_tracking

from hp_dtensor.layout.placements import RaggedShard

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


_RULES = frozenset({"attention", "norm", "statistics", "whole_dims"})
"""Of these, kernels compute the gradient of no elements apart."""
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def with_the_others(call: Call, rule: str, view: bool, compute: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that puts this rank into a graph like that of the others; None if ``compute`` is None.

    Args:
        call: the call, planned.
        rule: its rule's name.
        view: the result is a view.
        compute: what runs on the local tensors.
    """
    if all(_filled(spec) == spec.local_shape for spec in call.targets):
        return None
    partial = any(placement.is_partial() for spec in call.results for placement in spec.placements)
    if view or rule not in _RULES or partial:
        return _replayed(compute)  # what is no view may give one all the same: einsum squeezes a product
    return _on_stand_ins(call, compute)


def _replayed(compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _force_original_view_tracking(True):
            return compute(*args, **kwargs)

    return run


def _on_stand_ins(call: Call, compute: Callable[..., Any]) -> Callable[..., Any]:
    paths = [path for path, tensor in zip(call.paths, call.tensors, strict=True) if tensor is not None]
    shapes = {path: _filled(spec) for path, spec in zip(paths, call.targets, strict=True) if len(path) == 1}

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if not (torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and _requires_grad(x) for x in values)):
            return compute(*args, **kwargs)
        stand_ins = [_stand_in(x, shapes.get((place,))) for place, x in enumerate(args)]
        result = compute(*stand_ins, **{name: _stand_in(x, shapes.get((name,))) for name, x in kwargs.items()})
        if isinstance(result, torch.Tensor):
            return _cut(result, call.results[0].local_shape)
        parts = iter(call.results)
        cut = [_cut(x, next(parts).local_shape) if isinstance(x, torch.Tensor) else x for x in result]
        return type(result)(cut)

    return run


def _filled(spec: Any) -> tuple[int, ...]:
    """Return the local shape, with one element instead of none in dims that are not globally empty."""
    if any(isinstance(placement, RaggedShard) for placement in spec.placements):
        return spec.local_shape
    return tuple(1 if size and not local else local for size, local in zip(spec.shape, spec.local_shape, strict=True))


def _stand_in(x: Any, shape: tuple[int, ...] | None) -> Any:
    """Numbers of this shape, in the graph of ``x``, which has none; no two are equal: their variance is not 0."""
    if shape is None or tuple(x.shape) == shape:
        return x
    zeros = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if not (x.is_floating_point() or x.is_complex()):
        return zeros
    ramp = torch.arange(1, zeros.numel() + 1, dtype=torch.float32, device=x.device).cos().view(shape)
    return zeros + ramp + x.sum()


def _cut(result: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if not size:
            result = result.narrow(dim, 0, 0)
    return result
