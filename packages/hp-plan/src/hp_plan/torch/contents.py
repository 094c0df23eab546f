"""The contents of a model's tensors and of its inputs: compared by digests, and overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_ROW = 1024  # numbers of 8 bytes


def named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def describe(tensor: torch.Tensor) -> str:
    """Return shape and dtype as a text."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def is_comparable(value: Any) -> bool:
    """Return True for a plain tensor with memory."""
    plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and not value.is_meta and value.layout is torch.strided and not value.is_quantized


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that differs where contents do."""
    return [int(each) for each in [digest(tensor) for tensor in tensors]]  # all are begun before one is waited for


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number, still on the device, that differs where bytes or their order do."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % (8 * _ROW):
        flat = F.pad(flat, (0, -len(flat) % (8 * _ROW)))
    numbers = flat.view(torch.int64).view(-1, _ROW)
    rows = torch.arange(1, len(numbers) + 1, device=flat.device) * 0x9E3779B97F4A7C1
    columns = torch.arange(1, _ROW + 1, device=flat.device) * 0x5851F42D4C957F2D
    return (numbers.sum(1) * rows).sum() + (numbers.sum(0) * columns).sum() + tensor.numel()


@torch.no_grad()
def overwrite(tensor: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
    """Let a function write to contiguous memory of the tensor's contents, and keep what it wrote."""
    memory = tensor.detach().contiguous()
    fill(memory)
    if memory.data_ptr() != tensor.data_ptr():
        tensor.copy_(memory)
