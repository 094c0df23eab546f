"""Norms of whole tensors from the norms of their parts, as gradient clipping asks for them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from hp_dtensor.layout.placements import RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.whole import on_whole
from hp_platform import get_platform


def of_each(tensors: list[Any], order: float, dtype: Any = None) -> list[Any]:
    """Norms of whole tensors: local norms in one pass, one reduction for each set of axes."""
    order = float(order)
    tensors = [t.reduce_partial() if isinstance(t, DTensor) and t.is_partial() else t for t in tensors]
    locals_ = [local_view(t) for t in tensors]
    if math.isinf(order) or order < 0:  # a part without elements has no norm of its own: it must not decide
        least = 0.0 if order > 0 else math.inf
        norms = [
            torch.linalg.vector_norm(part, order, dtype=dtype)
            if part.numel() or (not whole.numel() and not math.isinf(order))  # torch has none of nothing
            else part.new_full((), least, dtype=dtype)
            for part, whole in zip(locals_, tensors)
        ]
    elif dtype is None:
        norms = list(torch._foreach_norm(locals_, order))
    else:
        norms = [torch.linalg.vector_norm(t, order, dtype=dtype) for t in locals_]
    buckets: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            axes = tuple(
                a for a, p in enumerate(tensor._spec.placements) if isinstance(p, (Shard, StridedShard, RaggedShard))
            )
            if axes:
                buckets.setdefault((tensor._spec.mesh, axes, norms[i].dtype, norms[i].device), []).append(i)
    collectives = get_platform().collectives
    for (mesh, axes, _, _), members in buckets.items():
        flat = torch.stack([norms[i] for i in members])
        op = "max" if order == math.inf else "min" if order == -math.inf else "sum"
        if op == "sum" and order:
            flat = flat.pow(order)
        for axis in axes:
            collectives.all_reduce(flat, op, group=mesh.get_group(axis))
        if op == "sum" and order:
            flat = flat.pow(1.0 / order)
        for i, norm in zip(members, flat.unbind(), strict=True):
            norms[i] = norm
    return [
        (
            wrap(norm, TensorSpec.of(t._spec.mesh, [Replicate()] * t._spec.mesh.ndim, norm.shape))
            if isinstance(t, DTensor)
            else norm
        )
        for norm, t in zip(norms, tensors, strict=True)
    ]


def vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the norm of all elements as a reduction if no gradient is needed; otherwise gather the normed dims."""
    bound = {
        "ord": 2,
        "dim": None,
        "keepdim": False,
        "dtype": None,
        **dict(zip(("x", "ord", "dim", "keepdim"), args, strict=False)),
        **kwargs,
    }
    x = bound["x"]
    dims = () if bound["dim"] is None else dims_argument(bound["dim"], x.dim())
    whole = len(set(dims)) in (0, x.dim()) and not (bound["keepdim"] and x.dim())
    if whole and not (torch.is_grad_enabled() and x.requires_grad):
        return of_each([x], bound["ord"], bound["dtype"])[0]
    return dispatch.planned(func, args, kwargs)


def norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.norm`` and ``Tensor.norm``: those of vectors; the nuclear norm of the gathered matrix."""
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    order = bound.get("p", "fro")
    if order == "nuc":
        return on_whole(func, args, kwargs)
    order = 2 if order in ("fro", None) else order
    named = {name: bound[name] for name in ("dim", "keepdim", "dtype") if bound.get(name) is not None}
    return torch.linalg.vector_norm(bound["input" if "input" in bound else "self"], order, **named)


def linalg_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.linalg.norm``: of vectors, or of a gathered matrix."""
    bound = {**dict(zip(("A", "ord", "dim", "keepdim"), args, strict=False)), **kwargs}
    x, order, dim = bound["A"], bound.get("ord"), bound.get("dim")
    one = isinstance(dim, int) or (dim is not None and len(dim) == 1) or (dim is None and x.dim() == 1)
    if isinstance(order, str) or not (order is None or one):
        return on_whole(func, args, kwargs)
    named = {name: bound[name] for name in ("dim", "keepdim", "dtype") if bound.get(name) is not None}
    return torch.linalg.vector_norm(x, 2 if order is None else order, **named)


def stack(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.stack``; numbers of several meshes, such as the norms of a model's gradients, give a plain tensor.

    A parameter may be on ``("dp", "tp")`` and another on ``"dp"`` alone, equal on the ranks of ``"tp"``. So each number
    is the same on all ranks, as `hp_fsdp.clip_grad_norm_` takes it, and ``torch.nn.utils.clip_grad_norm_`` gives the
    norm of a single process.
    """
    tensors = args[0] if args else kwargs["tensors"]
    if all(map(_is_number, tensors)) and len({t._spec.mesh for t in tensors if isinstance(t, DTensor)}) > 1:
        return torch.stack([local_view(tensor) for tensor in tensors])
    return dispatch.planned(func, args, kwargs)


def _is_number(tensor: Any) -> bool:
    if tensor.dim() or (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return not isinstance(tensor, DTensor) or tensor._spec.replicated
