"""Tensor subclasses with an all-gather extension, and the same computation in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Wrapping(torch.Tensor):
    """Wraps one plain tensor; it computes nothing, as only its extension is used."""

    def __new__(cls, plain: torch.Tensor) -> Wrapping:
        return torch.Tensor._make_wrapper_subclass(
            cls, plain.size(), strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )

    def __init__(self, plain: torch.Tensor) -> None:
        self.plain = plain

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Wrapping:
        return cls(inner["plain"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].plain)
        raise AssertionError(f"{func} was called on an instance")


class RowBytes(Wrapping):
    """Each row is eight bits an element, and a scale: two tensors travel, no number is of the whole parameter."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return row_bytes(self.plain), ()

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        value = from_row_bytes(*gathered).to(dtype)
        return (value, gathered) if out is None else out.copy_(value)


def row_bytes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    scale = (largest / 127).clamp(min=1e-30)
    codes = (flat / scale[:, None]).round().to(torch.int8)
    return codes.view(rows.shape), scale


def from_row_bytes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.to(scale.dtype) * scale.view(-1, *([1] * (codes.dim() - 1)))


class WholeBytes(Wrapping):
    """Eight bits an element, and one scale of the whole parameter, which is no part of what travels."""

    def fsdp_take_amax(self, amax: torch.Tensor) -> None:
        self.scale = (amax / 127).clamp(min=1e-30)

    def fsdp_pre_all_gather(self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, policy: Any) -> Any:
        assert tuple(size[1:]) == tuple(self.plain.shape[1:]) and isinstance(module, nn.Module)
        return ((self.plain / self.scale).round().to(torch.int8),), (self.scale,)

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        value = (gathered[0].to(metadata[0].dtype) * metadata[0]).to(dtype)
        return (value, gathered) if out is None else out.copy_(value)


def decoded(parameter: torch.Tensor, kind: type[Wrapping]) -> torch.Tensor:
    """What a gathered parameter is, in one process; its gradient is the parameter's."""
    plain = parameter.detach()
    if kind is RowBytes:
        value = from_row_bytes(*row_bytes(plain))
    else:
        scale = (plain.abs().max() / 127).clamp(min=1e-30)
        value = (plain / scale).round().to(torch.int8).to(scale.dtype) * scale
    return parameter + (value - plain)


def encode(model: nn.Module, kind: type[Wrapping]) -> nn.Module:
    """Wraps the weights of linear layers."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def run_decoded(model: nn.Module, x: torch.Tensor, kind: type[Wrapping]) -> torch.Tensor:
    """The output of a plain model, with the weights of linear layers as they are once gathered."""
    values = {
        f"{name}.weight": decoded(module.weight, kind)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return torch.func.functional_call(model, values, (x,))
