"""Styles of a Linear over several mesh axes: two, two and a depth (2.5-D), or three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor import DeviceMesh, Partial, Placement, Replicate, Shard, StridedShard
from hp_styles import port
from hp_styles.base import ParallelStyle, claim
from hp_styles.inputs import on_input, on_output


def _placing(output: int, into: int, other: int | None, count: int) -> Callable[..., tuple[Placement, ...]]:
    """Return a function that lists placements on the axes of output features, of input features, and the other one."""

    def placed(on_output: Placement, on_input: Placement, on_other: Placement) -> tuple[Placement, ...]:
        by_axis = {output: on_output, into: on_input, other: on_other}
        return tuple(by_axis[axis] for axis in range(count))

    return placed


class TwoDimensionalParallel(ParallelStyle):
    """Sharding of a Linear's weight over two axes of a mesh; weights stay in place, activations move.

    The weight's input features are sharded over ``input_axis``, its output features over the other axis. Between layers
    an activation is sharded over both axes, in features over one and in tokens over the other. The layer gathers its
    input's tokens over the output axis, multiplies, and reduce-scatters the partial result over the input axis, to a
    layout that a next layer with the axes exchanged takes as it is:

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

    With ``depth_axis`` the mesh has three axes (2.5-D): the weight is the same in each layer of the depth, and each
    layer multiplies tokens of its own, which are sharded over the depth before they are sharded over another axis:

        >>> mesh = init_device_mesh("cuda", (2, 4, 4), mesh_dim_names=("depth", "x", "y"))
        >>> up = TwoDimensionalParallel(input_axis="y", depth_axis="depth")

    At a depth of ``d``, ``T / d`` tokens take the place of ``T`` above, forward and backward, and backward all-reduces
    the weight's gradient, of ``I O / (m n)`` elements, over the depth: ``2 I O / (m n) (d-1) / d`` received, in one
    collective for all weights of a step. Of ``P = q q d`` ranks this takes ``T (I + O) (q-1) / P`` forward, less than
    at a depth of 1, for ``d`` times the memory of weights.

    Args:
        input_axis: the axis, by index or name, over which the input features are sharded; default -1, the last.
        depth_axis: the axis, by index or name, over which the weight is replicated and tokens are sharded; it is the
            mesh's first, so that a layer's tokens are a run. Default None: the mesh has two axes, and no depth.
        token_dim: the dim of input and output that is sharded over the output axis between layers, and over the depth:
            batch or sequence; default 0.
        input_layouts: placements of a plain input, one per axis; default tokens over the depth and the output axis,
            features over the input axis.
        output_layouts: placements that the output is brought to; default features over the output axis, tokens over
            the depth and the input axis.
        use_local_output: return the local part as a plain tensor; default True.

    Raises:
        NotImplementedError: applied to a module that is not Linear.
        KeyError, IndexError: the mesh has no such axis.
        ValueError: ``depth_axis`` is not the mesh's first axis, or is ``input_axis``.

    Source: the two-dimensional weight-stationary layout of Pope et al., "Efficiently Scaling Transformer Inference",
    arXiv:2211.05102, section 3.2.2; the depth of Wang et al., "Tesseract: Parallelize the Tensor Parallelism
    Efficiently", arXiv:2105.14500.
    """

    def __init__(
        self,
        *,
        input_axis: int | str = -1,
        depth_axis: int | str | None = None,
        token_dim: int = 0,
        input_layouts: tuple[Placement, ...] | None = None,
        output_layouts: tuple[Placement, ...] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.mesh_axes = 2 if depth_axis is None else 3
        self.input_axis = input_axis
        self.depth_axis = depth_axis
        self.token_dim = token_dim
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        if f.kind(module) != "linear":
            raise NotImplementedError(f"TwoDimensionalParallel shards Linear modules, got {f.described(module)}")
        placed = _placing(*self._axes(device_mesh), device_mesh.ndim)
        whole, tokens, features = Replicate(), Shard(self.token_dim), Shard(-1)
        weight, bias = placed(Shard(0), Shard(1), whole), placed(Shard(0), whole, whole)
        f.partition(module, device_mesh, {"weight": weight, "bias": bias}, self.src_data_rank)
        claim(module, self)
        input_layouts = self.input_layouts or placed(tokens, features, tokens)
        on_input(module, device_mesh, input_layouts, placed(whole, features, tokens))
        output_layouts = self.output_layouts or placed(features, tokens, tokens)
        on_output(module, device_mesh, output_layouts, self.use_local_output)
        return module

    def _axes(self, mesh: DeviceMesh) -> tuple[int, int, int | None]:
        """Return the axes of the output features, of the input features, and of the depth."""
        into, depth = mesh.axis(self.input_axis), None if self.depth_axis is None else mesh.axis(self.depth_axis)
        if depth:
            raise ValueError(
                f"TwoDimensionalParallel: depth_axis={self.depth_axis!r} is axis {depth} of a mesh with axes"
                f" {mesh.mesh_dim_names or mesh.shape}; make it the first axis of the mesh, since a layer's tokens are"
                " sharded again over the axes after it"
            )
        if depth == into:
            raise ValueError(
                f"TwoDimensionalParallel: input_axis={self.input_axis!r} is the depth, over which weights are"
                f" replicated; name another of {mesh.mesh_dim_names or mesh.shape}"
            )
        (output,) = set(range(mesh.ndim)) - {into, depth}
        return output, into, depth

    def __repr__(self) -> str:
        return (
            f"TwoDimensionalParallel(input_axis={self.input_axis!r}, depth_axis={self.depth_axis!r},"
            f" token_dim={self.token_dim}, input_layouts={self.input_layouts}, output_layouts={self.output_layouts},"
            f" use_local_output={self.use_local_output})"
        )


class ThreeDimensionalParallel(ParallelStyle):
    """Sharding of a Linear's input, weight and output, each over all three axes of a mesh (3-D tensor parallelism).

    Of the mesh's axes the first cuts tokens, of the other two one (``input_axis``) cuts input features and one cuts
    output features. What an axis does not cut of an operand, it cuts in another dim, so that a rank holds ``1/P`` of
    everything, with ``P = a m n`` ranks: ``a`` along the first axis, ``m`` along the input axis, ``n`` along the output
    axis. The layer gathers its input's tokens over the output axis and its weight over the first axis, multiplies, and
    reduce-scatters the partial result over the input axis, to a layout that a next layer with the last two axes
    exchanged takes as it is:

        >>> mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
        >>> plan = {"up": ThreeDimensionalParallel(input_axis="z"), "down": ThreeDimensionalParallel(input_axis="y")}
        >>> parallelize_module(mlp, mesh, plan)

    ====== ================ ===================================== =====================
    of     first axis       input axis                            output axis
    ====== ================ ===================================== =====================
    input  tokens           input features                        tokens
    weight output features  input features                        output features
    output tokens           tokens                                output features
    bias   output features  replicated                            output features
    ====== ================ ===================================== =====================

    Kept for backward are the rank's own parts of input and weight, ``T I / P`` and ``I O / P`` elements for ``T``
    tokens, ``I`` input and ``O`` output features; backward gathers both again. A rank receives forward ``T I / (a m)
    (n-1) / n`` elements of the input, ``I O / (m n) (a-1) / a`` of the weight and ``T O / (a n) (m-1) / m`` of the
    output; backward twice those of input and weight, and those of the output again. On a cube of ``P = q q q`` ranks,
    with the input gathered to a part of ``1 / q^2``, this moves less than `TwoDimensionalParallel` on a square of as
    many ranks where ``T`` is not small beside ``I`` and ``O``.

    Args:
        input_axis: the axis, by index or name, over which the input features are sharded: not the first; default -1.
        token_dim: the dim of input and output that holds tokens (batch or sequence), not the last one; default 0.
        input_layouts: placements of a plain input, one per axis; default as in the table.
        output_layouts: placements that the output is brought to; default as in the table.
        use_local_output: return the local part as a plain tensor; default True.

    Raises:
        NotImplementedError: applied to a module that is not Linear, or is one with a forward of its own, or on
            MindSpore.
        KeyError, IndexError: the mesh has no such axis.
        ValueError: ``input_axis`` is the first axis, or the output features are not a multiple of the output axis'
            ranks, of whose parts the first axis cuts each.

    Source: Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", arXiv:2105.14450.
    """

    mesh_axes = 3

    def __init__(
        self,
        *,
        input_axis: int | str = -1,
        token_dim: int = 0,
        input_layouts: tuple[Placement, ...] | None = None,
        output_layouts: tuple[Placement, ...] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_axis = input_axis
        self.token_dim = token_dim
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        if f.kind(module) != "linear":
            raise NotImplementedError(f"ThreeDimensionalParallel shards Linear modules, got {f.described(module)}")
        into = device_mesh.axis(self.input_axis)
        if into == 0:
            raise ValueError(
                f"ThreeDimensionalParallel: input_axis={self.input_axis!r} is the first axis of a mesh with axes"
                f" {device_mesh.mesh_dim_names or device_mesh.shape}, which cuts tokens; name another"
            )
        output = 3 - into
        ranks, features = device_mesh.shape[output], f.output_features(module)
        if features % ranks:
            raise ValueError(
                f"ThreeDimensionalParallel: the {ranks} ranks of axis {output} do not divide the {features} output"
                f" features of {f.described(module)}, of whose parts the first axis cuts each; make them a multiple of"
                f" {ranks}, or use TwoDimensionalParallel, which takes any"
            )
        placed = _placing(output, into, 0, 3)
        whole, tokens, rows, columns = Replicate(), Shard(self.token_dim), Shard(0), Shard(-1)
        again = StridedShard(0, ranks) if ranks > 1 else rows  # the parts of the output axis, cut again
        weight, bias = placed(rows, Shard(1), again), placed(rows, whole, again)
        arrives, leaves = placed(tokens, columns, tokens), placed(columns, tokens, tokens)
        partial = Partial()
        layouts = port.Gathered(
            blocks=ranks,
            inputs=(arrives, placed(whole, columns, tokens)),
            weights=(placed(rows, columns, Shard(1)), placed(rows, columns, whole)),
            outputs=(placed(columns, partial, tokens), leaves),
            output_gradient=placed(columns, whole, tokens),
            input_gradient=placed(partial, columns, tokens),
            weight_gradient=placed(rows, columns, partial),
            bias=placed(rows, whole, whole),
        )
        f.run_gathered(module, device_mesh, layouts)
        f.partition(module, device_mesh, {"weight": weight, "bias": bias}, self.src_data_rank)
        claim(module, self)
        on_input(module, device_mesh, self.input_layouts or arrives, arrives)
        on_output(module, device_mesh, self.output_layouts or leaves, self.use_local_output)
        return module

    def __repr__(self) -> str:
        return (
            f"ThreeDimensionalParallel(input_axis={self.input_axis!r}, token_dim={self.token_dim},"
            f" input_layouts={self.input_layouts}, output_layouts={self.output_layouts},"
            f" use_local_output={self.use_local_output})"
        )
