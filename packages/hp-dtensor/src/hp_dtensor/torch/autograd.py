"""Moving values between placements with the right gradient.

Note [Gradient layouts]
On each mesh axis a value's placement fixes its gradient's: Shard has Shard, Partial has Replicate, and Replicate has
Replicate, unless an operation's result *varies* over the axis (it is Shard or Partial there): then each rank computes only its
own part of the gradient, which is Partial. So the backward of every move is a move again, between the gradients' placements,
and no scale factor appears. Source: the transpose rules of JAX's ``shard_map`` (pvary / psum), applied to each operation.

Note [One sum for q, k and v]
A value that several operations read as varying must be summed once, not once an operation. The moved value is kept in a
memo of four entries, found by the identity and version of the tensor it came from, and forgotten in backward. A memo on the
tensor itself would be a cycle through autograd's C++ nodes that the garbage collector cannot see; a weak reference dies at once.

Note [Partial gradients of leaves]
A leaf parameter that is replicated on an axis but used where the result varies (a norm's weight under sequence parallel)
has a partial gradient there. Summing each as it comes costs one small collective a parameter. The partial gradients
are kept beside the parameter and summed together, one collective for each set of axes, when backward ends or when
``reduce_partial_grads`` is called earlier for some parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.redistribute import execute

__all__ = ["convert", "grad_spec", "move", "recall", "reduce_partial_grads", "remember"]

_impl = torch._C._disabled_torch_function_impl
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_set_grad = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

Vary = "tuple[bool, ...] | None"
_memo: list[tuple[Any, ...]] = []
_MEMO_SIZE = 4
_pending: dict[tuple[int, tuple[bool, ...]], tuple[torch.Tensor, TensorSpec, torch.Tensor]] = {}


@functools.lru_cache(maxsize=16384)
def grad_spec(spec: TensorSpec, vary: tuple[bool, ...] | None = None) -> TensorSpec:
    """The layout of a value's gradient; see Note [Gradient layouts]."""
    made: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if vary is not None and vary[axis] and placement.is_replicate():
            made.append(Partial())
        else:
            made.append(Replicate() if placement.is_partial() else placement)
    return spec.with_placements(made)


@functools.lru_cache(maxsize=16384)
def _backward_scale(src: TensorSpec, dst: TensorSpec) -> float:
    """An average's parts get a share of its gradient: the only factor there is, for ``Partial("avg")``."""
    scale = 1.0
    for axis, (a, b) in enumerate(zip(src.placements, dst.placements, strict=True)):
        ranks = src.mesh.shape[axis]
        if a.is_partial("avg") and not b.is_partial("avg"):
            scale /= ranks
        if b.is_partial("avg") and not a.is_partial("avg"):
            scale *= ranks
    return scale


class _Redistribute(torch.autograd.Function):
    """Moves a local tensor from one layout to another; ``value`` is the moved value where it is known already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: TensorSpec, dst: TensorSpec, vary: Any, value: Any) -> torch.Tensor:
        ctx.layouts = src, dst, vary
        if value is not None:
            return value.view_as(value)
        return x.view_as(x) if src is dst else execute(x, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        _memo.clear()
        src, dst, vary = ctx.layouts
        scale = _backward_scale(src, dst)
        moved = move(grad, grad_spec(dst, vary), grad_spec(src))
        return (moved if scale == 1.0 else moved * scale), None, None, None, None


class _VaryLeaf(torch.autograd.Function):
    """A leaf used where the result varies: its gradient is partial; see Note [Partial gradients of leaves]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: list[torch.Tensor], spec: TensorSpec, vary: Any) -> torch.Tensor:
        ctx.leaf, ctx.spec, ctx.vary = leaf[0], spec, vary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        leaf, spec, vary = ctx.leaf, ctx.spec, ctx.vary
        if not _accumulates(ctx, leaf):
            return move(grad, grad_spec(spec, vary), spec), None, None, None
        key = (id(leaf), vary)
        have = _pending.get(key)
        if have is not None:
            grad = have[2] + grad
        elif not _pending:
            _engine.queue_callback(reduce_partial_grads)
        _pending[key] = (leaf, spec, grad)
        return None, None, None, None


