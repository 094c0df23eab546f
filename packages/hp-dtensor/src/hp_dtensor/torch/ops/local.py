"""Calls on local tensors, where a planned function itself with its own arguments would not do.

Functions here read a ``Call``: those ``…_arguments`` give the rule its arguments, the others return what runs: a
function, a pair ``(function, arguments after the first)``, a pair ``(function of the list of positional arguments,
None)``, or None for the function as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hp_dtensor.layout.placements import Partial, Replicate, Shard
from hp_dtensor.rules.arguments import adds_bias, expanded, ints, is_full, kept, offset, summed_axes, transposed
from hp_dtensor.rules.factors import NoLegalPlacement, Solution
from hp_dtensor.rules.library import dims_argument
from hp_platform import get_platform
from hp_platform.torch.internals import getter

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call

T = torch.Tensor


# ---- arguments ----
def _named(call: Call, name: str, position: int = 1) -> tuple[int, ...]:
    return ints((call.kwargs[name],)) if name in call.kwargs else ints(call.args[position:])


def _ndim(call: Call) -> int:
    return len(call.tensors[0]._spec.shape)


def to_arguments(call: Call) -> dict[str, Any]:
    return {"cast": any(isinstance(value, (torch.dtype, T)) for value in (*call.args[1:], *call.kwargs.values()))}


def permute_arguments(call: Call) -> dict[str, Any]:
    return {"order": tuple(d % _ndim(call) for d in _named(call, "dims"))}


def transpose_arguments(call: Call) -> dict[str, Any]:
    return transposed(_ndim(call), *(value for name, value in call.bound.items() if name != "input"))


def movedim_arguments(call: Call) -> dict[str, Any]:
    order = torch.movedim(
        torch.empty(tuple(range(1, _ndim(call) + 1)), device="meta"), call.bound["source"], call.bound["destination"]
    )
    return {"order": tuple(size - 1 for size in order.shape)}


def reverse_arguments(call: Call) -> dict[str, Any]:
    order = list(range(_ndim(call)))
    if call.func == getter("T"):
        order.reverse()
    elif len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return {"order": tuple(order)}


def cross_arguments(call: Call) -> dict[str, Any]:
    """Without a dim, ``torch.cross`` takes the first one of size three."""
    dim = call.bound["dim"]
    return {"dim": call.specs[0].shape.index(3) if dim is None else dim}


def einsum_arguments(call: Call) -> dict[str, Any]:
    return {"equation": call.args[0]}


def flip_arguments(call: Call) -> dict[str, Any]:
    name = "dims" if "dims" in call.bound else "dim"
    return {"dim": dims_argument(call.bound[name], _ndim(call))}


def statistics_arguments(call: Call) -> dict[str, Any]:
    """``var(x, unbiased)`` has no dim."""
    dim = call.bound["dim"]
    return {"dim": None if isinstance(dim, bool) else dim, "keepdim": call.bound["keepdim"]}


def pad_arguments(call: Call) -> dict[str, Any]:
    pad, ndim, value = call.bound["pad"], _ndim(call), call.bound["value"]
    touched = tuple(ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1])
    # a plan serves every float, so only what can't be one is known to be zero
    zero = value is None or (type(value) is int and value == 0)
    constant = call.bound["mode"] == "constant"
    return {"dim": touched, "linear": zero or not constant, "full": not constant}


def repeat_interleave(call: Call) -> dict[str, Any]:
    return {"dim": call.bound["dim"]}


def index_select_arguments(call: Call) -> dict[str, Any]:
    dim = call.bound["dim"] % max(_ndim(call), 1)
    return {"kept": tuple(None if d == dim else d for d in range(_ndim(call)))}


def convolution_arguments(call: Call) -> dict[str, Any]:
    return {"groups": call.bound["groups"], "transposed": "transpose" in call.func.__name__}


def trailing(count: int) -> Any:
    """``count`` dims at the end are whole; negative: all but so many at the beginning."""
    return lambda call: {"trailing": count if count > 0 else _ndim(call) + count}


def index_arguments(call: Call) -> dict[str, Any]:
    """``kept``: dims taken in full stay as they are."""
    return kept(expanded(call.args[1], _ndim(call)), call.shape)


def index(call: Call) -> Any:
    shape = call.specs[0].shape
    items, dim = [], 0
    for item in expanded(call.args[1], len(shape)):
        items.append(slice(None) if item is not None and is_full(item, shape[dim]) else item)
        dim += item is not None
    return T.__getitem__, (tuple(items),)


# ---- views ----
def view(call: Call) -> Any:
    """Return the same view with the local sizes of its result."""
    size = call.results[0].local_shape
    if call.func.__name__ == "ravel":  # it copies where reshape would not: a row of every other element
        return T.ravel, ()
    copies = call.func.__name__ in ("reshape", "reshape_as", "flatten")
    if call.func is T.view and call.args[1:] and isinstance(call.args[1], torch.dtype):
        raise NotImplementedError(
            "Tensor.view(dtype) of a DTensor: reinterpret the local tensor, to_local().view(dtype)"
        )
    return (T.reshape if copies else T.view), (size,)


def expand(call: Call) -> Any:
    return T.expand, (call.results[0].local_shape,)


# ---- arithmetic that depends on the whole ----
def mean(call: Call) -> Any:
    """Over a sharded dim: the local sum over the global count, a part of the mean."""
    target, result = call.targets[0], call.results[0]
    if not summed_axes(result, target):
        return None
    dims = dims_argument(call.bound["dim"], len(target.shape))
    count = math.prod(target.shape[d] for d in dims)

    def run(input: T, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> T:
        total = input.sum(dtype=dtype) if dim is None and not keepdim else input.sum(dims, keepdim, dtype=dtype)
        return total / count

    return run


def cross(call: Call) -> Any:
    """Name the dim that the whole has: the first of size three in a shard may be another."""
    if call.bound["dim"] is not None:
        return None
    dim = cross_arguments(call)["dim"]
    return lambda input, other, *_, **__: torch.linalg.cross(input, other, dim=dim)


def biased(call: Call) -> Any:
    """Return a linear map or convolution whose contracted dim is sharded: only the first rank adds the bias."""
    if len(call.targets) < 3 or adds_bias(call, call.targets[2]):
        return None
    func = call.func
    return lambda input, weight, bias, *rest, **named: func(input, weight, Elsewhere.apply(bias), *rest, **named)


class Elsewhere(torch.autograd.Function):
    """Zeros for a value that another rank adds to a sum. The sum's gradient is the same on all ranks, and so is its."""

    @staticmethod
    def forward(ctx: Any, value: T) -> T:
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        return _Counted.apply(grad) if torch.is_grad_enabled() and grad.requires_grad else grad


