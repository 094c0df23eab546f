"""Cross entropy of logits whose classes are sharded, without gathering them.

Note [Cross entropy of sharded classes]
With targets ``t`` of a row (one-hot, smoothed, times the class weights) and ``T = sum(t)``, a row's loss is
``T * logsumexp(x) - sum(t * x)``, and its gradient ``T * softmax(x) - t``. The sums over classes are sums over ranks
of local ones, so what is exchanged is three numbers a row: a maximum, and then, in one all-reduce, the sum of the
exponentials and ``sum(t * x)``. The gradient is local. Source: the vocabulary-parallel loss of Shoeybi et al.,
"Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.layout.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.layout.sharding import chunk
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.torch.dtensor import DTensor, local_of, redistribute, wrap
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.dispatch import replicate_plain
from hp_platform import get_platform

T = torch.Tensor
_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Context:
    """One ``with sharded_loss():``; ``used``: a loss was computed in it."""

    z_loss: float
    used: bool = False


# One for each nested context; not a context variable, which the threads of a backward would not see.
_contexts: list[_Context] = []


@contextlib.contextmanager
def sharded_loss(*, z_loss: float = 0.0) -> Iterator[None]:
    """See ``hp_styles.loss_parallel``."""
    context = _Context(z_loss)
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.remove(context)
    if z_loss and not context.used:
        raise RuntimeError(
            f"loss_parallel(z_loss={z_loss}): no F.cross_entropy of a DTensor was computed inside, so nothing was added"
            " to a loss; compute the loss inside, on logits that are a DTensor sharded on the class dim"
        )


@dataclass(frozen=True, slots=True)
class _Options:
    """What a call's local computation needs.

    Attributes:
        spec: layout of the logits.
        dim: the class dim.
        ignore_index, reduction, smoothing: as of ``F.cross_entropy``.
        z_loss: factor of the square of a row's logsumexp.
        dtype: of the loss.
    """

    spec: TensorSpec
    dim: int
    ignore_index: int
    reduction: str
    smoothing: float
    z_loss: float
    dtype: torch.dtype

    def reduce(self, value: T, op: str, *, over_classes: bool) -> None:
        """All-reduces over the axes that shard the classes, or over those that shard the rows."""
        for axis, placement in enumerate(self.spec.placements):
            if not placement.is_replicate() and placement.is_shard(self.dim) == over_classes:
                get_platform().collectives.all_reduce(value, op, group=self.spec.mesh.get_group(axis))

    def classes(self) -> tuple[int, int]:
        """First class that this rank holds, and how many."""
        coordinate = self.spec.mesh.get_coordinate() or ()
        start, size = 0, self.spec.shape[self.dim]
        for axis, placement in enumerate(self.spec.placements):
            if placement.is_shard(self.dim):
                inner, size = chunk(size, self.spec.mesh.shape[axis], coordinate[axis])
                start += inner
        return start, size


class _CrossEntropy(torch.autograd.Function):
    """On local tensors; see Note [Cross entropy of sharded classes]."""

    @staticmethod
    def forward(ctx: Any, x: T, target: T, weight: T | None, options: _Options) -> T:
        dim, smoothing = options.dim, options.smoothing
        start, size = options.classes()
        exact = torch.float32 if x.dtype in _HALF else x.dtype
        counted = target != options.ignore_index
        target = target.long().where(counted, 0)
        classes = options.spec.shape[dim]
        wrong = (target < 0) | (target >= classes)
        if x.device.type == "cpu" and bool(wrong.any()):
            raise IndexError(f"cross_entropy: target {int(target[wrong][0])} is out of bounds of {classes} classes")
        weight = weight.to(exact) if weight is not None else None
        own = torch.ones_like(target, dtype=exact) if weight is None else weight[target.where(~wrong, 0)]
        index = target - start
        local = (index >= 0) & (index < size)
        index = index.where(local, 0).unsqueeze(dim)
        onehot = (own * (1 - smoothing)).where(local & counted, 0)
        mass = own * (1 - smoothing)  # the sum of a row's targets
        spread = None
        if smoothing:
            every = x.new_full((classes,), smoothing / classes, dtype=exact)
            every = every if weight is None else every * weight
            mass = mass + every.sum()
            spread = every[start : start + size].reshape(-1, *[1] * (x.dim() - 1 - dim))

        wide = x.to(exact)
        lse = torch.logsumexp(wide, dim) if size else wide.new_full(target.shape, -torch.inf)
        top = lse.clone(memory_format=torch.contiguous_format)
        options.reduce(top, "max", over_classes=True)
        hit = wide.gather(dim, index).squeeze(dim).where(local, 0) * onehot if size else torch.zeros_like(onehot)
        if spread is not None:
            hit = hit + (wide * spread).sum(dim)
        both = torch.stack([(lse - top).exp(), hit])
        options.reduce(both, "sum", over_classes=True)
        lse = top + both[0].log()
        loss = (lse * mass - both[1] + options.z_loss * lse * lse).masked_fill(wrong, torch.nan)
        loss = loss.where(counted, 0)

        share = counted.to(exact)  # of a row's loss in the result
        if options.reduction == "mean":
            total = (own * share).sum()
            options.reduce(total, "sum", over_classes=False)
            share = share / total
        ctx.options = options
        ctx.spread = spread is not None
        ctx.save_for_backward(x, lse, mass, share, index, onehot, *([] if spread is None else [spread]))
        if options.reduction == "none":
            return loss.to(options.dtype)
        return (loss.sum() if options.reduction == "sum" else loss.sum() / total).to(options.dtype)

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "cross_entropy of sharded classes has no second derivative (create_graph=True); gather the classes"
                " first: logits.redistribute(placements=[Replicate(), ...])"
            )
        x, lse, mass, share, index, onehot, *spread = ctx.saved_tensors
        options, dim = ctx.options, ctx.options.dim
        by_row = grad.to(lse.dtype) * share
        gradient = (x.to(lse.dtype) - lse.unsqueeze(dim)).exp_()
        gradient *= ((mass + 2 * options.z_loss * lse) * by_row).unsqueeze(dim)
        if gradient.shape[dim]:
            gradient.scatter_add_(dim, index, -(onehot * by_row).unsqueeze(dim))
        if spread:
            gradient -= spread[0] * by_row.unsqueeze(dim)
        return gradient.to(x.dtype), None, None, None


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.cross_entropy``: here where the classes are sharded, by its rule elsewhere."""
    bound = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    logits, target = bound.get("input"), bound.get("target")
    reason = _unfit(logits, target, bound)
    if reason is not None:
        if _contexts:
            raise ValueError(f"cross_entropy inside loss_parallel: {reason}")
        return dispatch.planned(func, args, kwargs)
    if not _contexts and not all(isinstance(value, DTensor) for value in bound.values() if isinstance(value, T)):
        return _cross_entropy(func, *replicate_plain(func, args, kwargs))
    spec = logits._spec  # type: ignore[union-attr]
    dim = min(len(spec.shape) - 1, 1)
    rows = tuple(_row(placement, dim) for placement in spec.placements)
    context = _contexts[-1] if _contexts else _Context(0.0)
    local = local_of(logits)  # type: ignore[arg-type]
    wide = local.dtype in _HALF and torch.is_autocast_enabled(local.device.type)
    options = _Options(
        spec,
        dim,
        bound.get("ignore_index", -100),
        bound.get("reduction", "mean"),
        bound.get("label_smoothing", 0.0),
        context.z_loss,
        torch.float32 if wide else local.dtype,
    )
    weight = bound.get("weight")
    if weight is not None:
        weight = _read(weight, spec, (Replicate(),) * len(rows), "weight")
    loss = _CrossEntropy.apply(local, _read(bound["target"], spec, rows, "target"), weight, options)
    context.used = True
    shape = spec.shape[:dim] + spec.shape[dim + 1 :]
    if options.reduction != "none":
        rows, shape = tuple(p if p.is_replicate() else Partial() for p in rows), ()
    return wrap(loss, TensorSpec.of(spec.mesh, rows, shape))


