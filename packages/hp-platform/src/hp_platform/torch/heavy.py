"""Heavy operations of PyTorch: each asks the frame it runs in, see `hp_platform.frames`.

`mark` gives the modules of a model that hold such an operation a `forward` that goes through it; outside of a frame
that is torch's own function. A function here asks for `__torch_function__` as torch's do, so that DTensors plan it.

Note [The edge of a weight]
    An operation whose weight's gradient is put off is applied to the weight without its graph, and remembers the edge
    that the gradient goes into: that of the leaf, or of what makes the weight (a cast, a DTensor's reduction over
    ranks). Running backward from all edges at once gives every leaf one gradient, summed over its uses, so hooks and
    `AccumulateGrad` run as often as in one backward.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function

from hp_platform.frames import Frame, at_site, current_frame, current_site, frame
from hp_platform.torch.internals import backward_id, is_native, without_torch_function

EXCHANGE = "exchange"
"""The site of every exchange: no module names those that a layout asks for."""

T = torch.Tensor


def linear(input: T, weight: T, bias: T | None = None) -> T:
    """Compute `input @ weight.T + bias`, as the current frame says.

    Args:
        input: (..., in features).
        weight: (out features, in features).
        bias: (out features), or None.

    Returns:
        (..., out features); the bits are those of `torch.nn.functional.linear`, gradients' too.
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(linear, tensors, input, weight, bias)
    if current_frame() is None or torch.compiler.is_compiling() or not all(map(is_native, tensors)):
        return F.linear(input, weight, bias)
    return in_frame(_LINEAR, input, weight, bias)


class Product(Protocol):
    """An operation that is linear in its input and in its weight."""

    name: str
    """For errors: "a linear layer"."""

    def output(self, input: T, weight: T, bias: T | None) -> T:
        """Compute it."""
        ...

    def to_input(self, grad: T, weight: T, shape: Sequence[int]) -> T:
        """Return the gradient of an input of a shape."""
        ...

    def to_weights(self, grad: T, input: Callable[[], T], weight: bool, bias: bool) -> list[T]:
        """Return the gradients of the weight and of the bias, those that are needed."""
        ...


