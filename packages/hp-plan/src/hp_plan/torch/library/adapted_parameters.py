"""Adapters of the library peft for single parameters, such as those of experts and of their routers.

Note [Sums beside parameters]
    peft wraps a module to adapt one of its parameters, and registers a parametrization of it for the length of a call:
    the module then has other parameters than those that `fully_shard` gathers and that styles have placed. Here the
    module's attribute hides the parameter for as long. It is the sum of the parameter and of what the adapter adds.

    Expert e gets `scaling * B_e A_e`. A has `rank` rows for one expert after the other. B has `rank` blocks of columns,
    each with one column for each expert. So where experts are spread over ranks, A is sharded by its rows and B by the
    columns of each block, and the same formula holds for a rank's own experts.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.extend import mark_summed_gradients, sums_gradients
from hp_dtensor.torch.extend import distribute_parameter


def sum_beside_parameters(model: nn.Module) -> None:
    """Let the adapters of parameters in a model leave these registered; see Note [Sums beside parameters]."""
    for module in model.modules():
        if _adapts_parameter(module):
            module.forward = types.MethodType(_forward, module)  # a copy of the module binds it to itself


def shard_adapters(model: nn.Module) -> None:
    """Shard the adapters of parameters as styles have sharded these; see Note [Sums beside parameters]."""
    wrappers: list[Any] = list(filter(_adapts_parameter, model.modules()))
    for wrapper in wrappers:
        inner, parameter = _adapted(wrapper)
        if not isinstance(parameter, DTensor) or all(each.is_replicate() for each in parameter.placements):
            continue
        if parameter.dim() == 3:  # hp_moe.place_experts moves experts, without what is beside them
            inner.tied_to_experts = "adapters of their parameters"
        for name, first in wrapper.lora_A.items():
            second, rank = wrapper.lora_B[name], wrapper.r[name]
            pairs = [_beside(each, rank, inner, parameter.dim()) for each in parameter.placements]
            for module, placements in zip((first, second), zip(*pairs, strict=True), strict=True):
                distribute_parameter(module.weight, parameter.device_mesh, placements)
                if sums_gradients(inner):
                    mark_summed_gradients(module)


def _beside(placement: Any, rank: int, inner: nn.Module, dims: int) -> tuple[Placement, Placement]:
    """Return the placements of A and B on a mesh axis where those of the parameter are ``placement``."""
    out = dims - (1 if getattr(inner, "is_transposed", False) else 2)
    if placement.is_replicate():
        return Replicate(), Replicate()
    if placement.dim == 0 and dims == 3:
        return Shard(0), StridedShard(1, rank)
    if placement.dim == out:
        return Replicate(), dataclasses.replace(placement, dim=0)
    return dataclasses.replace(placement, dim=1), Replicate()


def _adapts_parameter(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "parameter_name", None), str) and {"base_layer", "lora_A"} <= module._modules.keys()
    )


def _adapted(wrapper: Any) -> tuple[Any, torch.Tensor]:
    """Return the module that has the adapted parameter, and the parameter."""
    inner = wrapper.get_base_layer()
    return inner, getattr(inner, wrapper.parameter_name)


def _forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module inside with a sum in place of its parameter."""
    inner, parameter = _adapted(self)
    active = [name for name in self.active_adapters if name in self.lora_A]
    plain = self.disable_adapters or self.merged or not active or kwargs.get("adapter_names") is not None
    if plain or self.parameter_name not in inner._parameters:
        return type(self).forward(self, x, *args, **kwargs)
    pairs = [(self.lora_A[name].weight, self.lora_B[name].weight) for name in active]
    if sums_gradients(inner):
        parameter, pairs = (
            _local(parameter, parameter),
            [tuple(_local(each, parameter) for each in pair) for pair in pairs],
        )
    for name, pair in zip(active, pairs, strict=True):
        parameter = _sum(parameter, *pair, self.r[name], self.scaling[name], getattr(inner, "is_transposed", False))
    own = vars(inner)
    own[self.parameter_name] = parameter
    try:
        return self.base_layer(x, *args, **kwargs)
    finally:
        del own[self.parameter_name]


def _sum(
    parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rank: int, scaling: float, transposed: bool
) -> torch.Tensor:
    with torch.autocast(parameter.device.type, enabled=False):
        first, second = first.to(parameter.dtype), second.to(parameter.dtype)
        if parameter.dim() == 2:
            return torch.addmm(parameter, second, first, alpha=scaling)
        first = first.unflatten(0, (-1, rank))  # (experts, rank, in)
        second = second.unflatten(1, (rank, -1)).permute(2, 0, 1)  # (experts, out, rank)
        if transposed:
            first, second = second.mT, first.mT
        return torch.baddbmm(parameter, second, first, alpha=scaling)


def _local(value: Any, parameter: Any) -> torch.Tensor:
    """Return this rank's part, whose gradient is a part of a sum where the parameter is sharded and it is not."""
    pairs = zip(value.placements, parameter.placements, strict=True)
    whole = [each.is_replicate() and not of_parameter.is_replicate() for each, of_parameter in pairs]
    return value.to_local(
        grad_placements=[Partial() if w else each for w, each in zip(whole, value.placements, strict=True)]
    )
