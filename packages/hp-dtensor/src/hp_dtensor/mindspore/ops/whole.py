"""Kernels that run on whole tensors, gathered on every rank: right for every layout, with nothing saved.

A rare kernel may stand in this list instead of having a rule; none runs so by default. Every rank computes the whole
result, which is replicated, and its gradient is that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import convert, local_mode
from hp_dtensor.mindspore.dtensor import DTensor, wrap
from hp_dtensor.rules.planning import mesh_of
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
