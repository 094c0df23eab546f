"""Distribution of a torch module's parameters, and what `torch.compile` traces in place of `hp_styles.inputs`.

See Note [Compiled regions run on local tensors] in `hp_dtensor.torch.compile.compiling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index  # of a symbol of torch.compile it is a number, where int() leaves the symbol
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hp_dtensor import DeviceMesh, DTensor, Placement, Replicate
from hp_dtensor.extend import TensorSpec, normalize, spec_named
from hp_dtensor.torch.extend import (
    constant,
    decode_placements,
    distribute_parameter,
    encode_placements,
    mesh_of,
    refuse_foreign,
    replicate_parameters,
    traces_as,
)
from hp_dtensor.torch.extend import named_modules as named_modules
from hp_dtensor.torch.extend import named_parameters as named_parameters
from hp_dtensor.torch.extend import redistribute as redistribute
from hp_dtensor.torch.extend import redistribute_shared as redistribute_shared
from hp_dtensor.torch.extend import sharded_loss as sharded_loss
from hp_platform.torch.internals import in_backward
from hp_styles import base, inputs
from hp_styles.inputs import begin_call, end_call
from hp_styles.torch.low_precision import is_low_precision, make_plain, run_low_precision
from hp_styles.torch.products import run_gathered as run_gathered
from hp_styles.torch.products import run_overlapped as run_overlapped
from hp_styles.torch.regions import base_layer
from hp_styles.torch.regions import divide_inside as divide_inside
from hp_styles.torch.regions import run_experts as run_experts
from hp_styles.torch.regions import run_pointwise as run_pointwise
from hp_styles.torch.regions import run_replicated as run_replicated

Tensor = torch.Tensor


def kind(module: torch.nn.Module) -> str:
    """``"linear"``, ``"transposed"`` (a linear layer of weight ``[in, out]``), ``"embedding"`` or ``"other"``."""
    module = base_layer(module)
    if isinstance(module, torch.nn.Linear):
        return "linear"
    weight = getattr(module, "weight", None)
    features = (
        getattr(module, "nx", None),
        getattr(module, "nf", None),
    )  # transformers' Conv1D
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and tuple(weight.shape) == features:
        return "transposed"
    return "embedding" if isinstance(module, torch.nn.Embedding) else "other"


def input_features(module: torch.nn.Module) -> int | None:
    if kind(module) not in ("linear", "transposed"):
        return None
    weight: torch.Tensor = base_layer(module).weight  # type: ignore[assignment]
    return weight.shape[1 if kind(module) == "linear" else 0]


def output_features(module: torch.nn.Module) -> int:
    weight: torch.Tensor = base_layer(module).weight  # type: ignore[assignment]
    return weight.shape[0 if kind(module) == "linear" else 1]


def sized_dim(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return the dim of the input whose size a convolution's, a norm's or a linear layer's weight has, and that size.

    Of a module of several it is the first one's; None where that tells nothing.
    """
    inside = (each for each in module.modules() if each._parameters or isinstance(each, _NormBase))
    first = next(inside, module)
    if isinstance(first, _ConvNd):
        return 1, first.in_channels
    if isinstance(first, (_NormBase, torch.nn.GroupNorm)):
        return 1, first.num_features if isinstance(first, _NormBase) else first.num_channels
    features = input_features(first)
    weight = first._parameters.get("weight")
    if features is None and weight is not None and weight.dim() == 1 and "Norm" in type(first).__name__:
        features = weight.shape[0]
    return None if features is None else (-1, features)


def described(module: torch.nn.Module) -> str:
    return type(module).__name__


def partition(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    layouts: Mapping[str, tuple[Placement, ...]],
    src_data_rank: int | None,
) -> None:
    """Distribute the module's own parameters by name, one placement per axis; replicate the others.

    Raises:
        ValueError: a parameter is a DTensor already (two styles on one module, or weights tied to a module styled
            otherwise).
    """
    inner = base_layer(module)
    if inner is not module:
        partition(inner, mesh, layouts, src_data_rank)
        for child in module.modules():
            if child is not module and not any(child is each for each in inner.modules()):
                partition(child, mesh, {}, src_data_rank)
        layouts = {}
    if "weight" in layouts and module._parameters.get("weight") is None:
        raise NotImplementedError(
            f"the weight of {type(module).__name__} is not a parameter but computed from {sorted(_names(module))}"
            " (weight_norm, spectral_norm, another parametrization), which no style can shard: leave the module out of"
            " the plan, or make the weight a parameter first (torch.nn.utils.parametrize.remove_parametrizations)"
        )
    if is_low_precision(module):
        make_plain(module)
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        placements = layouts.get(name, (Replicate(),) * mesh.ndim)
        refuse_foreign(parameter, f"{type(module).__name__}.{name}")
        if isinstance(parameter, DTensor):
            target = normalize(placements, mesh, parameter.dim(), "parallelize_module")
            if parameter.device_mesh == mesh and parameter.placements == target:
                continue
            raise ValueError(
                f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)} is placed {parameter.placements} on"
                f" {parameter.device_mesh} already, this style wants {target}: two styles on one module, or on two"
                " modules that share the parameter, or fully_shard was called before the styles, which come first"
            )
        distribute_parameter(parameter, mesh, placements, src_data_rank=src_data_rank)
    if is_low_precision(module):
        run_low_precision(module)


