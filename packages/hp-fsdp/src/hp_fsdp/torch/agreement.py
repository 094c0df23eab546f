"""The largest of the ranks' numbers, for `hp_fsdp.agreement`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hp_fsdp.agreement import lines_of
from hp_fsdp.axes import DataAxes
from hp_fsdp.torch.host import transport
from hp_platform import collectives

__all__ = ["largest"]


def largest(numbers: Sequence[int], axes: DataAxes) -> list[int]:
    """The largest of the ranks' numbers, place by place; it waits for all ranks of the axes."""
    tensor = torch.tensor(list(numbers), device=transport(axes.mesh))
    for group in lines_of(axes):
        collectives.all_reduce(tensor, "max", group=group)
    return tensor.tolist()
