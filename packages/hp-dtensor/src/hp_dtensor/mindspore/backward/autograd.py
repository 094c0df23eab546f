"""Redistribution in autograd's graph, run by a plan, with its gradient: see Note [Gradient layouts] in `layout.spec`.

Note [One sum for q, k and v]
The gradient of a value that several operations read as varying must be reduced once, not once per operation. The
redistributed value is stored in a memo of four entries, by the identity and version of its source, until backward.
Nothing is stored for a Parameter, or while nothing is recorded: those may be written without a change of their version
(``assign`` in local mode, ``set_data``, a numpy array on the same memory), and are redistributed at each read.

Note [Refused when it is used]
MindSpore tells that operations are recorded, but not why. A gradient inside another one is recorded even if only its
values are needed, and so is every gradient after an error in a differentiated function. Therefore a recorded backward
pass is not refused at once: its results come from a function whose own backward raises.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, Tensor, _Function, mint, ops
from mindspore import dtype as mstype
from mindspore._c_expression import MixedPrecisionType, NoFallbackGuard, TensorPy
from mindspore.graph.api import _pynative_executor

from hp_dtensor.layout.spec import TensorSpec, backward_scale, grad_spec
from hp_dtensor.redistribution.executor import BOOL_OPS, PROGRAMS, Arrays, Run, program_of, run_of, wrong_part
from hp_dtensor.redistribution.steps import AllReduce, AllToAll, Place, ReduceScatter, Slice, Step

if TYPE_CHECKING:
    from hp_dtensor.layout.spec import TensorSpec


@contextlib.contextmanager
def own_dtypes() -> Iterator[None]:
    """Inside, operations keep their operands' dtypes: a Cell's ``to_float`` has no effect on them."""
    _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
    try:
        yield
    finally:
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def execute(local: Tensor, spec_from: TensorSpec, spec_to: TensorSpec) -> Tensor:
    """Redistribute the local tensor ``local`` from layout ``spec_from`` to ``spec_to``, without autograd.

    Args:
        local: this rank's part, a plain tensor; not changed.
        spec_from: what ``local`` is.
        spec_to: what is wanted, of the same mesh and shape.

    Returns:
        A plain tensor. It shares memory with ``local`` only where the plan is empty.

    Raises:
        ValueError: if the meshes or the shapes of the two specs differ, or ``local`` has another shape than
            ``spec_from`` says.
        TypeError: for a reduction that booleans don't have (sum and max are "or", product and min "and").
    """
    program = PROGRAMS.get((spec_from, spec_to))
    if program is None:
        program = program_of(spec_from, spec_to, _runner)
    if tuple(local.shape) != spec_from.local_shape:
        raise wrong_part(local.shape, spec_from)
    if program:
        with NoFallbackGuard(), own_dtypes():
            local = local.contiguous()
            for run in program:
                local = run(local)
    return local


# A write into a view does not reach its base on MindSpore; nothing here writes.
_ARRAYS = Arrays(
    mint.narrow,
    lambda x, sizes: [mint.narrow(x, 0, sum(sizes[:index]), size) for index, size in enumerate(sizes)],
    lambda pieces, dim: mint.cat(list(pieces), dim),
    lambda like, shape: mint.empty(tuple(shape), dtype=like.dtype),
    lambda like, shape, value: ops.full(tuple(shape), value, dtype=like.dtype),
    Tensor.copy,
)


def _runner(step: Step, place: Place, group: Any, owned: bool) -> Run:
    def make(op: str) -> Run:
        run = run_of(step, place, group, op, _ARRAYS)
        # MindSpore refuses to assign to the view that a reshape gives.
        return (lambda local: run(local).copy()) if isinstance(step, (Slice, ReduceScatter, AllToAll)) else run

    return _reducing(step.op, make) if isinstance(step, (AllReduce, ReduceScatter)) and place.n > 1 else make("")


def _reducing(op: str, make: Callable[[str], Run]) -> Run:
    run = make(op)

    def reduce(local: Tensor) -> Tensor:
        if local.dtype != mstype.bool_:
            return run(local)
        if op not in BOOL_OPS:
            raise TypeError(f"redistribute: booleans cannot be reduced by {op!r}; convert the tensor first")
        return make(BOOL_OPS[op])(local.astype(mstype.int32)).astype(mstype.bool_)

    return reduce


_local_depth: contextvars.ContextVar[int] = contextvars.ContextVar("local_depth", default=0)
_memo: list[tuple[Any, ...]] = []
_MEMO_SIZE = 4


@contextlib.contextmanager
def local_mode() -> Iterator[None]:
    """Treat DTensors as their local tensors in every respect, shape included; results are plain tensors. Nests."""
    token = _local_depth.set(_local_depth.get() + 1)
    try:
        with NoFallbackGuard():
            yield
    finally:
        _local_depth.reset(token)


def local_only() -> bool:
    """Tell whether DTensors act as their local tensors here."""
    return _local_depth.get() > 0


def alias(local: Tensor) -> Tensor:
    """Return a new plain tensor on the memory of ``local``, in its graph.

    No reshape, through which MindSpore's second derivatives are zero (as through its views and transposes).
    """
    with local_mode():
        return TensorPy.expand_as(local, local)


def grad_enabled() -> bool:
    """Tell whether operations are recorded."""
    return bool(_pynative_executor.grad_flag())


class _Redistribute(_Function):
    """Redistribution of a local tensor from one layout to another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: TensorSpec, dst: TensorSpec, vary: Any) -> Tensor:
        ctx.layouts = src, dst, vary
        with local_mode():
            if src is dst:
                return TensorPy.reshape(x, src.local_shape)
            return execute(x, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _memo.clear()
        src, dst, vary = ctx.layouts
        scale = backward_scale(src, dst)

        def back(grad: Tensor) -> Tensor:
            moved = execute(grad, grad_spec(dst, vary), grad_spec(src))
            return moved if scale == 1.0 else moved * scale

        with local_mode():
            return once_differentiable(back, lambda: _of(src, dst), grad), None, None, None


class _InDtypes(_Function):
    """A redistribution whose value and gradient are sent in dtypes of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: TensorSpec, dst: TensorSpec, forward: Any, backward: Any) -> Tensor:
        ctx.layouts, ctx.dtypes = (src, dst), (backward or x.dtype, x.dtype)
        with local_mode():
            return execute(x.to(forward or x.dtype), src, dst)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _memo.clear()
        (src, dst), (sent, own) = ctx.layouts, ctx.dtypes
        scale = backward_scale(src, dst)

        def back(grad: Tensor) -> Tensor:
            moved = execute(grad.to(sent), grad_spec(dst), grad_spec(src)).to(own)
            return moved if scale == 1.0 else moved * scale

        with local_mode():
            return once_differentiable(back, lambda: _of(src, dst), grad), None, None, None, None


class _GradientAs(_Function):
    """The identity, whose gradient is redistributed to another layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrives: TensorSpec, leaves: TensorSpec) -> Tensor:
        ctx.layouts = arrives, leaves
        return TensorPy.reshape(x, arrives.local_shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        arrives, leaves = ctx.layouts
        with local_mode():
            moved = once_differentiable(lambda g: execute(g, arrives, leaves), lambda: _of(arrives, leaves), grad)
        return moved, None, None


def _of(src: TensorSpec, dst: TensorSpec) -> str:
    return f"a DTensor of shape {src.shape} that was read as {dst.placements} and is placed {src.placements}"


def gradient_as(local: Tensor, spec: TensorSpec, gradient: TensorSpec) -> Tensor:
    """Return a local tensor of layout ``spec`` whose gradient leaves in the layout ``gradient``."""
    if grad_enabled() and local._requires_grad:
        return _GradientAs.apply(local, grad_spec(spec), gradient)
    return alias(local)


def move(local: Tensor, src: TensorSpec, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> Tensor:
    """Redistribute a plain local tensor of layout ``src`` to layout ``dst``; differentiable."""
    if grad_enabled() and local._requires_grad:
        if src is dst and vary is None:
            return local
        # a plain tensor: MindSpore compares gradients with the shape that Python tells
        return _Redistribute.apply(alias(local), src, dst, vary)
    if src is dst:
        return local
    with local_mode():
        return execute(ops.stop_gradient(local), src, dst)


def move_in(local: Tensor, src: TensorSpec, dst: TensorSpec, forward: Any, backward: Any) -> Tensor:
    """Redistribute with the value and its gradient sent in dtypes of their own; None is the tensor's."""
    if grad_enabled() and local._requires_grad:
        return _InDtypes.apply(alias(local), src, dst, forward, backward)
    with local_mode():
        return execute(ops.stop_gradient(local).to(forward or local.dtype), src, dst)


def convert(x: Any, dst: TensorSpec, vary: tuple[bool, ...] | None = None) -> Tensor:
    """Return a DTensor's local value in layout ``dst``, as an operation reads it.

    Args:
        x: a DTensor.
        dst: the layout in which to read it.
        vary: by axis, True if the operation's result varies; None if it varies nowhere.
    """
    src = x._spec
    recorded = grad_enabled() and x._requires_grad
    if src is dst and (vary is None or not recorded):
        return x
    stored = recall(x, dst, vary, recorded)
    return stored if stored is not None else remember(x, dst, vary, recorded, move(x, src, dst, vary))


def recall(x: Any, dst: TensorSpec, how: Any, recorded: bool) -> Any:
    """Return what ``remember`` stored for ``x``, or None if there is nothing or either was written to since."""
    if not recorded:
        return None
    version = x._version
    for source, layout, kind, value, then, after in _memo:
        if source is x and layout is dst and kind == how and then == version:
            if value._version == after:
                return value
    return None


def remember(x: Any, dst: TensorSpec, how: Any, recorded: bool, value: Any) -> Any:
    """Store ``value``, which is ``x`` in layout ``dst``, where that is sound: Note [One sum for q, k and v]."""
    if recorded and not isinstance(x, Parameter):
        _memo.insert(0, (x, dst, how, value, x._version, value._version))
        del _memo[_MEMO_SIZE:]
    return value


def forget() -> None:
    """Drop the stored redistributed values: when a new gradient begins, and when memory is exchanged."""
    _memo.clear()


# ---- backward passes without a gradient ----
def once_differentiable(function: Callable[..., Any], what: Callable[[], str], *gradients: Tensor) -> Any:
    """Call ``function`` on gradients so that differentiating its result raises an error.

    Args:
        function: a function of the gradients that is not recorded; returns a tensor or a tuple of tensors.
        what: describes the differentiated value, for the error.
        gradients: plain tensors.
    """
    if _pynative_executor.requires_grad() and any(gradient._requires_grad for gradient in gradients):
        return _Once.apply(function, what, *gradients)
    return function(*gradients)


class _Once(_Function):
    """A function without a gradient: Note [Refused when it is used]."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], what: Callable[[], str], *gradients: Tensor) -> Any:
        ctx.what = what
        results = function(*gradients)  # copied: MindSpore treats a result on an argument's memory as a constant
        return tuple(each.copy() for each in results) if isinstance(results, tuple) else results.copy()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.what()} was differentiated twice: on MindSpore its gradient is a number that has no gradient itself."
            " If you need only the gradient's values, pass them to ops.stop_gradient(); a penalty on gradients needs"
            " the plain model, or torch"
        )
