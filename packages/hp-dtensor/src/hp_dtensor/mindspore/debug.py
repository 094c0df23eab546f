"""Which Cell of a MindSpore program communicates.

Cells have no hook for all of them, and autograd doesn't tell which Cell recorded an operation: in backward the Cell is
known only where what communicates tells it (`attribute_to`).
"""

from __future__ import annotations

from types import FrameType

from mindspore import nn
from mindspore.graph.api import _pynative_executor  # type: ignore[attr-defined]

from hp_dtensor.debug import Names, running
from hp_dtensor.mindspore.shard_module import named_modules
from hp_platform.extend import attributed_modules

__all__ = ["Modules"]


class Modules:
    """The Cells that run, read from the frames."""

    def __init__(self) -> None:
        self._names = Names(named_modules)

    def start(self) -> None:
        """Nothing is hung on Cells."""

    def stop(self) -> None:
        """Nothing was hung on Cells."""

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Phase and Cell of the program at this frame."""
        attributed = attributed_modules()
        if _pynative_executor.get_current_autodiff_engine_id() != -1:
            return "backward", self._names.of(attributed)
        return "forward", self._names.of(attributed or running(frame, nn.Cell))
