"""Parallel styles: how a module's parameters, inputs and outputs lie on a mesh axis, or on two.

Names, arguments and behaviour are those of ``torch.distributed.tensor.parallel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard
from hp_styles import port
from hp_styles.base import ParallelStyle, check_placements, claim
from hp_styles.inputs import on_input, on_inputs, on_output, on_outputs

Layouts = "Placement | Sequence[Placement | None] | None"


def _tuple(layouts: Any) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else None if layouts is None else tuple(layouts)


def _named(style: Any, **arguments: Any) -> str:
    """Write a style as its constructor."""
    return f"{type(style).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _no_linear(style: ParallelStyle, module: Any) -> NotImplementedError:
    """Return the error of a module whose weights a style can't shard, with what its kind needs instead."""
    f = port.modules()
    inside = [name for name, each in f.named_modules(module) if name and f.kind(each) != "other"]
    advice = (
        f"name the Linear and Embedding modules inside it, such as {inside[0]!r}"
        if inside
        else "leave it out, or, if it is a norm or a dropout between parts of a sequence, give it SequenceParallel()"
    )
    return NotImplementedError(
        f"{type(style).__name__} shards Linear and Embedding modules, got {f.described(module)}; {advice}, or write a"
        " ParallelStyle with its own apply()"
    )


class ColwiseParallel(ParallelStyle):
    """Sharding of a Linear's output features (weight and bias dim 0), or an Embedding's columns (weight dim 1).

    Example:
        >>> parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    Args:
        input_layouts: placement of a plain input; default ``Replicate()``.
        output_layouts: placement that the output is brought to; default ``Shard(-1)``.
        use_local_output: return the local part as a plain tensor; default True.

    Raises:
        NotImplementedError: applied to a module that is neither Linear nor Embedding.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        check_placements(self, input_layouts=input_layouts, output_layouts=output_layouts)
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        kind = f.kind(module)
        if kind == "linear":
            f.partition(module, device_mesh, {"weight": (Shard(0),), "bias": (Shard(0),)}, self.src_data_rank)
        elif kind == "transposed":
            f.partition(module, device_mesh, {"weight": (Shard(1),), "bias": (Shard(0),)}, self.src_data_rank)
        elif kind == "embedding":
            f.partition(module, device_mesh, {"weight": (Shard(1),)}, self.src_data_rank)
        else:
            raise _no_linear(self, module)
        claim(module, self)
        on_input(module, device_mesh, self.input_layouts, Replicate(), f.input_features(module))
        on_output(module, device_mesh, self.output_layouts, self.use_local_output)
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Shard(max(ndim - 2, 0))

    def __repr__(self) -> str:
        return _named(
            self,
            input_layouts=self.input_layouts,
            output_layouts=self.output_layouts,
            use_local_output=self.use_local_output,
        )


class RowwiseParallel(ParallelStyle):
    """Sharding of a Linear's input features (weight dim 1, bias replicated), or an Embedding's rows (weight dim 0).

    Args:
        input_layouts: placement of a plain input; default ``Shard(-1)`` for a Linear, ``Replicate()`` for an Embedding.
        output_layouts: placement that the output is brought to; default ``Replicate()``, an all-reduce; ``Shard(1)`` is
            a reduce-scatter over the sequence.
        use_local_output: return the local part as a plain tensor; default True.

    Raises:
        NotImplementedError: applied to a module that is neither Linear nor Embedding.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        check_placements(self, input_layouts=input_layouts, output_layouts=output_layouts)
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        kind = f.kind(module)
        if kind in ("linear", "transposed"):
            dim = 1 if kind == "linear" else 0
            f.partition(module, device_mesh, {"weight": (Shard(dim),)}, self.src_data_rank)
            current, desired = self.input_layouts or Shard(-1), Shard(-1)
        elif kind == "embedding":
            f.partition(module, device_mesh, {"weight": (Shard(0),)}, self.src_data_rank)
            current, desired = self.input_layouts or Replicate(), Replicate()
        else:
            raise _no_linear(self, module)
        claim(module, self)
        on_input(module, device_mesh, current, desired, f.input_features(module))
        on_output(module, device_mesh, self.output_layouts, self.use_local_output)
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Replicate() if name == "bias" else Shard(ndim - 1)

    def __repr__(self) -> str:
        return _named(
            self,
            input_layouts=self.input_layouts,
            output_layouts=self.output_layouts,
            use_local_output=self.use_local_output,
        )


