"""Redistribution in autograd's graph, with the right gradient: Note [Gradient layouts] in `hp_dtensor.layout.spec`.

Note [Gradients of gradients]
Every term of a partial sum gets the gradient of the sum: a replicated value that each rank reads for a term of its own.
In double backward its gradient is therefore partial: the redistribution of a gradient to a Partial is marked varying
(``read_in_parts``). Conversely, when the gradient of a Partial becomes one replicated value again, for a value that is
not partial or for the user, its own gradient is replicated, and goes back as terms (``of_parts``).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from hp_dtensor.layout.placements import Partial
from hp_dtensor.layout.spec import TensorSpec, backward_scale, grad_spec
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.views.kept import drop
from hp_platform.torch.heavy import exchanged

_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class _Redistribute(torch.autograd.Function):
    """Redistribution of a local tensor from one layout to another; ``value`` is the result if it exists already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: TensorSpec, dst: TensorSpec, vary: Any, value: Any) -> torch.Tensor:
        ctx.layouts = src, dst, vary
        ctx.source = weakref.ref(x)
        if value is not None:
            return value.detach()
        # detached: a view of a buffer could not be written to, and a view of x, on which it is stored, would be a cycle
        return x.detach() if src is dst else exchanged(functools.partial(execute, x, src, dst)).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        drop(ctx.source())
        return moved_back(grad, *ctx.layouts), None, None, None, None


_apply: Any = super(torch.autograd.Function, _Redistribute).apply  # type: ignore[attr-defined]
_transforming = torch._C._are_functorch_transforms_active


def redistributed(*args: Any) -> torch.Tensor:
    """Apply ``_Redistribute``, without torch's check of each argument for a transform that has ended."""
    return (_Redistribute.apply if _transforming() else _apply)(*args)


def moved_back(grad: torch.Tensor, src: TensorSpec, dst: TensorSpec, vary: Any) -> torch.Tensor:
    """Return the gradient of a value that was redistributed from ``src`` to ``dst``."""
    scale = backward_scale(src, dst)
    if torch.is_grad_enabled() and _requires_grad(grad):  # see Note [Gradients of gradients]
        axes = [(a.is_partial(), b.is_partial()) for a, b in zip(src.placements, dst.placements, strict=True)]
        read = tuple(a and not b for a, b in axes)
        grad = of_parts(grad, grad_spec(dst, vary), tuple(b and not a for a, b in axes))
        moved = redistributed(grad, grad_spec(dst, vary), grad_spec(src), read, None)
    else:
        moved = move(grad, grad_spec(dst, vary), grad_spec(src))
    return moved if scale == 1.0 else moved * scale


def move(local: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    """Redistribute a plain local tensor of layout ``src`` to layout ``dst``; differentiable."""
    if src is dst:
        return local
    if torch.is_grad_enabled() and _requires_grad(local):
        return redistributed(local, src, dst, None, None)
    return execute(local, src, dst)


def read_in_parts(grad: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the gradient of a value of layout ``spec`` as its partial terms read it: Note [Gradients of gradients]."""
    parts = tuple(placement.is_partial() for placement in spec.placements)
    if not (any(parts) and torch.is_grad_enabled() and _requires_grad(grad)):
        return grad
    return redistributed(grad, grad_spec(spec), grad_spec(spec), parts, None)


class AsView(torch.autograd.Function):
    """A view that autograd protects from writes, because its memory belongs to a value in another graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class GradientMoved(torch.autograd.Function):
    """The identity, whose gradient is redistributed from one layout to another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrives: TensorSpec, leaves: TensorSpec) -> torch.Tensor:
        ctx.layouts = arrives, leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return move(grad, *ctx.layouts), None, None


def of_parts(grad: torch.Tensor, spec: TensorSpec, parts: tuple[bool, ...]) -> torch.Tensor:
    """Return a gradient of layout ``spec``, of which each rank has the one for its term of a sum, as one value.

    Args:
        grad: the local gradient.
        spec: its layout, replicated on the axes of the sum.
        parts: by axis, True if it is the gradient of terms of a sum; see Note [Gradients of gradients].
    """
    if not (any(parts) and torch.is_grad_enabled() and _requires_grad(grad)):
        return grad
    placements = [Partial() if part else placement for part, placement in zip(parts, spec.placements, strict=True)]
    return GradientMoved.apply(grad, spec, spec.with_placements(placements))
