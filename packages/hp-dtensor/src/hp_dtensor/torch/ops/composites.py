"""Functions that are other functions of DTensors: those have rules, and so these are as sharded as they can be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.calls import functions_of, tensors_of
from hp_dtensor.torch.ops.functions import bind
from hp_dtensor.torch.ops.whole import on_whole
from hp_platform.torch.internals import getter

__all__ = ["special"]

T = torch.Tensor
Handler = Callable[[Any, Any, Any], Any]


# ---- products and sums ----
def _plus(input: Any, beta: Any, product: Any) -> Any:
    if beta == 0:
        return product.expand(torch.broadcast_shapes(input.shape, product.shape)).clone()
    return (input if beta == 1 else input * beta) + product


def _scaled(product: Any, alpha: Any) -> Any:
    return product if alpha == 1 else product * alpha


def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(input, beta, _scaled(torch.mm(mat1, mat2), alpha))


def addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(input, beta, _scaled(torch.mv(mat, vec), alpha))


def addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(input, beta, _scaled(torch.outer(vec1, vec2), alpha))


def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(input, beta, _scaled(torch.bmm(batch1, batch2), alpha))


def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _plus(input, beta, _scaled(torch.bmm(batch1, batch2).sum(0, dtype=batch1.dtype), alpha))


def vdot(input: Any, other: Any) -> Any:
    return torch.dot(input.conj().resolve_conj(), other)


def inner(input: Any, other: Any) -> Any:
    if not input.dim() or not other.dim():
        return input * other
    if other.dim() == 1:
        return torch.matmul(input, other)
    product = torch.matmul(input, other.reshape(-1, other.shape[-1]).t())
    return product.reshape(*input.shape[:-1], *other.shape[:-1])


def sum_to_size(input: Any, *size: Any) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.dim() - len(shape)
    if lead < 0 or any(want not in (1, have) for want, have in zip(shape, input.shape[lead:], strict=True)):
        raise RuntimeError(f"size {{{list(shape)}}} is not expandable to size {{{list(input.shape)}}}.")
    dims = [lead + d for d, want in enumerate(shape) if want == 1 != input.shape[lead + d]]
    total = input.sum(dims, keepdim=True, dtype=input.dtype) if dims else input
    return total.sum(tuple(range(lead)), dtype=input.dtype) if lead else total


def linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """Compute the loss without the options that chunk the work, which apply to global sizes."""
    if linear_weight.dim() != 2:
        named = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "ignore_index": ignore_index}
        named["label_smoothing"] = label_smoothing
        return on_whole(F.linear_cross_entropy, (input, linear_weight, target), named)
    logits = F.linear(input, linear_weight, linear_bias)
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing
    )


# ---- distances ----
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    x1, x2 = broadcast_tensors(x1, x2)
    squares = [(x * x).sum(dim).clamp_min(eps * eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (squares[0] * squares[1]).sqrt()


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def dist(input: Any, other: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)


# ---- shapes ----
def broadcast_tensors(*tensors: Any) -> Any:
    listed = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in listed))
    return tuple(tensor if tensor.shape == shape else tensor.expand(shape) for tensor in listed)  # as torch does


def _each(one: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        listed = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
        results = tuple(map(one, listed))
        return results[0] if listed is tensors and len(results) == 1 else results

    return run


@_each
def atleast_1d(x: Any) -> Any:
    return x if x.dim() else x.reshape(1)


@_each
def atleast_2d(x: Any) -> Any:
    return x if x.dim() > 1 else x.reshape(1, -1)


@_each
def atleast_3d(x: Any) -> Any:
    if x.dim() > 2:
        return x
    return x.unsqueeze(-1) if x.dim() == 2 else x.reshape(1, -1, 1)


def hstack(tensors: Any) -> Any:
    parts = atleast_1d(list(tensors))
    return torch.cat(parts, 0 if parts[0].dim() == 1 else 1)


def vstack(tensors: Any) -> Any:
    return torch.cat(atleast_2d(list(tensors)), 0)


def dstack(tensors: Any) -> Any:
    return torch.cat(atleast_3d(list(tensors)), 2)


def column_stack(tensors: Any) -> Any:
    return torch.cat([x if x.dim() > 1 else x.reshape(-1, 1) for x in tensors], 1)


def fliplr(input: Any) -> Any:
    return torch.flip(input, (1,))


def flipud(input: Any) -> Any:
    return torch.flip(input, (0,))


def unsafe_split(input: Any, split_size: Any, dim: int = 0) -> Any:
    return torch.split(input, split_size, dim)


def tensor_split(input: Any, indices_or_sections: Any, dim: int = 0) -> Any:
    if isinstance(indices_or_sections, T):
        indices_or_sections = indices_or_sections.tolist()
    return dispatch.planned(torch.tensor_split, (input, indices_or_sections, dim), {})


def narrow(input: Any, dim: int, start: Any, length: int) -> Any:
    start = int(start) if isinstance(start, T) else start
    return dispatch.planned(torch.narrow, (input, dim, start, length), {})


def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    """How often each element is repeated may be a tensor's values."""
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    counted = isinstance(repeats, T) or repeats is None
    return (on_whole if counted else dispatch.planned)(func, args, kwargs)


