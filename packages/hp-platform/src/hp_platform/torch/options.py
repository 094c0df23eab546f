"""GroupOptions as the options of PyTorch's backends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hp_platform.options import GroupOptions


def backend_options(options: Any, backend: str) -> Any:
    """Translate GroupOptions into the backend's own; whatever else is given passes as it is.

    Args:
        options: GroupOptions, the backend's own options, or None.
        backend: the backend's name.

    Raises:
        ValueError: the backend has no such option.
    """
    if not isinstance(options, GroupOptions):
        return options
    if options.buffer_size is not None and backend != "hccl":
        raise ValueError(f"buffer_size={options.buffer_size} is an option of hccl; the group's backend is {backend}.")
    if options.high_priority and backend not in ("hccl", "nccl"):
        raise ValueError(f"high_priority=True is an option of hccl and nccl; the group's backend is {backend}.")
    if backend == "nccl":
        return dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority)
    if backend != "hccl":
        return None
    import torch_npu  # type: ignore[import-not-found]

    made = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    made.is_high_priority_stream = options.high_priority
    if options.buffer_size is not None:
        made.hccl_config = {"hccl_buffer_size": options.buffer_size}
    return made


def timeout_of(options: Any, timeout: timedelta | None) -> timedelta | None:
    """Choose the time limit: the argument of that name, else the options'."""
    return options.timeout if timeout is None and isinstance(options, GroupOptions) else timeout


def restore_priority(options: Any, group: dist.ProcessGroup, backend: str) -> None:
    """Ask hccl for the priority again once the group is made; its streams are made at its first operation.

    torch_npu resets it while it makes the group.

    Args:
        options: what was asked for.
        group: the new group.
        backend: its backend's name.
    """
    if isinstance(options, GroupOptions) and options.high_priority and backend == "hccl":
        cast(Any, group._get_backend(torch.device("npu"))).options.is_high_priority_stream = True
