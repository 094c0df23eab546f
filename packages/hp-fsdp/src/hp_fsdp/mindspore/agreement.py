"""The largest of the ranks' numbers, for `hp_fsdp.agreement`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, _no_grad

from hp_dtensor.mindspore.extend import local_mode
from hp_fsdp.agreement import lines_of
from hp_fsdp.axes import DataAxes
from hp_platform import get_platform

__all__ = ["largest"]


def largest(numbers: Sequence[int], axes: DataAxes) -> list[int]:
    """The largest of the ranks' numbers, place by place; it waits for all ranks of the axes."""
    with _no_grad(), local_mode():
        tensor = Tensor(np.array(numbers, np.int64))
        for group in lines_of(axes):
            get_platform().collectives.all_reduce(tensor, "max", group=group)
        return tensor.asnumpy().tolist()