def _row(placement: Placement, dim: int) -> Placement:
    """Return the placement of a value without the class dim."""
    if not isinstance(placement, Shard) or placement.dim == dim:
        return Replicate()
    return Shard(placement.dim - (placement.dim > dim))


def _unfit(logits: Any, target: Any, bound: dict[str, Any]) -> str | None:
    """Why a call can't be computed on sharded classes; None where it can."""
    if not isinstance(logits, DTensor) or not isinstance(target, T):
        return (
            f"the logits are {type(logits).__name__}, the target {type(target).__name__}; the logits must be a DTensor"
        )
    shape, placements = logits._spec.shape, logits._spec.placements
    dim = min(len(shape) - 1, 1)
    if not any(placement == Shard(dim) for placement in placements) or not all(
        isinstance(placement, (Shard, Replicate)) for placement in placements
    ):
        return (
            f"logits of shape {shape} placed {placements} are not sharded on the class dim {dim} (and else sharded or"
            f" replicated); redistribute them: Shard({dim}) on one axis, or leave loss_parallel out"
        )
    if target.is_floating_point():
        return "the target holds class probabilities, class indices are needed; leave loss_parallel out"
    weight = bound.get("weight")
    if weight is not None and weight.requires_grad:
        return "the weight requires a gradient, which cross_entropy does not have; pass weight.detach()"
    if bound.get("size_average") is not None or bound.get("reduce") is not None:
        return "size_average and reduce are deprecated, use reduction="
    if bound.get("reduction", "mean") not in ("mean", "sum", "none"):
        return f"reduction must be 'mean', 'sum' or 'none', got {bound['reduction']!r}"
    expected = shape[:dim] + shape[dim + 1 :]
    if tuple(target.shape) != expected:
        return f"logits of shape {shape} need a target of shape {expected}, got {tuple(target.shape)}"
    if weight is not None and tuple(weight.shape) != (shape[dim],):
        return f"{shape[dim]} classes need a weight of shape {(shape[dim],)}, got {tuple(weight.shape)}"
    return None


def _read(value: T, spec: TensorSpec, placements: tuple[Placement, ...], name: str) -> T:
    """Return the local tensor of a target or weight in the placements that follow from the logits."""
    if isinstance(value, DTensor):
        if value._spec.mesh != spec.mesh:
            raise ValueError(f"cross_entropy: the logits are on {spec.mesh}, the {name} on {value._spec.mesh}")
        return local_of(redistribute(value.detach(), value._spec.with_placements(placements)))  # type: ignore[arg-type]
    if not all(placement.is_replicate() for placement in placements):
        raise ValueError(
            f"cross_entropy inside loss_parallel: the logits are placed {spec.placements}, so a plain {name} of shape"
            f" {tuple(value.shape)} may be the whole or a part; distribute it: {placements}"
        )
    return value


def special() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """Return the handlers, by function."""
    return {F.cross_entropy: _cross_entropy}
