"""Functions of lists of tensors (``torch._foreach_*``, fused steps of optimizers) and norms of whole tensors.

Elements that lie alike are computed on the local tensors, in one call; others one by one, each by its own rule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.layout.placements import RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.whole import on_whole
from hp_dtensor.torch.views.overlaps import refuse_overlaps_of_call
from hp_platform import get_platform
from hp_platform.torch.internals import get_version, plainly


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
    if all(map(_is_scalar, tensors)) and len({t._spec.mesh for t in tensors if isinstance(t, DTensor)}) > 1:
        return torch.stack([local_view(tensor) for tensor in tensors])
    return dispatch.planned(func, args, kwargs)


def _is_scalar(tensor: Any) -> bool:
    if tensor.dim() or (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return not isinstance(tensor, DTensor) or tensor._spec.replicated


_PREFIX = "_foreach_"
T = torch.Tensor


def each(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that works element by element.

    Raises:
        ValueError: a fused step of tensors that do not lie alike.
    """
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and a and isinstance(a[0], T)]
    first = lists[0] if lists else []
    beside = getattr(first[0], "_spec", None) if first else None
    wrong = _unlike(lists) or next((_place(a) for a in values if isinstance(a, T) and not _is_number(a, beside)), None)
    if wrong is not None:
        if not func.__name__.startswith(_PREFIX):
            raise ValueError(f"{func.__name__}: {wrong}; redistribute them to one layout first, without a Partial")
        return one_by_one(func, args, kwargs)
    specs = (tensor._spec for tensor in first if isinstance(tensor, DTensor))
    if func.__name__.endswith("_") and any(spec.thin and not spec.ragged for spec in specs):
        refuse_overlaps_of_call(func, args, kwargs)
    writes = func.__name__.endswith("_") and first and not plainly(T.is_inference, (), (first[0],))
    before = plainly(get_version, (), (first[0],)) if writes else None
    out = plainly(func, (), args, kwargs)
    if writes and before == plainly(get_version, (), (first[0],)):  # torch_npu's kernels for lists don't count it
        for written in lists[:1] if func.__name__.startswith(_PREFIX) else lists:
            torch.autograd.graph.increment_version(written)
    if isinstance(out, (list, tuple)):
        for result, tensor in zip(out, first, strict=True):
            if type(result) is T and isinstance(tensor, DTensor):
                wrap(result, tensor._spec)
    return out


def _unlike(lists: Sequence[Any]) -> str | None:
    """Describe the first element whose layout differs between the lists; None if there is none."""
    first = lists[0] if lists else ()
    for index, tensor in enumerate(first):
        spec = getattr(tensor, "_spec", None)
        if spec is not None and spec.partial:
            return f"element {index} is {_place(tensor)}"
        for other in lists[1:]:
            if len(other) == len(first) and getattr(other[index], "_spec", None) is not spec:
                if other[index].dim() or not _is_number(other[index], spec):
                    return f"element {index} is {_place(tensor)} in one list and {_place(other[index])} in another"
    return None


def _is_number(tensor: T, beside: TensorSpec | None) -> bool:
    """Tell whether a tensor has the same values on every rank of the layout ``beside``, and no gradient."""
    if beside is None or (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return tensor._spec.replicated and tensor._spec.mesh == beside.mesh if isinstance(tensor, DTensor) else True


def _place(tensor: Any) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {tuple(tensor.shape)} placed {tensor._spec.placements}"
    return f"a plain tensor of shape {tuple(tensor.shape)}"


# ---- one by one ----
def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of lists as the function of one tensor, for each element.

    Raises:
        NotImplementedError: torch has no such function of one tensor.
        RuntimeError: lists of different lengths.
    """
    values = (*args, *kwargs.values())
    count = max(len(value) for value in values if isinstance(value, (list, tuple)))
    for value in values:
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise RuntimeError(f"{func.__name__}: lists of {count} and of {len(value)} elements")
    single = _single(func)

    def at(value: Any, index: int) -> Any:
        if isinstance(value, (list, tuple)):
            return value[index]
        return value[index].item() if isinstance(value, T) and value.dim() else value  # a tensor of numbers

    results = [
        single(*(at(value, index) for value in args), **{name: at(value, index) for name, value in kwargs.items()})
        for index in range(count)
    ]
    return None if func.__name__.endswith("_") else tuple(results)


def _single(func: Any) -> Callable[..., Any]:
    """Return the corresponding function of one tensor."""
    name = func.__name__.removeprefix(_PREFIX)
    found = _OTHERS.get(name) or getattr(T if name.endswith("_") else torch, name, None)
    if found is None:
        raise NotImplementedError(
            f"{func.__name__} of DTensors that do not lie alike: torch has no function {name} of one tensor;"
            " redistribute them to one layout first"
        )
    return found


def _larger_(x: Any, other: Any) -> Any:
    return x.copy_(torch.maximum(x, other)) if isinstance(other, T) else x.clamp_min_(other)


def _smaller_(x: Any, other: Any) -> Any:
    return x.copy_(torch.minimum(x, other)) if isinstance(other, T) else x.clamp_max_(other)


def _power_sum(x: Any, ord: float = 2, dtype: Any = None) -> Any:
    return x.to(dtype or x.dtype).abs().pow(ord).sum()


def _times(name: str) -> Callable[..., Any]:
    """``addcmul`` and ``addcdiv``, whose factor goes by name."""
    function = getattr(T if name.endswith("_") else torch, name)
    return lambda x, a, b, value=1: function(x, a, b, value=value)


_OTHERS: dict[str, Callable[..., Any]] = {
    **{name: _times(name) for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")},
    "maximum": lambda x, other: torch.maximum(x, other) if isinstance(other, T) else torch.clamp_min(x, other),
    "minimum": lambda x, other: torch.minimum(x, other) if isinstance(other, T) else torch.clamp_max(x, other),
    "maximum_": _larger_,
    "minimum_": _smaller_,
    "powsum": _power_sum,
}


# ---- reductions ----
def foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch._foreach_norm``, which clipping calls: one reduction for all tensors of equal axes."""
    tensors = list(args[0] if args else kwargs["self"])
    order, dtype = args[1] if len(args) > 1 else kwargs.get("ord", 2), kwargs.get("dtype")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return of_each(tensors, order, dtype)


def largest(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch._foreach_max``: of whole tensors."""
    return [torch.max(tensor) for tensor in (args[0] if args else kwargs["self"])]
