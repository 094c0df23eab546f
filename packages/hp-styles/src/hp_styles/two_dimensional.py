"""Tensor parallelism over both axes of a mesh."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard
from hp_styles.inputs import framework, on_input, on_output
from hp_styles.styles import ParallelStyle, claim

__all__ = ["TwoDimensionalParallel"]


class TwoDimensionalParallel(ParallelStyle):
    """Shards a Linear's weight over both axes of a mesh; weights stay where they are, activations move.

    The weight's input features are cut over ``input_axis``, its output features over the other axis. Between layers an
    activation is cut over both axes, in features over one and in tokens over the other. The layer gathers its input's
    tokens over the output axis, multiplies, and reduce-scatters the partial result over the input axis, to a layout
    that a next layer with the axes exchanged takes as it is:

        >>> mesh = init_device_mesh("cuda", (4, 4), mesh_dim_names=("x", "y"))
        >>> plan = {"up": TwoDimensionalParallel(input_axis="y"), "down": TwoDimensionalParallel(input_axis="x")}
        >>> parallelize_module(mlp, mesh, plan)

    With ``T`` tokens, ``I`` input and ``O`` output features, ``m`` ranks along the input axis and ``n`` along the
    other, a rank receives ``T I / m (n-1) / n`` elements forward in the all-gather and ``T O / n (m-1) / m`` in the
    reduce-scatter; backward as many, in the reduce-scatter and the all-gather that are their transposes, and nothing
    for the weight's gradient. On a square of ``P`` ranks that is ``T (I + O) (sqrt(P) - 1) / P``, where a style of one
    axis moves the smaller of ``T I`` and ``T O``, times ``(P - 1) / P``: with ``O = 4 I`` this one moves less beyond 16
    ranks, with ``O = I`` on any number. SUMMA (Optimus, arXiv:2104.05343; Tesseract, arXiv:2105.14500) moves weights as
    well, in as many broadcasts as the mesh has rows.

    Args:
        input_axis: the axis, by index or name, over which the input features are cut; default 1, the second.
        token_dim: the dim of input and output that is cut over the other axis between layers: batch or sequence;
            default 0.
        input_layouts: placements of a plain input, one an axis; default tokens over the output axis, features over the
            input axis.
        output_layouts: placements that the output is brought to; default features over the output axis, tokens over the
            input axis.
        use_local_output: return the local part as a plain tensor; default True.

    Raises:
        NotImplementedError: applied to a module that is not Linear.
        KeyError, IndexError: the mesh has no such axis.

    Source: the two-dimensional weight-stationary layout of Pope et al., "Efficiently Scaling Transformer Inference",
    arXiv:2211.05102, section 3.2.2.
    """

    mesh_axes = 2

    def __init__(
        self,
        *,
        input_axis: int | str = 1,
        token_dim: int = 0,
        input_layouts: tuple[Placement, Placement] | None = None,
        output_layouts: tuple[Placement, Placement] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_axis = input_axis
        self.token_dim = token_dim
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = framework()
        if f.kind(module) != "linear":
            raise NotImplementedError(f"TwoDimensionalParallel shards Linear modules, got {f.described(module)}")
        swap = device_mesh.axis(self.input_axis) == 0

        def placed(on_output_axis: Placement, on_input_axis: Placement) -> tuple[Placement, Placement]:
            return (on_input_axis, on_output_axis) if swap else (on_output_axis, on_input_axis)

        weight, bias = placed(Shard(0), Shard(1)), placed(Shard(0), Replicate())
        f.partition(module, device_mesh, {"weight": weight, "bias": bias}, self.src_data_rank)
        claim(module, self)
        tokens, features = Shard(self.token_dim), Shard(-1)
        given = self.input_layouts or placed(tokens, features)
        on_input(module, device_mesh, given, placed(Replicate(), features))
        on_output(module, device_mesh, self.output_layouts or placed(features, tokens), self.use_local_output)
        return module

    def __repr__(self) -> str:
        return (
            f"TwoDimensionalParallel(input_axis={self.input_axis!r}, token_dim={self.token_dim},"
            f" input_layouts={self.input_layouts}, output_layouts={self.output_layouts},"
            f" use_local_output={self.use_local_output})"
        )
