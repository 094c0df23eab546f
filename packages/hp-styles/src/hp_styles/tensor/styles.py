"""Parallel styles: how a module's parameters, inputs and outputs lie on a mesh axis.

Names, arguments and behaviour are those of ``torch.distributed.tensor.parallel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
    inside = [name for name, each in f.named_modules(module).items() if name and f.kind(each) != "other"]
    advice = (
        f"name the Linear and Embedding modules inside it, such as {inside[0]!r}"
        if inside
        else "leave it out, or, if it is a norm or a dropout between parts of a sequence, give it SequenceParallel()"
    )
    return NotImplementedError(
        f"{type(style).__name__} shards Linear and Embedding modules, got {f.described(module)}; {advice}, or write a"
        " ParallelStyle with its own apply()"
    )


def _check_async(style: Any, name: str, layout: Placement) -> None:
    """Refuse an ``async_tensor_parallel`` that is neither value, or that has no sequence to exchange.

    Raises:
        ValueError: it is.
    """
    got = style.async_tensor_parallel
    if got not in ("auto", "off"):
        raise ValueError(f'{type(style).__name__}: async_tensor_parallel is "auto" or "off", got {got!r}')
    if got == "auto" and (not isinstance(layout, Shard) or layout.dim == -1):
        raise ValueError(
            f'{type(style).__name__}: async_tensor_parallel="auto" is for a sharded sequence, {name}=Shard(dim), got'
            f" {layout!r}; give it that, or leave async_tensor_parallel out"
        )


def _overlapped(style: Any, module: Any, mesh: DeviceMesh, op: Literal["gather", "scatter"], layout: Any) -> Any:
    """Let a Linear's collective go on under its product, if the style asks for it: `Modules.run_overlapped`.

    Raises:
        NotImplementedError: the module is not Linear.
    """
    if style.async_tensor_parallel == "off":
        return None
    f = port.modules()
    if f.kind(module) != "linear":
        raise NotImplementedError(
            f'{type(style).__name__}: async_tensor_parallel="auto" is for Linear modules, got {f.described(module)};'
            " leave it out"
        )
    return f.run_overlapped(module, mesh, op, layout.dim)


class ColwiseParallel(ParallelStyle):
    """Sharding of a Linear's output features (weight and bias dim 0), or an Embedding's columns (weight dim 1).

    Example:
        >>> parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    Args:
        input_layouts: placement of a plain input; default ``Replicate()``.
        output_layouts: placement that the output is brought to; default ``Shard(-1)``.
        use_local_output: return the local part as a plain tensor; default True.
        async_tensor_parallel: "auto" lets the gather of an input of ``Shard(dim)``, a sequence, go on under the
            product, where `hp_onesided.choose` says that it can: not on a CPU, where that was measured to gain nothing.
            It was never run on hardware, so the default is "off".

    Raises:
        ValueError: ``async_tensor_parallel="auto"`` without an input that is sharded along a sequence.
        NotImplementedError: applied to a module that is neither Linear nor Embedding.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        async_tensor_parallel: Literal["auto", "off"] = "off",
    ) -> None:
        check_placements(self, input_layouts=input_layouts, output_layouts=output_layouts)
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output
        self.async_tensor_parallel = async_tensor_parallel
        _check_async(self, "input_layouts", self.input_layouts)

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
        stays = _overlapped(self, module, device_mesh, "gather", self.input_layouts)
        claim(module, self)
        on_input(module, device_mesh, self.input_layouts, Replicate(), f.input_features(module), stays=stays)
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
            async_tensor_parallel=self.async_tensor_parallel,
        )


class RowwiseParallel(ParallelStyle):
    """Sharding of a Linear's input features (weight dim 1, bias replicated), or an Embedding's rows (weight dim 0).

    Args:
        input_layouts: placement of a plain input; default ``Shard(-1)`` for a Linear, ``Replicate()`` for an Embedding.
        output_layouts: placement that the output is brought to; default ``Replicate()``, an all-reduce; ``Shard(1)`` is
            a reduce-scatter over the sequence.
        use_local_output: return the local part as a plain tensor; default True.
        async_tensor_parallel: "auto" lets the reduce-scatter to an output of ``Shard(dim)``, a sequence, go on under
            the product, where `hp_onesided.choose` says that it can: not on a CPU, where that was measured to gain
            nothing. It was never run on hardware, so the default is "off".

    Raises:
        ValueError: ``async_tensor_parallel="auto"`` without an output that is sharded along a sequence.
        NotImplementedError: applied to a module that is neither Linear nor Embedding.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        async_tensor_parallel: Literal["auto", "off"] = "off",
    ) -> None:
        check_placements(self, input_layouts=input_layouts, output_layouts=output_layouts)
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output
        self.async_tensor_parallel = async_tensor_parallel
        _check_async(self, "output_layouts", self.output_layouts)

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
        _overlapped(self, module, device_mesh, "scatter", self.output_layouts)
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
            async_tensor_parallel=self.async_tensor_parallel,
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