class SequenceParallel(ParallelStyle):
    """A norm or dropout on activations sharded over the sequence; its parameters and buffers are replicated.

    A plain input is taken as this rank's part of the sequence. Source: Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", 2022.

    Args:
        sequence_dim: the sequence dim of input and output; default 1.
        use_local_output: return the local part as a plain tensor; default False.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        f.replicate(module, device_mesh, self.src_data_rank)
        claim(module, self)
        on_input(module, device_mesh, self.sequence_sharding, self.sequence_sharding, sized=f.sized_dim(module))
        on_output(module, device_mesh, self.sequence_sharding, self.use_local_output)
        return module

    def __repr__(self) -> str:
        return _named(self, sequence_dim=self.sequence_sharding.dim, use_local_output=self.use_local_output)


class PrepareModuleInput(ParallelStyle):
    """Conversion of a module's inputs to DTensors with the desired placements.

    Args:
        input_layouts: placement of each positional input where it is a plain tensor; None for inputs that stay as they
            are.
        desired_input_layouts: placement each positional input is brought to, of the same length; None leaves a DTensor
            as it is.
        input_kwarg_layouts: the same for keyword inputs, by name.
        desired_input_kwarg_layouts: likewise, for the same names.
        use_local_output: hand the module local parts as plain tensors; default False.

    Raises:
        ValueError: input and desired layouts that do not match each other, or (in forward) a number of inputs that is
            not the number of layouts.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        layouts = {"input_layouts": input_layouts, "desired_input_layouts": desired_input_layouts}
        named = {"input_kwarg_layouts": input_kwarg_layouts, "desired_input_kwarg_layouts": desired_input_kwarg_layouts}
        check_placements(self, **layouts, **named)
        self.input_layouts = _tuple(input_layouts)
        self.desired_input_layouts = _tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise ValueError("PrepareModuleInput: input_layouts needs desired_input_layouts")
            if len(self.input_layouts) != len(self.desired_input_layouts):
                raise ValueError(
                    f"PrepareModuleInput: {len(self.input_layouts)} input_layouts, {len(self.desired_input_layouts)}"
                    " desired_input_layouts"
                )
        elif self.desired_input_layouts is not None:
            raise ValueError("PrepareModuleInput: desired_input_layouts needs input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(
                f"PrepareModuleInput: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, "
                f"desired_input_kwarg_layouts names {sorted(self.desired_input_kwarg_layouts)}"
            )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        on_inputs(
            module,
            device_mesh,
            self.input_layouts,
            self.desired_input_layouts,
            self.input_kwarg_layouts,
            self.desired_input_kwarg_layouts,
            self.use_local_output,
        )
        return module

    def __repr__(self) -> str:
        return _named(self, **vars(self))


class PrepareModuleOutput(ParallelStyle):
    """Conversion of a module's outputs to DTensors with the desired placements.

    Args:
        output_layouts: placement of each output where it is a plain tensor; None for outputs that stay as they are.
        desired_output_layouts: placement each output is brought to.
        use_local_output: return the local parts as plain tensors; default True.

    Raises:
        ValueError: layouts of different length, or (in forward) a number of outputs that is not the number of layouts.
    """

    def __init__(self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True) -> None:
        check_placements(self, output_layouts=output_layouts, desired_output_layouts=desired_output_layouts)
        self.output_layouts = _tuple(output_layouts) or ()
        self.desired_output_layouts = _tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise ValueError(
                f"PrepareModuleOutput: {len(self.output_layouts)} output_layouts, {len(self.desired_output_layouts)}"
                " desired_output_layouts"
            )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        on_outputs(module, device_mesh, self.output_layouts, self.desired_output_layouts, self.use_local_output)
        return module

    def __repr__(self) -> str:
        return _named(self, **vars(self))


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: see
            ``PrepareModuleInput``.
        use_local_input: its ``use_local_output``; default False.
        output_layouts, desired_output_layouts, use_local_output: see ``PrepareModuleOutput``.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)

    def __repr__(self) -> str:
        arguments = dict(vars(self.prepare_module_input))
        arguments["use_local_input"] = arguments.pop("use_local_output")
        return _named(self, **arguments, **vars(self.prepare_module_output))


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
        output, into, depth = self._axes(device_mesh)

        def placed(on_output: Placement, on_input: Placement, on_depth: Placement) -> tuple[Placement, ...]:
            by_axis = {output: on_output, into: on_input, depth: on_depth}
            return tuple(by_axis[axis] for axis in range(device_mesh.ndim))

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
