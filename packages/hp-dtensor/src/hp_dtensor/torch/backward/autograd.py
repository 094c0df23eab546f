"""Local values of DTensors in autograd's graph: redistribution with its gradient, and partial gradients of leaves.

Note [Partial gradients of leaves]
A leaf parameter that is replicated on an axis but used where the result varies (a norm's weight under sequence
parallelism) has a partial gradient there. Reducing each gradient on arrival would cost one small collective per
parameter and an autograd node per use. Such uses read a *shadow* instead: a second leaf on the same memory, created
once for each set of axes, that collects the partial gradient. The shadows' gradients are reduced together, one
collective for each set of axes, and added to ``.grad`` when backward ends, or when ``reduce_partial_grads`` is called
earlier for some parameters.

A leaf with a hook is read directly from then on. Gradients that its shadows collect for an earlier forward go through
the engine to the leaf, and so to its hooks, as one global gradient. If one backward brought a leaf both a gradient by
its shadows and one of its own, the hook would be called twice, each time with part of the gradient: that is refused.

So is a hook that counts the backward that it is called in (``register_multi_grad_hook``: the leaf's gradient would come
in another one), and whoever asks for the leaf's graph node while an earlier forward's gradients bypass it.

Note [Gradients of gradients]
Every term of a partial sum gets the gradient of the sum: a replicated value that each rank reads for a term of its own.
In double backward its gradient is therefore partial: the redistribution of a gradient to a Partial is marked varying
(``read_in_parts``). Conversely, when the gradient of a Partial becomes one replicated value again, for a value that is
not partial or for the user, its own gradient is replicated, and goes back as terms (``of_parts``).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import _engine_run_backward

from hp_dtensor.layout.placements import Partial, Replicate, Shard
from hp_dtensor.layout.spec import TensorSpec, backward_scale, grad_spec
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.views.kept import drop, recall, remember
from hp_platform.extend import when_groups_end
from hp_platform.torch.heavy import exchanged
from hp_platform.torch.internals import (
    backward_id,
    get_accumulation_hooks,
    get_grad,
    get_grad_fn,
    get_hooks,
    get_is_leaf,
    get_requires_grad,
    get_retains_grad,
    get_version,
    plainly,
    set_grad,
    transforms_active,
    with_torch_function,
    without_torch_function,
)


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
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        drop(ctx.source())
        return moved_back(grad, *ctx.layouts), None, None, None, None


_apply: Any = super(torch.autograd.Function, _Redistribute).apply  # type: ignore[attr-defined]


def redistributed(*args: Any) -> torch.Tensor:
    """Apply ``_Redistribute``, without torch's check of each argument for a transform that has ended."""
    return (_Redistribute.apply if transforms_active() else _apply)(*args)


def moved_back(grad: torch.Tensor, src: TensorSpec, dst: TensorSpec, vary: Any) -> torch.Tensor:
    """Return the gradient of a value that was redistributed from ``src`` to ``dst``."""
    scale = backward_scale(src, dst)
    if torch.is_grad_enabled() and get_requires_grad(grad):  # see Note [Gradients of gradients]
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
    if torch.is_grad_enabled() and get_requires_grad(local):
        return redistributed(local, src, dst, None, None)
    return execute(local, src, dst)


