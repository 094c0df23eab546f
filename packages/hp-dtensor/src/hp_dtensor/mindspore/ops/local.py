"""What a planned call does on local tensors, where the kernel itself with its own arguments would not do.

Functions here read a ``Call``: those ``…_arguments`` give the rule its arguments, the others return what runs in the
kernel's place, a function of positional and keyword values, or None for the kernel as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, _Function, mint, ops
from mindspore._c_expression import TensorPy

from hp_dtensor.mindspore.backward.autograd import alias
from hp_dtensor.mindspore.ops.dispatching.shapes import pad_pairs, sliced
from hp_dtensor.rules.arguments import adds_bias, ints, offset, summed_axes, transposed
from hp_dtensor.rules.library import dims_argument
from hp_platform import get_platform

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


# ---- arguments ----
def permute_arguments(call: Call) -> dict[str, Any]:
    dims = ints(call.args[1:] or tuple(call.kwargs.values()))
    return {"order": tuple(d % len(call.shape) for d in dims)}


def transpose_arguments(call: Call) -> dict[str, Any]:
    return transposed(len(call.shape), call.bound["dim0"], call.bound["dim1"])


def last(call: Call) -> dict[str, Any]:
    return {"dim": len(call.shape) - 1}


def norm_arguments(call: Call) -> dict[str, Any]:
    return {"normalized_shape": call.bound["normalized_shape"]}


def channel_arguments(call: Call) -> dict[str, Any]:
    """``BiasAdd``: the dim that the bias is along, the last where the format names channels last."""
    last_format = call.bound["data_format"] in ("NHWC", 1)
    return {"channel": len(call.shape) - 1 if last_format else 1}


def slice_arguments(call: Call) -> dict[str, Any]:
    (shape,) = sliced(call)
    cut = tuple(d for d, size in enumerate(call.shape) if shape[d] != size)
    return {"dim": cut}


def pad_arguments(call: Call) -> dict[str, Any]:
    """Dims that are padded, by the place of their pair; a shard that is empty is not padded."""
    added = [len(call.shape) - 1 - place for place, pair in enumerate(pad_pairs(call)) if any(pair)]
    return {"dim": tuple(added), "linear": False, "full": True}


# ---- views ----
def view(call: Call) -> Any:
    """Return the same view with the local sizes of its result."""
    size = call.results[0].local_shape
    return lambda args, kwargs: TensorPy.reshape(args[0], size)


def expand(call: Call) -> Any:
    size = call.results[0].local_shape
    return lambda args, kwargs: ops.broadcast_to(args[0], size)


def bias_add(call: Call) -> Any:
    """As a sum: the CPU's own takes no gradient where the last of three dims is of size one."""
    channel, ndim = channel_arguments(call)["channel"], len(call.shape)
    shape = [-1 if d == channel else 1 for d in range(ndim)]
    return lambda args, kwargs: args[0] + TensorPy.reshape(args[1], shape)


def slice_(call: Call) -> Any:
    """Return the same slice with the local sizes; sharded dims are not sliced."""
    run, begin, size = call.func, tuple(call.bound["begin"]), call.results[0].local_shape
    return lambda args, kwargs: run([args[0], begin, size], {})


def select(call: Call) -> Any:
    """By narrow: the CPU's own select writes its gradient into a view of another size, and fails."""
    dim, index = call.bound["dim"] % len(call.shape), call.bound["index"] % call.shape[call.bound["dim"]]
    size = call.results[0].local_shape
    return lambda args, kwargs: TensorPy.reshape(mint.narrow(args[0], dim, index, 1), size)


# ---- arithmetic that depends on the whole ----
def mean(call: Call) -> Any:
    """Over a sharded dim: the local sum over the global count, a part of the mean."""
    if not summed_axes(call.results[0], call.targets[0]):
        return None
    dims = dims_argument(call.bound["dim"], len(call.shape))
    count, keep = math.prod(call.shape[d] for d in dims), bool(call.bound.get("keepdim"))
    return lambda args, kwargs: mint.sum(args[0], dims, keep) / count


def _zeros(shape: Any, dtype: Any) -> Any:
    return ops.zeros(shape, dtype) if math.prod(shape) else mint.empty(tuple(shape), dtype=dtype)


def _common(a: Any, b: Any) -> Any:
    """Return the dtype of what is made of two dtypes."""
    return a if a == b else mint.add(mint.zeros(1, dtype=a), mint.zeros(1, dtype=b)).dtype


