"""Hooks for the gradient of a DTensor, which torch calls with the local one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor.torch.backward import autograd
from hp_dtensor.torch.dtensor import DTensor, local_of, redistribute, wrap

__all__ = ["on_local_gradient"]

_impl: Any = torch._C._disabled_torch_function_impl
_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]


def on_local_gradient(tensor: DTensor, hook: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    """Return the hook for the local gradient that calls ``hook`` with the DTensor.

    Args:
        tensor: the tensor to register it on. A leaf's gradient comes in the layout that the leaf has by then, another
            tensor's in the one that it has now.
        hook: takes the gradient of ``tensor``, and returns None or another in its place.
    """
    leaf, owner, now = _impl(_is_leaf, (), (tensor,)), weakref.ref(tensor), tensor._spec

    def call(grad: torch.Tensor) -> Any:
        there = owner()
        autograd.note_call(there)
        own = there._spec if leaf and there is not None else now
        spec, parts = autograd.grad_spec(own), tuple(placement.is_partial() for placement in own.placements)
        replacement = hook(wrap(autograd.of_parts(grad, spec, parts).view_as(grad), spec))
        if isinstance(replacement, DTensor):
            if replacement._spec.shape != spec.shape:
                raise RuntimeError(f"register_hook: a gradient of shape {spec.shape} became {replacement._spec.shape}")
            replacement = replacement if replacement._spec is spec else redistribute(replacement, spec)
            replacement = autograd.read_in_parts(local_of(replacement), own)
        return replacement

    return call