def place(
    module: torch.nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Distribute one of the module's own parameters."""
    parameter = module._parameters[name]
    assert parameter is not None
    if isinstance(parameter, DTensor):
        target = normalize((placement,), mesh, parameter.dim(), "parallelize_module")
        if parameter.device_mesh == mesh and parameter.placements == target:  # shared with a module that was before
            return
        raise ValueError(
            f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)} is placed {parameter.placements}"
            f" already, this style wants {placement}: two keys match one parameter, or two tied ones"
        )
    distribute_parameter(parameter, mesh, (placement,), src_data_rank=src_data_rank)


def _names(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def replicate(module: torch.nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicate the parameters and buffers of the module and of all modules inside it."""
    for child in module.modules():
        partition(child, mesh, {}, src_data_rank)
        replicate_parameters(child, mesh, src_data_rank=src_data_rank)  # now the buffers


def replicate_statistics(module: torch.nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicate the running statistics of a batch norm, which a DTensor's statistics update.

    Raises:
        NotImplementedError: a recurrent network, which no DTensor can go through.
    """
    if isinstance(module, torch.nn.RNNBase):
        raise NotImplementedError(
            f"the style 'replicate' is not for {type(module).__name__}: torch computes it in one function that has no"
            " sharding rule. Leave it out of the plan and pass it plain tensors (x.full_tensor()): every rank"
            " then computes the same, with full gradients"
        )
    if isinstance(module, _NormBase):
        replicate_parameters(module, mesh, src_data_rank=src_data_rank)


def around_calls(module: torch.nn.Module) -> None:
    """Register, once, hooks that begin and end a call of a module that styles are applied to or inside."""
    if _begin not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_begin, prepend=True)
        module.register_forward_hook(_end, always_call=True)


def _begin(module: torch.nn.Module, args: Any) -> None:
    begin_call(module)


def _end(module: torch.nn.Module, args: Any, output: Any) -> None:
    end_call(module)


def runs_again() -> bool:
    return in_backward()


@traces_as(inputs._is_tensor)
def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@constant
def _spec(mesh: Any, layout: Any, local: tuple[int, ...], features: Any) -> TensorSpec:
    return inputs._spec(mesh_of(mesh), decode_placements(layout), local, features)


@constant
def _wanted(have: str, mesh: Any, desired: Any) -> TensorSpec:
    return inputs._wanted(spec_named(have), mesh_of(mesh), decode_placements(desired))


def _texts(layout: Any) -> Any:
    return encode_placements(layout if isinstance(layout, tuple) else (layout,))


@traces_as(inputs._to_dtensor)
def _to_dtensor(value: Any, mesh: Any, layout: Any, desired: Any, features: Any = None) -> Any:
    if isinstance(value, DTensor):
        return redistribute_shared(value, _wanted(value._spec.name, mesh._key, _texts(desired)))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"parallel style: a layout is for a tensor, got {type(value).__name__}")
    src = _spec(mesh._key, _texts(layout), tuple([index(size) for size in value.shape]), features)
    return redistribute_shared(value, _wanted(src.name, mesh._key, _texts(desired)), src)


@traces_as(inputs._output)
def _output(value: Any, mesh: Any, desired: Any, local: Any) -> Any:
    if isinstance(value, DTensor):
        value = redistribute(value, _wanted(value._spec.name, mesh._key, _texts(desired)))
        return value.to_local() if local else value
    return value


@traces_as(inputs.compare_parts)
def _compare_parts(mesh: Any, values: Any) -> None:
    """Nothing: a compiled region communicates what its graph says."""


@traces_as(base.check_widths)
def _check_widths(expected: Any, module: Any, value: Any) -> None:
    """Nothing: a shape that does not fit is found where it is traced."""


@traces_as(inputs.begin_call)
def _begin_call(module: Any, *, anew: bool = False) -> None:
    """Nothing, as `_compare_parts`."""


@traces_as(inputs.end_call)
def _end_call(module: Any) -> None:
    """Nothing, as `_compare_parts`."""