class _Counted(torch.autograd.Function):
    """A value as it is, whose gradient the rank that adds it sends back alone."""

    @staticmethod
    def forward(ctx: Any, value: T) -> T:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        return torch.zeros_like(grad)


def unwrapped(kernel: Any) -> Any:
    """Return the function that a function with ``inplace`` calls if it does not write."""

    def local(call: Call) -> Any:
        return None if any((*call.args[1:], *call.kwargs.values())) or not call.args else (kernel, ())

    return local


def embedding(call: Call) -> Any:
    """Rows sharded over the vocabulary: each rank looks up what it has, zeros elsewhere; the sum is the embedding.

    An index outside of the vocabulary is outside of each rank's rows, and stays so: all ranks' kernels refuse it as one
    device's would, a CPU's with an IndexError before anything is sent, a GPU's by its assertion, and none waits.
    """
    weight, result = call.targets[1], call.results[0]
    axes = [axis for axis, p in enumerate(weight.placements) if p == Shard(0)]
    bound = call.bound
    sharded = bool(axes) or any(not p.is_replicate() for p in result.placements)
    if sharded and (bound["max_norm"] is not None or bound["scale_grad_by_freq"] or bound["sparse"]):
        raise NotImplementedError(
            "F.embedding on a sharded weight: max_norm, scale_grad_by_freq and sparse are not supported, since they"
            " need all of its rows; leave sparse out, and for the others lay the weight out as Replicate()"
        )
    if not axes:
        if bound["max_norm"] is not None:
            return None
        none = -1 if bound["padding_idx"] is None else bound["padding_idx"] % weight.shape[0]
        by_freq, sparse = bound["scale_grad_by_freq"], bound["sparse"]
        return lambda args: torch.embedding(args[1], args[0], none, by_freq, sparse), None
    (start, size), count = offset(weight, 0), weight.shape[0]
    padding = bound["padding_idx"]
    if padding is not None:
        padding = padding % count - start
        padding = padding if 0 <= padding < size else None

    def run(input: T, weight: T, *_: Any, **__: Any) -> T:
        others = ((input < start) | (input >= start + size)) & (input >= 0) & (input < count)
        if not size:
            none = F.embedding(input.masked_fill(others, 0), weight.new_zeros((1, weight.shape[1])))
            return none + weight.sum() * 0
        return F.embedding((input - start).masked_fill(others, 0), weight, padding).masked_fill(others.unsqueeze(-1), 0)

    return run


