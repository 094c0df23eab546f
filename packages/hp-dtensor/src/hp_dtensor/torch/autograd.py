"""Moving values between placements with the right gradient: Note [Gradient layouts] in `hp_dtensor.gradients`.

Note [One sum for q, k and v]
A value that several operations read as varying must be summed once, not once an operation. The moved value is kept in a
memo of four entries, found by the identity and version of the tensor it came from, and forgotten in backward. A memo on
the tensor itself would be a cycle through autograd's C++ nodes that the garbage collector cannot see; a weak reference
dies at once.

Note [Gradients of gradients]
Parts of a sum all get the sum's gradient. That is a replicated value which each rank reads for a part of its own, so
where it has a gradient itself, that is partial: the move of a gradient to a Partial varies (``read_in_parts``). Where
the gradient of a Partial becomes one value again, on its way to a value that is not or in the user's hands, it is the
other way round: its own gradient is one value, and goes back in parts (``of_parts``).

Note [Partial gradients of leaves]
A leaf parameter that is replicated on an axis but used where the result varies (a norm's weight under sequence
parallel) has a partial gradient there. Summing each as it comes would cost one small collective a parameter, and an
autograd node a use. Such uses read a *shadow* instead: a second leaf on the same memory, made once for each set of
axes, that collects the partial gradient. The shadows' gradients are summed together, one collective for each set of
axes, and added to ``.grad`` when backward ends, or when ``reduce_partial_grads`` is called earlier for some parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hp_dtensor.gradients import backward_scale, grad_spec
from hp_dtensor.placements import Partial, Replicate
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.redistribute import execute

__all__ = [
    "convert",
    "forget",
    "grad_spec",
    "move",
    "of_parts",
    "read_in_parts",
    "recall",
    "reduce_partial_grads",
    "remember",
    "shadows",
]

_impl: Any = torch._C._disabled_torch_function_impl
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_hooks = torch.Tensor._backward_hooks.__get__  # type: ignore[attr-defined]
_accumulate_hooks = torch.Tensor._post_accumulate_grad_hooks.__get__  # type: ignore[attr-defined]
_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_set_grad = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id  # type: ignore[attr-defined]
_engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

waiting: dict[int, Callable[[], None]] = {}
"""What ends each pending redistribution: Note [A pending DTensor] in `hp_dtensor.torch.pending`."""
_memo: list[tuple[Any, ...]] = []
_MEMO_SIZE = 4
_pending: dict[tuple[int, tuple[bool, ...]], tuple[Any, torch.Tensor]] = {}
_tasks: list[int | None] = [None]
_NONE: dict[Any, Any] = {}


def local_mode() -> Any:
    """A context in which DTensors are their local parts in every respect; none is pending in it."""
    for end in list(waiting.values()):
        end()
    return torch._C.DisableTorchFunctionSubclass()


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
        scale = backward_scale(src, dst)
        if torch.is_grad_enabled() and _requires_grad(grad):  # see Note [Gradients of gradients]
            axes = [(a.is_partial(), b.is_partial()) for a, b in zip(src.placements, dst.placements, strict=True)]
            read = tuple(a and not b for a, b in axes)
            grad = of_parts(grad, grad_spec(dst, vary), tuple(b and not a for a, b in axes))
            moved = _Redistribute.apply(grad, grad_spec(dst, vary), grad_spec(src), read, None)
        else:
            moved = move(grad, grad_spec(dst, vary), grad_spec(src))
        return (moved if scale == 1.0 else moved * scale), None, None, None, None


def _drop_stale() -> None:
    """Forgets what a backward that failed left behind; outside backward nothing else waits."""
    for _, stale in _pending.values():
        stale.grad = None
    _pending.clear()


def _shadow(leaf: Any, vary: tuple[bool, ...]) -> torch.Tensor | None:
    """The leaf to read ``leaf`` through; None where its gradient is watched. See Note [Partial gradients of leaves]."""
    if _impl(_hooks, (), (leaf,)) or _impl(_accumulate_hooks, (), (leaf,)):
        return None
    shadow = _impl(torch.Tensor.detach, (), (leaf,)).requires_grad_()
    key, owner = (id(leaf), vary), weakref.ref(leaf)

    def collected(shadow: torch.Tensor) -> None:
        task = _graph_task()
        if task != _tasks[-1]:
            _tasks[-1] = task
            _engine.queue_callback(reduce_partial_grads)
        if owner() is not None:
            _pending[key] = (owner(), shadow)

    shadow.register_post_accumulate_grad_hook(collected)
    leaf.__dict__.setdefault("_shadows", {})[vary] = shadow
    return shadow


def shadows(leaf: torch.Tensor) -> list[tuple[tuple[bool, ...], torch.Tensor]]:
    """The shadows of a parameter, with the axes where each one's gradient is partial."""
    return list(leaf.__dict__.get("_shadows", {}).items())


