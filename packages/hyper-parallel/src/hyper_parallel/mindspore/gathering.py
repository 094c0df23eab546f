"""Numbers of all ranks, which the host waits for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_checkpoint.extend import Ranks


class Numbers:
    """Numbers of every rank.

    Args:
        own: this rank's, tensors of one element or plain numbers; every rank has as many.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        record = struct.Struct(f"<{len(own)}d")
        plain = [float(number.asnumpy()) if hasattr(number, "asnumpy") else number for number in own]
        self._numbers = np.array([record.unpack(each) for each in Ranks().gather(record.pack(*plain))])

    def read(self) -> NDArray[np.float64]:
        """Return the numbers as [ranks, numbers]."""
        return self._numbers

    def ready(self) -> bool:
        """Tell whether the numbers are there."""
        return True
