"""Kernels that no sharding rule decides: on whole tensors, of random numbers, of extremes along a cut dim.

Whole tensors are gathered on every rank: right for every layout, with nothing saved. A rare kernel may stand in this
list instead of having a rule; none runs so by default. Every rank computes the whole result, which is replicated, and
its gradient is that of one device.

A mask of random numbers is the part of the one that one device draws. Every rank draws for the whole tensor, for a
moment, and keeps its part; so the ranks' seeds and their states must agree, as those of `rand` and of replicated
tensors do.

The largest and the smallest along a cut dim, and what is looked up along one, are found without gathering it: so a
cross entropy of logits whose classes are sharded sends numbers of the size of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hp_dtensor.layout.placements import Partial, Replicate, Shard
from hp_dtensor.layout.sharding import local_shape
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import convert, execute, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, redistribute, wrap
from hp_dtensor.rules.arguments import offset
from hp_dtensor.rules.library import dims_argument
from hp_dtensor.rules.planning import mesh_of
from hp_platform import get_platform
from hp_platform.extend import map_nested

WHOLE = frozenset(
    """Bincount Conv2DTranspose CountNonZero Diag Diagonal DiagonalExt DeprecatedTake Eye Gcd GatherNd Histogram
    HistogramFixedWidth Im2Col IndexAddExt IndexFill InTopK IsIn KthValue L2Normalize Lcm LinSpace LpNorm LSTM
    MaskedScatter MaskedSelect MatrixDiagV3 MatrixInverse Median MedianDim MedianExt Meshgrid Mode
    MultiMarginLoss NonZero NonZeroExt Range ResizeBicubic ResizeBilinearV2 ResizeNearestNeighborV2
    ReverseSequence Scatter ScatterAddExt ScatterNd SearchSorted SegmentSum SpaceToBatchND TensorScatterAdd
    TensorScatterDiv TensorScatterElements TensorScatterMax TensorScatterMin TensorScatterMul TensorScatterSub
    TensorScatterUpdate Trace TraceExt TrilIndices TriuIndices Unique Unique2 UniqueConsecutive UniqueDim
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentSum""".split()
)
"""Names of kernels."""

WRITING = frozenset({"IndexAdd"})
"""Those that write into their first operand, too: what they made of it is put back."""


def replicated(value: Any, mesh: Any) -> Any:
    """Wrap the plain tensors of a nest as DTensors that are replicated on ``mesh``."""
    if isinstance(value, (list, tuple)):
        return type(value)(replicated(item, mesh) for item in value)
    if not isinstance(value, Tensor):
        return value
    with local_mode():
        shape = tuple(value.shape)
    return wrap(value, TensorSpec.of(mesh, (Replicate(),) * mesh.ndim, shape))


def on_whole(name: str, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel on gathered values.

    Args:
        name: the kernel's name.
        run: calls it: ``run(positional values, keyword values)``.
        args: its positional arguments, every tensor a DTensor.
        kwargs: its keyword arguments.

    Raises:
        ValueError: DTensors of two meshes.
    """
    operands: list[DTensor] = []

    def gather(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        operands.append(value)
        return convert(value, value._spec.with_placements((Replicate(),) * value._spec.mesh.ndim))

    if name in WRITING and not args[0]._spec.replicated:
        raise RuntimeError(
            f"{name}: it writes into its first operand, a DTensor placed {args[0]._spec.placements} whose parts would"
            " stay as they are; redistribute it to Replicate() first"
        )
    positional = map_nested(gather, list(args))
    named = {name: map_nested(gather, value) for name, value in kwargs.items()}
    mesh = mesh_of(name, operands)
    with local_mode():
        out = run(positional, named)
    return replicated(out, mesh)


DRAWING = frozenset({"Dropout", "DropoutExt"})
"""Names of kernels: of a tensor and more, the result and its mask."""


def draw(run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dropout of a DTensor, laid out as it is (a Partial is reduced first).

    Args:
        run: calls the kernel: ``run(positional values, keyword values)``.
        args: its positional arguments, the tensor first.
        kwargs: its keyword arguments.

    Returns:
        The result and the mask's factors, DTensors.
    """
    x: DTensor = args[0]
    spec = x._spec.with_placements([Replicate() if p.is_partial() else p for p in x._spec.placements])
    x = x if spec is x._spec else redistribute(x, spec)
    with local_mode():
        whole: Tensor = run([ops.ones(spec.shape, x.dtype), *args[1:]], kwargs)[0]
        factors = execute(ops.stop_gradient(whole), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
    factors = wrap(factors, spec)
    return x * factors, factors


EXTREMES = {"ReduceMax": "max", "ReduceMin": "min"}
"""The reduction of each kernel."""


def extreme(name: str, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor | None:
    """Reduce to the extreme along dims of which some are sharded; equal extremes share its gradient, as on one device.

    Args:
        name: the kernel's name.
        run: calls it: ``run(positional values, keyword values)``.
        args: the tensor, dims, and whether they are kept.
        kwargs: none.

    Returns:
        The result, cut as what is left of the tensor; None where the kernel's rule is to be used.
    """
    padded: tuple[Any, ...] = (*args, None, False)
    x, dim, keep = padded[:3]
    spec = x._spec
    if kwargs or isinstance(dim, Tensor) or not x.is_floating_point():
        return None
    dims = dims_argument(dim, len(spec.shape))
    cut = [axis for axis, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim in dims]
    plain = all(p.is_replicate() or isinstance(p, Shard) for p in spec.placements)
    shards = [local_shape(spec.shape, spec.placements, spec.mesh.shape, at) for at in _coordinates(spec.mesh.shape)]
    if not cut or not plain or any(0 in shard for shard in shards):
        return None
    kept = tuple(1 if d in dims else size for d, size in enumerate(spec.shape))
    parts = [Partial(EXTREMES[name]) if axis in cut else p for axis, p in enumerate(spec.placements)]
    whole = [Replicate() if axis in cut else p for axis, p in enumerate(spec.placements)]
    with local_mode():
        here = ops.stop_gradient(x)
        found = ops.amax(here, dims, True) if name == "ReduceMax" else ops.amin(here, dims, True)
    partial = type(spec).of(spec.mesh, parts, kept)
    top = redistribute(wrap(ops.stop_gradient(found), partial), partial.with_placements(whole))
    at = ops.equal(x, top)
    count = at.astype(x.dtype).sum(dims, keepdims=bool(keep))
    return ops.where(at, x, ops.zeros_like(x)).sum(dims, keepdims=bool(keep)) / count


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    coordinates: list[tuple[int, ...]] = [()]
    for size in sizes:
        coordinates = [(*at, i) for at in coordinates for i in range(size)]
    return coordinates


def looked_up(call: Any) -> Any:
    """``GatherD`` along a cut dim: each rank looks up what it has, zeros elsewhere; the sum is the result.

    An index that is out of range is refused on the CPU, as one device's kernel does, before anything is sent.
    """
    source = call.targets[0]
    dim = call.bound["dim"] % len(source.shape)
    if Shard(dim) not in source.placements or source.mesh.get_coordinate() is None:
        return None
    (start, size), count = offset(source, dim), source.shape[dim]
    on_host = get_platform().devices.kind == "cpu"

    def run(args: Any, kwargs: Any) -> Any:
        indices = args[2]
        if on_host and math.prod(indices.shape):
            values = indices.asnumpy()
            wrong = values[(values < -count) | (values >= count)]
            if wrong.size:
                raise RuntimeError(
                    f"GatherD: the indices should be in the range [{-count}, {count}), but got {wrong[0]}"
                )
        index = indices.astype(mindspore.int32)
        index = index + count * (index < 0).astype(mindspore.int32) - start
        inside = mint.logical_and(index >= 0, index < size).astype(mindspore.int32)
        return ops.gather_d(args[0], dim, index * inside) * inside.astype(args[0].dtype)

    return run