def gather(call: Call) -> Any:
    """Cut along the gathered dim: each rank gives what it has, zeros elsewhere; the sum is what was gathered.

    An index outside of the dim stays so on every rank, and is refused as in ``embedding``.
    """
    source = call.targets[0]
    dim = call.bound["dim"] % max(len(source.shape), 1)
    if not any(placement == Shard(dim) for placement in source.placements):
        return None
    (start, size), count = offset(source, dim), source.shape[dim]

    def run(input: T, dim: int, index: T, **named: Any) -> T:
        others = ((index < start) | (index >= start + size)) & (index >= 0) & (index < count)
        if not size:
            one = input.new_zeros([1 if d == dim % input.dim() else n for d, n in enumerate(input.shape)])
            return torch.gather(one, dim, index.masked_fill(others, 0)) + input.sum() * 0
        return torch.gather(input, dim, (index - start).masked_fill(others, 0), **named).masked_fill(others, 0)

    return run


def attention(call: Call) -> Any:
    """Dropout is refused at each call: its probability is a float, which a plan does not depend on."""
    if call.results[0].replicated:
        return None
    func, placements = call.func, call.results[0].placements

    def run(*args: Any, **kwargs: Any) -> T:
        probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if probability:
            raise NotImplementedError(
                f"scaled_dot_product_attention with dropout_p={probability} on {placements}: its mask can't be drawn"
                " for a shard; use eager attention (its dropout is exact), or dropout_p=0"
            )
        return func(*args, **kwargs)

    return run


def cross_entropy(call: Call) -> Any:
    """Rows sharded, ``reduction="mean"``: the local sum over the global weight of the rows that count."""
    result, target = call.results[0], call.targets[1]
    bound = call.bound
    if bound["size_average"] is not None or bound["reduce"] is not None:
        raise NotImplementedError("cross_entropy of DTensors: size_average and reduce are deprecated, use reduction=")
    axes = summed_axes(result, target)
    if not axes or bound["reduction"] != "mean":
        return None
    func, ignore, mesh = call.func, bound["ignore_index"], result.mesh
    probabilities = len(call.targets[0].shape) == len(target.shape) and target.shape == call.targets[0].shape
    options = {} if probabilities else {"ignore_index": ignore}
    rows = math.prod(target.shape) // (target.shape[1] if probabilities and len(target.shape) > 1 else 1)

    def run(input: T, target: T, weight: T | None = None, *more: Any, **named: Any) -> T:
        # a float, so this call's own and not the planned one's
        smoothing = named.get("label_smoothing", more[4] if len(more) > 4 else None)
        settings = {**options, "label_smoothing": smoothing} if smoothing else options
        total = func(input, target, weight, reduction="sum", **settings)
        if probabilities:
            return total / rows
        counted = target != ignore
        count = counted.sum().to(input.dtype)
        if weight is not None:
            count = (
                weight[target.where(counted, torch.zeros_like(target))]
                .where(counted, weight.new_zeros(()))
                .sum()
                .detach()
            )
        for axis in axes:
            get_platform().collectives.all_reduce(count, "sum", group=mesh.get_group(axis))
        return total / count

    return run


def solve(call: Call, shapes: list[tuple[int, ...]]) -> Solution:
    """Keep the written operand's placements; a value that is a DTensor is replicated.

    Raises:
        NoLegalPlacement: a sum on one axis is a product on another.
    """
    written = call.specs[0].placements
    ops = {p.reduce_op for p in written if isinstance(p, Partial)}
    if "product" in ops and ops & {"sum", "avg"}:
        raise NoLegalPlacement(
            f"no parts of {written} have a given value; reduce_partial() the operand that is written first"
        )
    # each part of a sum gets the gradient of the whole sum, see Elsewhere
    varies = tuple(not p.is_replicate() and not p.is_partial("sum") for p in written)
    others = len(call.specs) - 1
    return Solution(
        (written, *((Replicate(),) * len(written),) * others),
        ((False,) * len(written), *(varies,) * others),
        (written,),
    )


def fill(call: Call) -> Any:
    """Return this rank's fill value; in a partial sum or product only the first rank gets it, the others 0 or 1."""
    placements, coordinate = call.results[0].placements, call.results[0].mesh.get_coordinate()
    combined = [a for a, p in enumerate(placements) if p.is_partial("sum") or p.is_partial("product")]
    if coordinate is None or not any(coordinate[axis] for axis in combined):
        return None
    neutral = 1 if any(p.is_partial("product") for p in placements) else 0

    def run(x: torch.Tensor, value: Any = 0) -> torch.Tensor:
        return x.fill_(Elsewhere.apply(value) + neutral if isinstance(value, torch.Tensor) else neutral)

    return run
