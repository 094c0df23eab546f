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
        self._done: Any = None
        self._size = platform.groups.size()
        if platform.devices.kind == "cpu":
            self._host = torch.from_numpy(np.fromiter(map(float, own), np.float64, len(own)))
            if self._size > 1:
                self._host = self._everyone(self._host)
            return
        plain = [0.0 if isinstance(number, torch.Tensor) else number for number in own]
        row = torch.tensor(plain, dtype=torch.float64, pin_memory=True)
        row = row.to(platform.devices.current_device(), non_blocking=True)
        for place, number in enumerate(own):
            if isinstance(number, torch.Tensor):
                row[place] = number.detach()
        everyone = self._everyone(row) if self._size > 1 else row
        self._host = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
        self._host.copy_(everyone, non_blocking=True)
        self._done = platform.devices.device_module().Event()
        self._done.record()

    def _everyone(self, row: torch.Tensor) -> torch.Tensor:
        everyone, platform = row.new_empty(self._size * len(row)), get_platform()
        platform.collectives.all_gather(everyone, row, group=platform.groups.default_group())
        return everyone

    def read(self) -> NDArray[np.float64]:
        """Wait for the numbers; return them as [ranks, numbers]."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy().reshape(self._size, -1)

    def ready(self) -> bool:
        """Tell whether the numbers are there."""
        return self._done is None or self._done.query()
