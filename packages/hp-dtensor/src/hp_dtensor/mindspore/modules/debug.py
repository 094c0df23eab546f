"""The Cell of a MindSpore program that communicates.

There is no global hook for Cells, and autograd does not tell which Cell recorded an operation. In backward the Cell is
known only if the communicating code names it (`communicate_for`).
"""

from __future__ import annotations

from types import FrameType

from mindspore import nn
from mindspore.graph.api import _pynative_executor  # type: ignore[attr-defined]

from hp_dtensor.debugging.debug import Names, running
from hp_dtensor.mindspore.modules.shard_module import named_modules
from hp_platform.extend import attributed_modules


class Modules:
    """The running Cells, read from the frames."""

    def __init__(self) -> None:
        self._names = Names(named_modules)

    def start(self) -> None:
        """Do nothing: Cells have no hooks."""

    def stop(self) -> None:
        """Do nothing: Cells have no hooks."""

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Return phase and Cell of the program at this frame."""
        attributed = attributed_modules()
        if _pynative_executor.get_current_autodiff_engine_id() != -1:
            return "backward", self._names.of(attributed)
        return "forward", self._names.of(attributed or running(frame, nn.Cell))