def in_frame(product: Product, input: T, weight: T, bias: T | None = None) -> T:
    """Apply a product as the current frame says; without one, with the backward that the product has."""
    current = current_frame() or _NO_FRAME
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = _cast(input, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    edges: tuple[GradientEdge | None, ...] = ()
    if current.weights is not None and torch.is_grad_enabled():
        edges = tuple(_edge(tensor) for tensor in (weight, bias))
        if any(edges):
            # What `needs_input_grad` says must not depend on the weight: with its graph gone, on the input alone.
            weight, bias = weight.detach(), None if bias is None else bias.detach()
            if not input.requires_grad:
                input = input.detach().requires_grad_()  # so that there is a backward at all
        else:
            edges = ()
    return _Product.apply(input, weight, bias, product, current, current_site(), edges)


_NO_FRAME = Frame()


def _cast(tensor: T, dtype: torch.dtype) -> T:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _edge(tensor: T | None) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor is not None and tensor.requires_grad else None


class _Product(torch.autograd.Function):
    """A product with its frame."""

    @staticmethod
    def forward(
        ctx: Any,
        input: T,
        weight: T,
        bias: T | None,
        product: Product,
        frame: Frame,
        site: str | None,
        edges: Sequence[GradientEdge | None],
    ) -> T:
        compute = functools.partial(_output, product, input, weight, bias)
        out = compute() if frame.outputs is None else frame.outputs.output(site, compute)
        # Not the frame: nodes live as long as the graph, and its outputs may hold what is needed no more.
        ctx.inputs, ctx.weights, ctx.edges, ctx.shape = frame.inputs, frame.weights, edges, input.shape
        ctx.product, ctx.handle = product, None
        needs_input = ctx.needs_input_grad[1] or any(edges)
        if frame.inputs is not None and needs_input:
            ctx.handle = (frame.inputs.save(site, input),)
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, *((input,) if needs_input else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T | None, ...]:
        if torch.is_grad_enabled() and (ctx.edges or ctx.handle):
            raise RuntimeError(
                f"This second derivative passes through {ctx.product.name} whose "
                + ("weight gradient is deferred" if ctx.edges else "input is stored elsewhere")
                + " (hp_platform.frames): run this forward outside the frame"
            )
        weight, *saved = ctx.saved_tensors
        inputs: Callable[[], T] = lambda: ctx.inputs.load(ctx.handle[0]) if ctx.handle else saved[0]  # noqa: E731
        with without_torch_function():  # parameters may be DTensors, whose parts this is about
            to_input = ctx.product.to_input(grad, weight, ctx.shape) if ctx.needs_input_grad[0] else None
            if ctx.edges:
                edges = [edge for edge in ctx.edges if edge is not None]
                needed = [edge is not None for edge in ctx.edges]
                ctx.weights.put_off(edges, functools.partial(ctx.product.to_weights, grad, inputs, *needed))
                return to_input, None, None, None, None, None, None
            gradients = iter(ctx.product.to_weights(grad, inputs, *ctx.needs_input_grad[1:3]))
            to_weight, to_bias = (next(gradients) if needed else None for needed in ctx.needs_input_grad[1:3])
        return to_input, to_weight, to_bias, None, None, None, None


def _output(product: Product, input: T, weight: T, bias: T | None) -> T:
    """Compute a product that may be written to in place: a view of a function's would refuse it."""
    out = product.output(input, weight, bias)
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


class _Linear:
    """`linear`'s product."""

    name = "a linear layer"

    def output(self, input: T, weight: T, bias: T | None) -> T:
        return F.linear(input, weight, bias)

    def to_input(self, grad: T, weight: T, shape: Sequence[int]) -> T:
        return grad.reshape(-1, grad.shape[-1]).mm(weight.conj()).view(shape)

    def to_weights(self, grad: T, input: Callable[[], T], weight: bool, bias: bool = False) -> list[T]:
        rows, gradients = grad.reshape(-1, grad.shape[-1]), []
        if weight:
            value = input()
            gradients.append(rows.t().mm(value.reshape(-1, value.shape[-1]).conj()))
        if bias:
            gradients.append(rows.sum(0))
        return gradients


_LINEAR = _Linear()


def exchanged(compute: Callable[[], T]) -> T:
    """Compute an exchange between ranks, or take what a frame kept of it: an operation of the site `EXCHANGE`.

    Args:
        compute: returns a tensor that nobody writes to.
    """
    current = current_frame()
    if current is None or current.outputs is None:
        return compute()
    return current.outputs.output(EXCHANGE, compute)


def mark(module: nn.Module) -> list[str]:
    """Let the heavy operations of a model ask for their frame.

    Modules whose `forward` is `torch.nn.Linear`'s own get one that calls `linear`, with the module's name as its site.
    Marking a module again changes nothing. A module that calls `torch.nn.functional.linear` itself is not reached.

    Args:
        module: the model, or a part of it.

    Returns:
        The sites, in the order of `named_modules`.
    """
    sites = []
    for name, child in module.named_modules():
        own = vars(child).get("forward")
        if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward and own is None:
            child.forward = functools.partial(_linear_forward, child, name)
            own = child.forward
        if isinstance(own, functools.partial) and own.func is _linear_forward:
            sites.append(own.args[1])
    return sites


def _linear_forward(module: nn.Linear, site: str, input: T) -> T:
    # A compiled graph must not depend on the frame, which is another object in each step: the compiler is asked first.
    if torch.compiler.is_compiling():
        return F.linear(input, module.weight, module.bias)
    if current_frame() is None:
        again = _backward_frames.get(backward_id()) if _backward_frames else None
        if again is None:
            return F.linear(input, module.weight, module.bias)
        with frame(like=again), at_site(site):
            return linear(input, module.weight, module.bias)
    with at_site(site):
        return linear(input, module.weight, module.bias)


_backward_frames: dict[int, Frame] = {}  # by autograd's number of a backward under way


def run_backward(roots: Sequence[T | GradientEdge], gradients: Sequence[T]) -> None:
    """Run backward as `torch.autograd.backward` does, which compares shapes in 10 us of Python before the engine does.

    Args:
        roots: where backward begins.
        gradients: of the roots, one each.
    """
    if any(type(root) is not T and type(root) is not GradientEdge for root in roots):
        torch.autograd.backward([*roots], gradients)  # type: ignore[arg-type]  # subclasses may have their own
        return
    run: Any = graph._engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def backward_in(current: Frame, outputs: Sequence[T], gradients: Sequence[T]) -> None:
    """Run backward; marked linear layers that a checkpoint computes again meanwhile are computed in a frame.

    On devices they are computed by threads of autograd's own, which no frame of this thread reaches.

    Args:
        current: the frame of the forward.
        outputs: where backward begins.
        gradients: of the outputs.
    """
    tasks: list[int] = []

    def begun(_: T) -> None:
        tasks.append(backward_id())
        _backward_frames[tasks[-1]] = current

    hooks = [output.register_hook(begun) for output in outputs]
    try:
        run_backward(outputs, gradients)
    finally:
        for hook in hooks:
            hook.remove()
        for task in tasks:
            _backward_frames.pop(task, None)


class KeptOutputs:
    """Outputs kept in one pass over a block, and handed back in the next in the same order.

    `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=KeptOutputs(sites).contexts)`. The
    block may run many times; each run's outputs are kept until its own backward.

    Args:
        sites: those whose outputs are kept; None keeps all.
    """

    def __init__(self, sites: Sequence[str] | None = None) -> None:
        self.sites = None if sites is None else frozenset(sites)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the context of a block's forward and that in which it is computed again."""
        kept: deque[_Kept] = deque()
        keeping = frame(outputs=_Keeping(self.sites, kept))
        return keeping, _Again(current_frame() or Frame(), _HandingBack(self.sites, kept))


# A site, its output and the output's version when it was kept.
_Kept = tuple["str | None", T, int]


class _Again:
    """The context in which a block is computed again; a retained graph enters it again as well."""

    def __init__(self, outer: Frame, outputs: _HandingBack) -> None:
        self._frame = functools.partial(frame, like=outer, outputs=outputs)
        self._entered: list[AbstractContextManager[Frame]] = []

    def __enter__(self) -> None:
        self._entered.append(self._frame())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class _Keeping:
    """`Outputs` of the first pass."""

    def __init__(self, sites: frozenset[str] | None, kept: deque[_Kept]) -> None:
        self._sites = sites
        self._kept = kept

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        out = compute()
        if self._sites is None or site in self._sites:
            self._kept.append((site, out.detach(), out._version))
        return out


class _HandingBack:
    """`Outputs` of the second pass: what the first kept, given back one by one."""

    def __init__(self, sites: frozenset[str] | None, kept: deque[_Kept]) -> None:
        self._sites = sites
        self._kept = kept

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        if self._sites is not None and site not in self._sites:
            return compute()
        if not self._kept:
            raise RuntimeError(
                f"No output is kept for {site!r}: its block took another path when it was recomputed, or it is"
                " recomputed a second time, which retain_graph=True causes"
            )
        known, out, version = self._kept.popleft()
        if known != site:
            raise RuntimeError(
                f"Recomputation reached {site!r} where the first forward computed {known!r}: the paths differ"
            )
        if out._version != version:
            raise RuntimeError(
                f"The output of {site!r} was modified in place after it was kept ({out._version - version} times):"
                " do not keep this site, or write to a copy"
            )
        return out


class DeferredGradients:
    """The gradients of weights that a backward put off, until `run`.

    `with frame(weights=deferred):` around the forward; its backward computes the gradients of activations and queues
    the weights' here.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[list[GradientEdge], Callable[[], Sequence[T]]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def put_off(self, edges: Sequence[GradientEdge], compute: Callable[[], Sequence[T]]) -> None:
        """Queue gradients; see `hp_platform.frames.WeightGradients`."""
        self._queue.append(([*edges], compute))

    def run(self) -> None:
        """Compute what was put off, and hand it to the parameters: hooks run once each, as in one backward."""
        queue, self._queue = self._queue, []
        edges: list[GradientEdge] = []
        gradients: list[T] = []
        with torch.no_grad(), without_torch_function():
            for each, compute in queue:
                edges += each
                gradients += compute()
        if edges:
            run_backward(edges, gradients)