def interpolate(func: Any, args: Any, kwargs: Any) -> Any:
    """Interpolate; the result's shape depends on floats, and so does the plan."""
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    size, scale = bound.get("size"), bound.get("scale_factor")
    if any(tensors_of((size, scale), {})):
        return on_whole(func, args, kwargs)
    exact = tuple(scale) if isinstance(scale, (tuple, list)) else scale
    return dispatch.planned(func, args, kwargs, ("scale", exact))


def _cut(name: str, dim_of: Callable[[int], int], least: int) -> Callable[..., Any]:
    def run(input: Any, indices_or_sections: Any) -> Any:
        if input.dim() < least:
            raise RuntimeError(
                f"torch.{name} requires a tensor with at least {least} dimension, but got a tensor with {input.dim()}"
                " dimensions!"
            )
        dim = dim_of(input.dim())
        if isinstance(indices_or_sections, int) and input.shape[dim] % indices_or_sections:
            raise RuntimeError(
                f"torch.{name} attempted to split along dimension {dim}, but the size of the dimension"
                f" {input.shape[dim]} is not divisible by the split_size {indices_or_sections}!"
            )
        return tensor_split(input, indices_or_sections, dim)

    return run


def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [part for part in (prepend, input, append) if part is not None]
    result = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(min(n, result.shape[dim])):
        size = result.shape[dim]
        after, before = result.narrow(dim, 1, size - 1), result.narrow(dim, 0, size - 1)
        result = torch.logical_xor(after, before) if result.dtype is torch.bool else after - before
    return result if n else input.clone()


def constant_pad_nd(input: Any, pad: Any, value: float = 0) -> Any:
    return F.pad(input, list(pad), "constant", value)


def msort(input: Any) -> Any:
    return torch.sort(input, 0)[0]


