"""Options of process groups, in words that every backend understands or refuses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What to ask of a new process group's backend; what a backend doesn't have it refuses.

    Attributes:
        timeout: how long an operation may take; None is the backend's default. PyTorch's groups only.
        buffer_size: MB of device memory that hccl communicates through; None is its default (200). hccl only.
        high_priority: communicate on a stream of high priority. PyTorch's hccl and nccl.

    Raises:
        ValueError: `buffer_size` is below 1.
    """

    timeout: timedelta | None = None
    buffer_size: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < 1:
            raise ValueError(f"buffer_size, in MB, must be at least 1, got {self.buffer_size}.")