def _accumulates(ctx: Any, leaf: torch.Tensor) -> bool:
    """True in a ``backward()`` that accumulates into ``leaf.grad``, where nobody watches the accumulation."""
    if torch.is_grad_enabled() or leaf._post_accumulate_grad_hooks or leaf._backward_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad with this leaf as an input
        return False


def reduce_partial_grads(parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Sums the partial gradients that ``parameters`` (default: all that wait) collected, and adds them to ``.grad``.

    One all-reduce for each set of axes and dtype. Collective: every rank of those axes calls it at the same point.
    Runs by itself when backward ends.

    Args:
        parameters: leaf parameters, in the same order on all ranks; those without a waiting gradient are passed over.
    """
    if not _pending:
        return
    if parameters is None:
        keys = list(_pending)
    else:
        wanted = {id(parameter) for parameter in parameters}
        keys = [key for key in _pending if key[0] in wanted]
    buckets: dict[Any, list[tuple[torch.Tensor, TensorSpec, torch.Tensor]]] = {}
    for key in keys:
        leaf, spec, grad = _pending.pop(key)
        buckets.setdefault((spec.mesh, key[1], grad.dtype, grad.device), []).append((leaf, spec, grad))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for (mesh, vary, _, _), entries in buckets.items():
            flat = torch.cat([grad.reshape(-1) for _, _, grad in entries])
            whole = TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, flat.shape)
            flat = execute(flat, grad_spec(whole, vary), whole)
            for (leaf, _, _), piece in zip(entries, flat.split([grad.numel() for _, _, grad in entries]), strict=True):
                piece = piece.view(leaf.shape)
                if leaf.grad is None:
                    leaf.grad = piece.clone()
                else:
                    leaf.grad += piece


def move(local: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    """A plain local tensor of layout ``src`` in layout ``dst``, differentiable."""
    if src is dst:
        return local
    if torch.is_grad_enabled() and _requires_grad(local):
        return _Redistribute.apply(local, src, dst, None, None)
    return execute(local, src, dst)


def convert(x: Any, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> torch.Tensor:
    """A DTensor's local value in layout ``dst``, as an operation reads it; see Note [One sum for q, k and v].

    Args:
        x: a DTensor.
        dst: the layout to read it in.
        vary: by axis, True where the operation's result varies; None where nowhere.
    """
    src = x._spec
    grad = torch.is_grad_enabled() and _impl(_requires_grad, (), (x,))
    if src is dst and (vary is None or not grad):
        return x
    found = recall(x, dst, vary)
    if found is not None:
        return found
    if not grad:
        made = execute(x, src, dst)
    elif src is dst and _impl(_is_leaf, (), (x,)):
        return _impl(_VaryLeaf.apply, (), (x, [x], src, vary))
    else:
        source = x.__dict__.get("_moved_from") if src is dst else None
        if source is not None and source[1] == _impl(_version, (), (x,)):
            value = _impl(torch.Tensor.detach, (), (x,))
            made = _impl(_Redistribute.apply, (), (source[0], source[0]._spec, dst, vary, value))
        else:
            made = _impl(_Redistribute.apply, (), (x, src, dst, vary, None))
    return remember(x, dst, vary, made)


def recall(x: Any, dst: TensorSpec, how: Any) -> Any:
    """What ``remember`` kept for ``x``, unless ``x`` or it has been written to since; None where there is nothing."""
    version, grad = _impl(_version, (), (x,)), torch.is_grad_enabled()
    for entry in _memo:
        if entry[0] is x and entry[1] is dst and entry[2] == how and entry[4] == version and entry[6] == grad:
            if entry[5] == _impl(_version, (), (entry[3],)):
                return entry[3]
    return None


def remember(x: Any, dst: TensorSpec, how: Any, made: Any) -> Any:
    """Keeps ``made``, what ``x`` became in layout ``dst``; see Note [One sum for q, k and v]."""
    _memo.insert(0, (x, dst, how, made, _impl(_version, (), (x,)), _impl(_version, (), (made,)), torch.is_grad_enabled()))
    del _memo[_MEMO_SIZE:]
    return made