def read_in_parts(grad: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the gradient of a value of layout ``spec`` as its partial terms read it: Note [Gradients of gradients]."""
    parts = tuple(placement.is_partial() for placement in spec.placements)
    if not (any(parts) and torch.is_grad_enabled() and get_requires_grad(grad)):
        return grad
    return redistributed(grad, grad_spec(spec), grad_spec(spec), parts, None)


class AsView(torch.autograd.Function):
    """A view that autograd protects from writes, because its memory belongs to a value in another graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class GradientMoved(torch.autograd.Function):
    """The identity, whose gradient is redistributed from one layout to another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arrives: TensorSpec, leaves: TensorSpec) -> torch.Tensor:
        ctx.layouts = arrives, leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return move(grad, *ctx.layouts), None, None


def of_parts(grad: torch.Tensor, spec: TensorSpec, parts: tuple[bool, ...]) -> torch.Tensor:
    """Return a gradient of layout ``spec``, of which each rank has the one for its term of a sum, as one value.

    Args:
        grad: the local gradient.
        spec: its layout, replicated on the axes of the sum.
        parts: by axis, True if it is the gradient of terms of a sum; see Note [Gradients of gradients].
    """
    if not (any(parts) and torch.is_grad_enabled() and get_requires_grad(grad)):
        return grad
    placements = [Partial() if part else placement for part, placement in zip(parts, spec.placements, strict=True)]
    return GradientMoved.apply(grad, spec, spec.with_placements(placements))


_grad_enabled = torch.is_grad_enabled
_engine = torch.autograd.Variable._execution_engine

_COUNTING = frozenset(
    code for code in torch.autograd.graph.register_multi_grad_hook.__code__.co_consts if isinstance(code, CodeType)
)
"""What ``register_multi_grad_hook`` registers: hooks that tell one backward from another."""

pending_redistributions: dict[int, Callable[[], None]] = {}
"""The function that ends each pending redistribution: Note [A pending DTensor] in `hp_dtensor.torch.moves.transfer`."""
arriving_gradients: dict[Any, Callable[[], None]] = {}
"""The functions that wait for gradients in flight, before a scaler, ``zero_grad`` or a user reads or sets one."""
_pending: dict[int, tuple[Any, tuple[bool, ...], torch.Tensor, int]] = {}
"""By the shadow's id: the leaf, the axes, the shadow, and the backward that it collected in."""
_tasks: list[int | None] = [None]
_NONE: Any = MappingProxyType({})


def finish_gradients() -> None:
    """Wait for the gradients that are in flight."""
    for bring in list(arriving_gradients.values()):
        bring()


def local_mode() -> Any:
    for end in list(pending_redistributions.values()):
        end()
    return without_torch_function()


def _drop_stale() -> None:
    """Drop what a failed backward left behind; outside of backward nothing else is pending."""
    for _, _, stale, _ in _pending.values():
        stale.grad = None
    _pending.clear()


def watched(x: Any) -> bool:
    """Tell whether ``x`` has hooks, or retains its gradient."""
    return bool(
        plainly(get_hooks, (), (x,)) or plainly(get_accumulation_hooks, (), (x,)) or plainly(get_retains_grad, (), (x,))
    )


def _shadow(leaf: Any, vary: tuple[bool, ...]) -> torch.Tensor | None:
    """Return the leaf to read ``leaf`` through, None if its gradient is watched: Note [Partial gradients of leaves]."""
    if (
        plainly(get_hooks, (), (leaf,))
        or plainly(get_accumulation_hooks, (), (leaf,))
        or "_node_taken" in leaf.__dict__
    ):
        return None
    shadow = plainly(torch.Tensor.detach, (), (leaf,)).requires_grad_()
    key, owner = id(shadow), weakref.ref(leaf)

    def collected(shadow: torch.Tensor) -> None:
        task = backward_id()
        if task != _tasks[-1]:
            _tasks[-1] = task
            _engine.queue_callback(reduce_partial_grads)
        if owner() is not None:
            _pending[key] = owner(), vary, shadow, task

    shadow.register_post_accumulate_grad_hook(collected)
    leaf.__dict__.setdefault("_shadows", {})[vary] = shadow
    return shadow


def shadows(leaf: Any) -> list[tuple[tuple[bool, ...], torch.Tensor]]:
    """Return a parameter's shadows that a graph may hold, with the axes on which each one's gradient is partial."""
    retired = [(vary, shadow()) for vary, shadow in leaf.__dict__.get("_retired", ())]
    alive = [(vary, shadow) for vary, shadow in retired if shadow is not None]
    return [*leaf.__dict__.get("_shadows", _NONE).items(), *alive]


def through_hooks(leaf: Any, own: Any, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that shadows of ``leaf`` collected, after the hooks of ``leaf``.

    Args:
        leaf: a leaf.
        own: the gradient that arrived at the leaf itself, through its hooks; None if none did.
        grad: the global gradient.

    Raises:
        RuntimeError: the leaf has hooks, and a gradient arrived at it.
    """
    for hook in (plainly(get_hooks, (), (leaf,)) or {}).values():
        if own is not None:
            _refuse_parts(leaf)
        replacement = hook(grad)
        grad = grad if replacement is None else replacement
    return grad


def retire_shadows(leaf: Any) -> None:
    """Stop reading ``leaf`` through its present shadows in later forwards; existing graphs may still hold them."""
    if "_shadows" in leaf.__dict__:
        old = [(vary, weakref.ref(shadow)) for vary, shadow in leaf.__dict__.pop("_shadows").items()]
        leaf._retired = [*(each for each in leaf.__dict__.get("_retired", ()) if each[1]() is not None), *old]


def refuse_bypassing(leaf: Any, what: str, instead: str) -> None:
    """Make later gradients of ``leaf`` arrive at its graph node, and check that those of earlier forwards do.

    Args:
        leaf: a leaf.
        what: was asked for or registered; begins the error.
        instead: what to do; ends the error.

    Raises:
        RuntimeError: the graph of an earlier forward has gradients of ``leaf`` that bypass that node.
    """
    retire_shadows(leaf)
    if shadows(leaf):
        raise RuntimeError(
            f"{what} of a DTensor leaf of shape {leaf._spec.shape} placed {leaf._spec.placements} after an operation"
            f" had read it: that operation's gradient does not come by the leaf's node in this graph; {instead}"
        )


def make_way(x: Any, hook: Any) -> None:
    """Make later gradients of ``x`` go through ``hook``, which is about to be registered.

    Raises:
        RuntimeError: gradients of earlier operations would bypass it.
    """
    refuse_late(x, "register_hook")
    if getattr(hook, "__code__", None) in _COUNTING:
        refuse_bypassing(x, "register_multi_grad_hook", "call it before the forward")
    retire_shadows(x)


def note_call(leaf: Any) -> None:
    """Record that a hook of ``leaf`` is called, in the backward that is running; None is a tensor that is gone."""
    if "_retired" in getattr(leaf, "__dict__", ()):
        leaf._called_in = backward_id()


def refuse_late(x: Any, what: str) -> None:
    """Check that no operation's gradient bypasses ``x`` before somebody watches it; see ``convert``.

    Raises:
        RuntimeError: some operation's gradient does.
    """
    if "_passed_by" in getattr(x, "__dict__", ()):
        raise RuntimeError(
            f"{what}: a DTensor of shape {x._spec.shape} placed {x._spec.placements} is the result of a redistribution,"
            " and an operation has read it since; that operation's gradient goes to the source of the redistribution"
            " and bypasses it. Call retain_grad() or register_hook() on it before its first use"
        )


def _refuse_parts(leaf: Any) -> None:
    raise RuntimeError(
        f"a hook of a DTensor leaf of shape {leaf._spec.shape} placed {leaf._spec.placements} was registered after an"
        " operation had read it, and this backward brings its gradient in two parts, of which the hook would see one at"
        " a time; register hooks of a leaf before the first forward that this backward goes through"
    )


def reduce_partial_grads(
    parameters: Iterable[torch.Tensor] | None = None, averaged: Mapping[DeviceMesh, tuple[int, ...]] = _NONE
) -> None:
    """Sum the partial gradients that ``parameters`` (default: all that have some) collected; add them to ``.grad``.

    There is one all-reduce for each set of axes and dtype. Collective: every rank of those axes must call it at the
    same point. The end of backward calls it.

    Args:
        parameters: leaf parameters, in the same order on all ranks; those without a partial gradient are skipped.
        averaged: by mesh, the axes over which the caller averages ``.grad`` next. There the terms are not summed, but
            multiplied by the number of ranks, so that their mean is the sum.

    Raises:
        RuntimeError: a hook was called with only part of its leaf's gradient; before any communication.
    """
    if parameters is None:
        _tasks[-1] = None
    if not _pending:
        return
    if parameters is None:
        keys = list(_pending)
    else:
        ids = {id(parameter) for parameter in parameters}
        keys = [key for key, (leaf, _, _, _) in _pending.items() if id(leaf) in ids]
    buckets: dict[Any, list[tuple[Any, torch.Tensor]]] = {}
    for key in keys:
        leaf, vary, shadow, task = _pending.pop(key)
        grad, shadow.grad = shadow.grad, None
        if grad is not None:
            if leaf.__dict__.get("_called_in") == task:
                _refuse_parts(leaf)
            apart = [axis for axis in averaged.get(leaf._spec.mesh, ()) if vary[axis]] if averaged else None
            if apart:
                grad = grad * math.prod(leaf._spec.mesh.shape[axis] for axis in apart)
                vary = tuple(varies and axis not in apart for axis, varies in enumerate(vary))
                if not any(vary):
                    _add_grad(leaf, grad)
                    continue
            buckets.setdefault((leaf._spec.mesh, vary, grad.dtype, grad.device), []).append((leaf, grad))
    with without_torch_function():
        for (mesh, vary, _, _), entries in buckets.items():
            if len(entries) == 1:
                [(leaf, grad)] = entries
                _add_grad(leaf, move(grad, grad_spec(leaf._spec, vary), grad_spec(leaf._spec)))
                continue
            joint = _joint(mesh, vary, tuple(leaf._spec for leaf, _ in entries))
            flat = torch.cat([grad.reshape(-1) for _, grad in entries]).view(1, joint.count)
            flat = move(flat, joint.partial, joint.summed).view(joint.count)
            for (leaf, grad), summed in zip(entries, flat.split_with_sizes(joint.sizes), strict=True):
                _add_grad(leaf, summed.view(grad.shape).clone())


class _Joint(NamedTuple):
    """Gradients side by side, to be summed at once: a row of all elements for each rank whose values differ.

    A plan cuts what ranks replicate, to sum a part on each of them; shards of one gradient differ, so they are rows.

    Attributes:
        partial: the layout of the row that each rank has.
        summed: that of the sums.
        sizes: elements of each gradient.
        count: of all.
    """

    partial: TensorSpec
    summed: TensorSpec
    sizes: list[int]
    count: int


@functools.lru_cache(maxsize=1024)
def _joint(mesh: DeviceMesh, vary: tuple[bool, ...], leaves: tuple[TensorSpec, ...]) -> _Joint:
    specs = [grad_spec(spec) for spec in leaves]
    alike = [all(spec.placements[axis].is_replicate() for spec in specs) for axis in range(mesh.ndim)]
    rows = math.prod(size for size, same in zip(mesh.shape, alike, strict=True) if not same)
    sizes = [math.prod(spec.local_shape) for spec in leaves]
    spec = TensorSpec.of(mesh, [Replicate() if same else Shard(0) for same in alike], (rows, sum(sizes)))
    return _Joint(grad_spec(spec, vary), spec, sizes, sum(sizes))


when_groups_end(_joint.cache_clear)


def _add_grad(leaf: Any, grad: torch.Tensor) -> None:
    """Add to ``leaf.grad``; by the engine if there are hooks, which are the engine's to call."""
    if "_retired" in leaf.__dict__ and (
        plainly(get_hooks, (), (leaf,)) or plainly(get_accumulation_hooks, (), (leaf,))
    ):
        with with_torch_function():  # the hooks are the user's, and see DTensors
            _engine_run_backward((leaf,), (grad,), False, grad.requires_grad, (), accumulate_grad=True)
        return
    accumulated = plainly(get_grad, (), (leaf,))
    plainly(set_grad, (), (leaf, grad if accumulated is None else accumulated + grad))


def convert(x: Any, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> torch.Tensor:
    """Return a DTensor's local value in layout ``dst``, as an operation reads it; see Note [One sum for q, k and v].

    Args:
        x: a DTensor.
        dst: the layout to read it in.
        vary: by axis, True if the operation's result varies; None if it varies nowhere.
    """
    src = x._spec
    if not (_grad_enabled() and plainly(get_requires_grad, (), (x,))):
        return x if src is dst else execute(x, src, dst)
    if src is dst:
        if vary is None:
            return x
        if _pending and backward_id() == -1:
            _drop_stale()
        shadow = x.__dict__.get("_shadows", _NONE).get(vary)
        if shadow is None and plainly(get_is_leaf, (), (x,)):
            shadow = _shadow(x, vary)
        if shadow is not None:
            return shadow
    stored = recall(x, dst, vary)
    if stored is not None:
        return stored
    source = _source(x) if src is dst and "_moved_from" in x.__dict__ else None
    if source is not None:
        value = plainly(torch.Tensor.detach, (), (x,))
        moved = plainly(redistributed, (), (source, source._spec, dst, vary, value))
        x._passed_by = True
    else:
        moved = plainly(redistributed, (), (x, src, dst, vary, None))
    return remember(x, dst, vary, moved)


def _source(x: Any) -> Any:
    """Return the source of ``x`` if its gradient may bypass ``x``: both are unchanged, and nobody watches ``x``."""
    source, version, before, graph = x._moved_from
    same = version == plainly(get_version, (), (x,)) and before == plainly(get_version, (), (source,))
    if (
        same
        and graph is plainly(get_grad_fn, (), (source,))
        and plainly(get_requires_grad, (), (source,))
        and not watched(x)
    ):
        return source
    return None


def moved_from(moved: Any, source: Any) -> None:
    """Record that ``moved`` is ``source`` in another layout, so that moving it again moves its gradient only once."""
    graph = plainly(get_grad_fn, (), (source,))
    moved._moved_from = source, plainly(get_version, (), (moved,)), plainly(get_version, (), (source,)), graph