class _Nothing(_Function):
    """What a product or a sum over no elements is: zeros, whose gradient is zeros."""

    @staticmethod
    def forward(ctx: Any, shape: Any, dtype: Any, *operands: Any) -> Any:
        ctx.made_of = [(tuple(TensorPy.shape.__get__(operand)), operand.dtype) for operand in operands]
        return _zeros(shape, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None, *(_zeros(shape, dtype) for shape, dtype in ctx.made_of)


def over_nothing(local: Callable[[Call], Any] | None = None) -> Callable[[Call], Any]:
    """As ``local`` says, but right on a rank that holds no element of an operand or of the result.

    MindSpore's CPU kernels leave such results, and the gradients of others, as they find the memory.
    """

    def planned(call: Call) -> Any:
        if all(math.prod(spec.local_shape) for spec in (*call.targets, *call.results)):
            return local(call) if local is not None else None
        shape = call.results[0].local_shape

        def run(args: Any, kwargs: Any) -> Any:
            operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            dtype = functools.reduce(_common, (operand.dtype for operand in operands))
            dtype = mindspore.int64 if dtype == mindspore.bool_ else dtype
            # plain tensors: MindSpore compares gradients with the shape that Python tells
            plain = [alias(value) for value in operands]
            return _Nothing.apply(shape, dtype, *plain)

        return run

    return planned


def layer_norm(call: Call) -> Any:
    """Right where a rank holds no rows, too: the gradients of weight and bias are zeros there."""
    if all(math.prod(spec.local_shape) for spec in call.targets):
        return None
    product, statistics = over_nothing()(call), call.results[1].local_shape

    def run(args: Any, kwargs: Any) -> Any:
        dtype = args[0].dtype
        return product(args, kwargs), _zeros(statistics, dtype), _zeros(statistics, dtype)

    return run


def linear(call: Call) -> Any:
    """As ``_linear``; over no elements a product is zeros, and the bias is still added."""
    if all(math.prod(spec.local_shape) for spec in (*call.targets, *call.results)):
        return _linear(call)
    product = over_nothing()(call)
    adds = len(call.targets) < 3 or adds_bias(call, call.targets[0])

    def run(args: Any, kwargs: Any) -> Any:
        out = product(args[:2], {})
        if len(call.targets) < 3:
            return out
        return out + (args[2] if adds else _Elsewhere.apply(alias(args[2])))

    return run


def _linear(call: Call) -> Any:
    """Compute a linear map whose contracted dim is sharded: only the first rank of those axes adds the bias."""
    if len(call.targets) < 3 or adds_bias(call, call.targets[0]):
        return None
    run = call.func
    return lambda args, kwargs: run([args[0], args[1], _Elsewhere.apply(alias(args[2]))], kwargs)


class _Elsewhere(_Function):
    """Zeros for a value that another rank adds to a sum. The sum's gradient is the same on all ranks, and so is its."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return _zeros(tuple(TensorPy.shape.__get__(value)), value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def rows(call: Call) -> Any:
    """``Gather`` from rows that are sharded: each rank looks up what it has, zeros elsewhere; the sum is the result.

    An index that is no row's is refused on the CPU, as one device's kernel does, on all of the ranks that share the
    rows, before they communicate. On Ascend, where it is undefined, it gives zeros: a check would wait for the device.
    """
    found, count = over_nothing(_rows)(call), call.targets[0].shape[0]
    on_host = get_platform().devices.kind == "cpu"

    def run(args: Any, kwargs: Any) -> Any:
        if on_host and math.prod(args[1].shape):
            values = args[1].asnumpy()
            wrong = values[(values < 0) | (values >= count)]
            if wrong.size:
                raise RuntimeError(
                    f"Gather: the indices should be in the range [0, {count}), the table's rows, but got {wrong[0]}"
                )
        return found(args, kwargs)

    return run


def _rows(call: Call) -> Any:
    source = call.targets[0]
    start, size = offset(source, 0)
    width = source.local_shape[1:]

    def run(args: Any, kwargs: Any) -> Any:
        table, index = args[0], args[1].astype(mindspore.int32) - start
        inside = mint.logical_and(index >= 0, index < size)
        found = ops.gather(table, index * inside.astype(mindspore.int32), 0)
        return found * inside.astype(table.dtype).reshape((*index.shape, *(1 for _ in width)))

    return run


def gather_arguments(call: Call) -> dict[str, Any]:
    """Refuses what the embedding rule does not say.

    Raises:
        NotImplementedError: a gather with batch dims.
    """
    if call.bound["batch_dims"]:
        raise NotImplementedError(
            f"Gather of a DTensor with batch_dims={call.bound['batch_dims']}: its indices are of each batch, which the"
            " rule does not know; use batch_dims=0, or gather the operands first with full_tensor()"
        )
    return {}
