"""Global result shapes of kernels, from the shapes of their operands and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.rules.arguments import ints
from hp_dtensor.rules.library import dims_argument

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call

Shape = tuple[int, ...]


def _given(call: Call) -> list[Shape]:
    return [tensor._spec.shape for tensor in call.tensors if tensor is not None]


def same(call: Call) -> list[Shape]:
    return [call.shape]


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the shape to which these broadcast.

    Raises:
        ValueError: they don't.
    """
    ndim = max(len(shape) for shape in shapes)
    result = []
    for position in range(-ndim, 0):
        sizes = {shape[position] for shape in shapes if len(shape) >= -position} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast against each other")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def broadcast(call: Call) -> list[Shape]:
    return [broadcast_shapes(*_given(call))]


def reduced_over(shape: Shape, dim: Any, keep: Any) -> list[Shape]:
    dims = dims_argument(dim, len(shape))
    return [tuple(1 if d in dims else size for d, size in enumerate(shape) if keep or d not in dims)]


def reduced(call: Call) -> list[Shape]:
    return reduced_over(call.shape, call.bound.get("dim"), call.bound.get("keepdim"))


def reduced_twice(call: Call) -> list[Shape]:
    """Index and value, the dim named."""
    return reduced(call) * 2


def normed(call: Call) -> list[Shape]:
    """``LayerNorm``: the result, mean and variance."""
    first = int(call.bound["begin_norm_axis"]) % len(call.shape)
    statistics = tuple(size if d < first else 1 for d, size in enumerate(call.shape))
    return [call.shape, statistics, statistics]


def matmul(call: Call) -> list[Shape]:
    a, b = _given(call)[:2]
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"{call.name}: shapes {a} and {b} can't be multiplied")
    lead = broadcast_shapes(a[:-2], b[:-2]) if a[:-2] or b[:-2] else ()
    return [(*lead, *(a[-2:-1]), *(b[-1:] if len(b) > 1 else ()))]


def linear(call: Call) -> list[Shape]:
    operands = _given(call)
    if operands[0][-1] != operands[1][-1]:
        raise ValueError(
            f"{call.name}: an input of shape {operands[0]} does not fit a weight of shape {operands[1]}. This happens"
            " when local tensors of uneven shards are treated as even ones: keep the input a DTensor"
            " (use_local_output=False), or name its shape (DTensor.from_local(..., shape=))"
        )
    return [(*operands[0][:-1], operands[1][0])]


def sized(shape: Shape, size: Sequence[int]) -> Shape:
    """``size`` with its ``-1`` filled in.

    Raises:
        ValueError: it has another number of elements.
    """
    size, count = tuple(size), math.prod(shape)
    if -1 in size:
        rest = math.prod(s for s in size if s != -1)
        size = tuple(count // rest if s == -1 and rest else s for s in size)
    if math.prod(size) != count:
        raise ValueError(f"a tensor of shape {shape} can't be seen as {size}")
    return size


def reshape(call: Call) -> list[Shape]:
    return [sized(call.shape, ints(call.args[1:] or tuple(call.kwargs.values())))]


def flatten(call: Call) -> list[Shape]:
    ndim = len(call.shape)
    start, end = (int(call.bound[name]) % max(ndim, 1) for name in ("start_dim", "end_dim"))
    return [(*call.shape[:start], math.prod(call.shape[start : end + 1]), *call.shape[end + 1 :])]


def rows(call: Call) -> list[Shape]:
    """Return the shape of the legacy ``Flatten``: all dims but the first."""
    return [(call.shape[0], math.prod(call.shape[1:]))]


def sliced(call: Call) -> list[Shape]:
    """``Slice``: in each dim so many elements, -1 for all from the first on."""
    cuts = zip(call.shape, call.bound["begin"], call.bound["size"], strict=True)
    return [tuple(size - begin if length == -1 else int(length) for size, begin, length in cuts)]


def expand_dims(call: Call) -> list[Shape]:
    at = int(call.bound["dim"]) % (len(call.shape) + 1)
    return [(*call.shape[:at], 1, *call.shape[at:])]


def squeeze(call: Call) -> list[Shape]:
    dims = dims_argument(call.bound["dim"], len(call.shape))
    return [tuple(size for d, size in enumerate(call.shape) if d not in dims or size != 1)]


def permuted(order: Callable[[Call], dict[str, Any]]) -> Callable[[Call], list[Shape]]:
    return lambda call: [tuple(call.shape[d] for d in order(call)["order"])]


def expanded(call: Call) -> list[Shape]:
    size = ints(call.args[1:] or tuple(call.kwargs.values()))
    lead = len(size) - len(call.shape)
    return [tuple(call.shape[d - lead] if s == -1 else s for d, s in enumerate(size))]


def concatenated(call: Call) -> list[Shape]:
    operands = _given(call)
    (dim,) = dims_argument(call.bound["dim"], len(operands[0]))
    return [(*operands[0][:dim], sum(shape[dim] for shape in operands), *operands[0][dim + 1 :])]


def stacked(call: Call) -> list[Shape]:
    operands = _given(call)
    (dim,) = dims_argument(call.bound["dim"], len(operands[0]) + 1)
    return [(*operands[0][:dim], len(operands), *operands[0][dim:])]


def pieces(shape: Shape, dim: int, sizes: Sequence[int]) -> list[Shape]:
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]