def reduce_partial_grads(parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Sums the partial gradients that ``parameters`` (default: all that wait) collected, and adds them to ``.grad``.

    One all-reduce for each set of axes and dtype. Collective: every rank of those axes calls it at the same point.
    Runs by itself when backward ends.

    Args:
        parameters: leaf parameters, in the same order on all ranks; those without a waiting gradient are passed over.
    """
    if parameters is None:
        _tasks[-1] = None
    if not _pending:
        return
    if parameters is None:
        keys = list(_pending)
    else:
        wanted = {id(parameter) for parameter in parameters}
        keys = [key for key in _pending if key[0] in wanted]
    buckets: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
    for key in keys:
        leaf, shadow = _pending.pop(key)
        grad, shadow.grad = shadow.grad, None
        if grad is not None:
            buckets.setdefault((leaf._spec.mesh, key[1], grad.dtype, grad.device), []).append((leaf, grad))
    with torch._C.DisableTorchFunctionSubclass():
        for (mesh, vary, _, _), entries in buckets.items():
            alone = len(entries) == 1
            flat = entries[0][1] if alone else torch.cat([grad.reshape(-1) for _, grad in entries])
            whole = TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, flat.shape)
            flat = move(flat, grad_spec(whole, vary), whole)
            pieces = (flat,) if alone else flat.split([grad.numel() for _, grad in entries])
            for (leaf, _), piece in zip(entries, pieces, strict=True):
                have = _impl(_get_grad, (), (leaf,))
                piece = piece if alone else piece.view_as(leaf).clone()
                _impl(_set_grad, (), (leaf, piece if have is None else have + piece))


def move(local: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    """A plain local tensor of layout ``src`` in layout ``dst``, differentiable."""
    if src is dst:
        return local
    if torch.is_grad_enabled() and _requires_grad(local):
        return _Redistribute.apply(local, src, dst, None, None)
    return execute(local, src, dst)


def read_in_parts(grad: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The gradient of a value of layout ``spec`` as its parts of sums read it; see Note [Gradients of gradients]."""
    parts = tuple(placement.is_partial() for placement in spec.placements)
    if not (any(parts) and torch.is_grad_enabled() and _requires_grad(grad)):
        return grad
    return _Redistribute.apply(grad, grad_spec(spec), grad_spec(spec), parts, None)


class _OfParts(torch.autograd.Function):
    """What each rank has for its part of a sum, the same on all of them, as one replicated value."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, whole: TensorSpec, parts: TensorSpec) -> torch.Tensor:
        ctx.layouts = whole, parts
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return move(grad, *ctx.layouts), None, None


def of_parts(grad: torch.Tensor, spec: TensorSpec, parts: tuple[bool, ...]) -> torch.Tensor:
    """A gradient of layout ``spec`` that each rank has for its part of a sum, as one value.

    Args:
        grad: the local gradient.
        spec: its layout, replicated on the axes of the sum.
        parts: by axis, True where it is the gradient of parts; see Note [Gradients of gradients].
    """
    if not (any(parts) and torch.is_grad_enabled() and _requires_grad(grad)):
        return grad
    made = [Partial() if part else placement for part, placement in zip(parts, spec.placements, strict=True)]
    return _OfParts.apply(grad, spec, spec.with_placements(made))


def convert(x: Any, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> torch.Tensor:
    """A DTensor's local value in layout ``dst``, as an operation reads it; see Note [One sum for q, k and v].

    Args:
        x: a DTensor.
        dst: the layout to read it in.
        vary: by axis, True where the operation's result varies; None where nowhere.
    """
    src = x._spec
    grad = _grad_enabled() and _impl(_requires_grad, (), (x,))
    if src is dst:
        if vary is None or not grad:
            return x
        if _pending and _graph_task() == -1:
            _drop_stale()
        shadow = x.__dict__.get("_shadows", _NONE).get(vary)
        if shadow is None and _impl(_is_leaf, (), (x,)):
            shadow = _shadow(x, vary)
        if shadow is not None:
            return shadow
    found = recall(x, dst, vary)
    if found is not None:
        return found
    if not grad:
        made = execute(x, src, dst)
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
    grad = torch.is_grad_enabled()
    try:
        version = _impl(_version, (), (x,))
    except RuntimeError:  # an inference tensor: nothing tells whether it has been written to
        return None
    for entry in _memo:
        if entry[0] is x and entry[1] is dst and entry[2] == how and entry[4] == version and entry[6] == grad:
            if entry[5] == _impl(_version, (), (entry[3],)):
                return entry[3]
    return None


def forget() -> None:
    """Drops what ``remember`` kept: for who changes tensors where their version counters don't show it."""
    _memo.clear()


def remember(x: Any, dst: TensorSpec, how: Any, made: Any) -> Any:
    """Keeps ``made``, what ``x`` became in layout ``dst``; see Note [One sum for q, k and v]."""
    try:
        versions = _impl(_version, (), (x,)), _impl(_version, (), (made,))
    except RuntimeError:  # an inference tensor, see recall
        return made
    _memo.insert(0, (x, dst, how, made, *versions, torch.is_grad_enabled()))
    del _memo[_MEMO_SIZE:]
    return made
