"""Numbers of all ranks, which come to the host while the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hp_platform import get_platform


class Numbers:
    """Numbers of every rank, on their way: no work that comes after them is waited for.

    Args:
        own: this rank's, tensors of one element or plain numbers; every rank has as many.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        platform = get_platform()
        aside = platform.devices.kind != "cpu"
        plain = [0.0 if isinstance(number, torch.Tensor) else number for number in own]
        row = torch.tensor(plain, dtype=torch.float64, pin_memory=aside)
        row = row.to(platform.devices.current_device(), non_blocking=True)
        for place, number in enumerate(own):
            if isinstance(number, torch.Tensor):
                row[place] = number.detach()
        size = platform.groups.size()
        if size > 1:
            everyone = row.new_empty(size * len(row))
            platform.collectives.all_gather(everyone, row, group=platform.groups.default_group())
            row = everyone
        self._host, self._done, self._size = row, None, size
        if aside:
            self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            self._host.copy_(row, non_blocking=True)
            self._done = platform.devices.device_module().Event()
            self._done.record()

    def read(self) -> NDArray[np.float64]:
        """Wait for the numbers; return them as [ranks, numbers]."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy().reshape(self._size, -1)