def _copied(base: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = base(*args, **kwargs)
        return tuple(part.clone() for part in result) if isinstance(result, (list, tuple)) else result.clone()

    return run


def histc(input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Without bounds they are those of the whole."""
    bounded = min != 0 or max != 0
    return (dispatch.planned if bounded else on_whole)(torch.histc, (input, bins, min, max), {})


# ---- normalisation over the batch ----
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Training takes the statistics of the whole batch: sums of a channel's length are all that is communicated."""
    if not training:
        return dispatch.planned(
            F.batch_norm, (input, running_mean, running_var, weight, bias, False, momentum, eps), {}
        )
    if input.dim() < 2 or not input.numel():
        arguments = (input, running_mean, running_var, weight, bias, True, momentum, eps)
        return on_whole(F.batch_norm, arguments, {})
    dims = (0, *range(2, input.dim()))
    count = input.numel() // max(input.shape[1], 1)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    shape = (1, -1, *(1,) * (input.dim() - 2))
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    var = (centred * centred).mean(dims, keepdim=True)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.detach().reshape(-1) * momentum)
        if running_var is not None:
            running_var.mul_(1 - momentum).add_(var.detach().reshape(-1) * (momentum * count / (count - 1)))
    normed = centred * torch.rsqrt(var + eps)
    normed = normed if weight is None else normed * weight.reshape(shape)
    return normed if bias is None else normed + bias.reshape(shape)


def _instance_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Each channel of each image by itself, unless statistics are kept."""
    bound = inspect.signature(F.instance_norm).bind(*args, **kwargs).arguments
    kept = bound.get("running_mean") is not None or bound.get("running_var") is not None
    return (on_whole if kept else dispatch.planned)(func, args, kwargs)


# ---- losses: element by element, then a mean or a sum that leaves a partial value ----
LOSSES = """l1_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss"""


def _loss(name: str) -> Handler:
    function = getattr(F, name)
    signature = inspect.signature(function)
    weighted = "weight" in signature.parameters and not name.startswith("binary")

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        if weighted and options["weight"] is not None:
            return on_whole(func, args, kwargs)
        size_average, reduce = options.pop("size_average", None), options.pop("reduce", None)
        if size_average is not None or reduce is not None:
            raise NotImplementedError(f"{name} of DTensors: size_average and reduce are deprecated, use reduction=")
        reduction = options.pop("reduction")
        if reduction not in ("none", "mean", "sum", *(("batchmean",) if name == "kl_div" else ())):
            raise ValueError(f"{reduction} is not a valid value for reduction")
        each = dispatch.planned(function, (), {**options, "reduction": "none"})
        if reduction == "none":
            return each
        if reduction == "mean":
            return each.mean()
        return each.sum() / options["input"].shape[0] if reduction == "batchmean" else each.sum()

    return handle


def _bind_losses(table: dict[Any, Handler]) -> None:
    for name in LOSSES.split():
        bind("pointwise", getattr(F, name))
        table[getattr(F, name)] = _loss(name)


# ---- the table ----
def _handler(function: Callable[..., Any]) -> Handler:
    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return handle


def _in_place(function: Callable[..., Any]) -> Handler:
    return lambda func, args, kwargs: args[0].copy_(function(*args, **kwargs))


def special() -> dict[Any, Handler]:
    """Return the handlers, by function."""
    table: dict[Any, Handler] = {}
    composites = [
        *(addmm, addmv, addr, baddbmm, addbmm, vdot, inner, sum_to_size, linear_cross_entropy, cosine_similarity),
        *(pairwise_distance, dist, broadcast_tensors, hstack, vstack, dstack, column_stack, fliplr, flipud),
        *(unsafe_split, tensor_split, narrow, diff, constant_pad_nd, msort, histc, batch_norm),
    ]
    named = {function.__name__: function for function in composites}
    named |= {"atleast_1d": atleast_1d, "atleast_2d": atleast_2d, "atleast_3d": atleast_3d, "row_stack": vstack}
    named |= {
        "hsplit": _cut("hsplit", lambda ndim: min(ndim, 2) - 1, 1),
        "vsplit": _cut("vsplit", lambda ndim: 0, 2),
        "dsplit": _cut("dsplit", lambda ndim: 2, 3),
    }
    for name in """expand narrow permute t transpose view squeeze unsqueeze unbind split_with_sizes split diagonal
        select detach alias""".split():
        base = torch.clone if name == "alias" else getattr(torch, name, None) or getattr(T, name)
        named[f"{name}_copy"] = _copied(base)
    for name, function in named.items():
        table.update(dict.fromkeys(functions_of(name), _handler(function)))
    for function in (addmm, addmv, addr, baddbmm, addbmm):
        table[getattr(T, f"{function.__name__}_")] = _in_place(function)
    for name in ("H", "mH"):
        table[getter(name)] = _handler(lambda x: x.transpose(-2, -1).conj() if x.dim() else x)
    table[T.__rmatmul__] = _handler(lambda x, other: torch.matmul(other, x))
    table.update(dict.fromkeys(functions_of("repeat_interleave"), _repeat_interleave))
    table.update(dict.fromkeys(functions_of("interpolate upsample upsample_nearest upsample_bilinear"), interpolate))
    table[F.instance_norm] = _instance_norm
    _bind_losses(table)
    return table