def split(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    length, size = call.shape[dim], call.bound["split_size_or_sections"]
    if isinstance(size, int):
        size = [min(size, length - start) for start in range(0, length, size)] or [0]
    return pieces(call.shape, dim, size)


def chunked(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    length = call.shape[dim]
    size = -(-length // int(call.bound["chunks"]))
    return pieces(call.shape, dim, [min(size, length - start) for start in range(0, length, size)] or [0])


def sections(call: Call) -> list[Shape]:
    """Return the shapes of the legacy ``Split``: equal sections."""
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    count = int(call.bound["sections"])
    return pieces(call.shape, dim, [call.shape[dim] // count] * count)


def unstacked(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    return [(*call.shape[:dim], *call.shape[dim + 1 :])] * call.shape[dim]


def narrowed(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    return pieces(call.shape, dim, [int(call.bound["length"])])


def selected(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape))
    return [(*call.shape[:dim], *call.shape[dim + 1 :])]


def gathered(call: Call) -> list[Shape]:
    """``Gather``: rows of dim ``axis``."""
    source, index = _given(call)
    (dim,) = dims_argument(call.bound["axis"], len(source))
    return [(*source[:dim], *index, *source[dim + 1 :])]


def like_index(call: Call) -> list[Shape]:
    return [_given(call)[1]]


def tiled(call: Call) -> list[Shape]:
    times = ints(call.args[1:])
    lead = max(len(times) - len(call.shape), 0)
    shape = (1,) * lead + call.shape
    times = (1,) * (len(shape) - len(times)) + times
    return [tuple(size * count for size, count in zip(shape, times, strict=True))]


def top(call: Call) -> list[Shape]:
    return [(*call.shape[:-1], int(call.bound["k"]))] * 2


def one_reduced(call: Call) -> list[Shape]:
    (dim,) = dims_argument(call.bound["dim"], len(call.shape)) if call.bound["dim"] is not None else (None,)
    if dim is None:
        return [()]
    keep = call.bound.get("keepdim")
    return [tuple(1 if d == dim else size for d, size in enumerate(call.shape) if keep or d != dim)]


def padded(call: Call) -> list[Shape]:
    """``PadV3``: two sizes a dim, from the last dim on."""
    sizes = list(call.shape)
    for place, (before, after) in enumerate(pad_pairs(call)):
        sizes[len(sizes) - 1 - place] += before + after
    return [tuple(sizes)]


def pad_pairs(call: Call) -> list[tuple[int, int]]:
    """Return the padding before and after each dim, starting with the last."""
    sizes = ints(call.bound["paddings"])
    return list(zip(sizes[::2], sizes[1::2], strict=True))
