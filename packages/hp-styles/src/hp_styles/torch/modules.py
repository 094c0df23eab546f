"""What styles do to a torch module: distribute its parameters, convert its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_dtensor import DeviceMesh, DTensor, Placement, Replicate, distribute_tensor
from hp_dtensor.spec import TensorSpec, normalize
from hp_dtensor.torch.dtensor import redistribute, redistribute_shared

__all__ = ["kind", "on_input", "on_inputs", "on_output", "on_outputs", "partition", "replicate", "retie"]


def kind(module: torch.nn.Module) -> str:
    """``"linear"``, ``"embedding"`` or ``"other"``."""
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, torch.nn.Embedding) else "other"


def partition(
    module: torch.nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Placement], src_data_rank: int | None
) -> None:
    """Distributes the parameters that the module itself holds, by name.

    Raises:
        ValueError: a parameter is a DTensor already (two styles on one module, or weights tied to a module styled
            otherwise).
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        placement = layouts.get(name, Replicate())
        if isinstance(parameter, DTensor):
            wanted = normalize([placement], mesh, parameter.dim(), "parallelize_module")
            if parameter.device_mesh == mesh and parameter.placements == wanted:
                continue
            raise ValueError(
                f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)} is placed {parameter.placements} on"
                f" {parameter.device_mesh} already, this style wants {wanted}: two styles on one module, or on two"
                " modules that share the parameter"
            )
        made = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=src_data_rank)
        new = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
        vars(new).update({k: v for k, v in parameter.__dict__.items() if k not in new.__dict__})
        module._parameters[name] = new


def replicate(module: torch.nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicates the parameters of the module and of all inside it."""
    for child in module.modules():
        partition(child, mesh, {}, src_data_rank)


def retie(module: torch.nn.Module, before: Mapping[tuple[str, str], torch.nn.Parameter]) -> None:
    """Makes modules that shared a parameter before share what it became."""
    became: dict[int, torch.nn.Parameter] = {}
    modules = dict(module.named_modules())
    for (owner, name), old in before.items():
        new = modules[owner]._parameters.get(name)
        if new is not None and new is not old:
            became.setdefault(id(old), new)
    for (owner, name), old in before.items():
        new = became.get(id(old))
        if new is None:
            continue
        held = modules[owner]._parameters[name]
        if isinstance(held, DTensor) and held is not new and held._spec is not new._spec:  # type: ignore[attr-defined]
            raise ValueError(
                f"{owner}.{name} shares its weight with another module, and the styles place it {held.placements} here"
                " and "
                f"{new.placements} there; give both one placement"  # type: ignore[attr-defined]
            )
        modules[owner]._parameters[name] = new


def _spec(mesh: DeviceMesh, layout: Placement, local: torch.Tensor) -> TensorSpec:
    (placement,) = normalize([layout], mesh, local.dim(), "parallel style")
    shape = list(local.shape)
    if not (placement.is_replicate() or placement.is_partial()):
        shape[placement.dim] *= mesh.size()  # type: ignore[attr-defined]
    return TensorSpec.of(mesh, (placement,), tuple(shape))


def _to_dtensor(value: Any, mesh: DeviceMesh, layout: Placement, desired: Placement) -> Any:
    """A plain tensor as the local part of ``layout``, or a DTensor, in ``desired``; several readers move it once."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"parallel style: {layout!r} is for a tensor, got {type(value).__name__}")
    if isinstance(value, DTensor):
        if value.device_mesh != mesh:
            raise ValueError(f"parallel style: the input is on {value.device_mesh}, the module on {mesh}")
        wanted = TensorSpec.of(mesh, normalize([desired], mesh, value.dim(), "parallel style"), value._spec.shape)
        return value if value._spec is wanted else redistribute_shared(value, wanted)
    src = _spec(mesh, layout, value)
    if src.local_shape != tuple(value.shape):
        raise ValueError(
            f"parallel style: a local input of shape {tuple(value.shape)} placed {layout!r} over {mesh.size()} ranks is"
            " uneven; pass a DTensor"
        )
    wanted = src.with_placements(normalize([desired], mesh, value.dim(), "parallel style"))
    return redistribute_shared(value, wanted, src)


def on_input(module: torch.nn.Module, mesh: DeviceMesh, layout: Placement, desired: Placement) -> None:
    """Converts the first positional input (or, where there is none, the first keyword tensor).

    Raises:
        TypeError: (in forward) there is no such input, or it is no tensor.
    """

    def convert(mod: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return (_to_dtensor(args[0], mesh, layout, desired), *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                return args, {**kwargs, name: _to_dtensor(value, mesh, layout, desired)}
        given = [type(value).__name__ for value in (*args, *kwargs.values())]
        raise TypeError(
            f"parallel style on {type(mod).__name__}: the first input must be a tensor, the inputs are {given}"
        )

    module.register_forward_pre_hook(convert, with_kwargs=True)


def _output(value: Any, mesh: DeviceMesh, desired: Placement, local: bool) -> Any:
    if isinstance(value, DTensor):
        wanted = TensorSpec.of(mesh, normalize([desired], mesh, value.dim(), "parallel style"), value._spec.shape)
        value = value if value._spec is wanted else redistribute(value, wanted)
        return value.to_local() if local else value
    return value


def on_output(module: torch.nn.Module, mesh: DeviceMesh, desired: Placement, local: bool) -> None:
    """Brings the output, a tensor, to ``desired``."""
    module.register_forward_hook(lambda mod, args, output: _output(output, mesh, desired, local))


def on_inputs(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    layouts: Sequence[Placement | None] | None,
    desired: Sequence[Placement | None] | None,
    kwarg_layouts: Mapping[str, Placement | None],
    desired_kwargs: Mapping[str, Placement | None],
    local: bool,
) -> None:
    """Converts positional and keyword inputs by their layouts."""

    def one(value: Any, layout: Placement | None, want: Placement | None) -> Any:
        if layout is None or value is None:
            return value
        made = _to_dtensor(value, mesh, layout, want if want is not None else layout)
        return made.to_local() if local and isinstance(made, DTensor) else made

    def convert(mod: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layouts is not None and desired is not None:
            if len(args) != len(layouts):
                raise ValueError(
                    f"PrepareModuleInput on {type(mod).__name__}: {len(args)} positional inputs, {len(layouts)}"
                    " input_layouts"
                )
            args = tuple(one(*given) for given in zip(args, layouts, desired, strict=True))
        return args, {k: one(v, kwarg_layouts.get(k), desired_kwargs.get(k)) for k, v in kwargs.items()}

    module.register_forward_pre_hook(convert, with_kwargs=True)


def on_outputs(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    layouts: Sequence[Placement | None],
    desired: Sequence[Placement | None],
    local: bool,
) -> None:
    """Converts outputs by their layouts."""

    def convert(mod: torch.nn.Module, args: Any, output: Any) -> Any:
        values = output if isinstance(output, (tuple, list)) else (output,)
        if len(values) != len(layouts):
            raise ValueError(
                f"PrepareModuleOutput on {type(mod).__name__}: {len(values)} outputs, {len(layouts)} output_layouts"
            )
        made = []
        for value, layout, want in zip(values, layouts, desired, strict=True):
            if layout is not None and value is not None:
                value = _output(_to_dtensor(value, mesh, layout, want or layout), mesh, want or layout, local)
            made.append(value)
        if not isinstance(output, (tuple, list)):
            return made[0]
        return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)

    module.register_forward_hook(convert)
