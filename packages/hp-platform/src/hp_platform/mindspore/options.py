"""GroupOptions as the options of MindSpore's groups."""

from __future__ import annotations

from typing import Any

from mindspore._c_expression import GroupOptions as OwnOptions

from hp_platform.options import GroupOptions


def own_options(options: Any, backend: str) -> Any:
    """Translate GroupOptions into MindSpore's own; whatever else is given passes as it is.

    Args:
        options: GroupOptions, MindSpore's own, or None.
        backend: "hccl" or "mccl".

    Raises:
        ValueError: MindSpore's groups have no such option.
    """
    if not isinstance(options, GroupOptions):
        return options
    if options.timeout is not None:
        raise ValueError(f"timeout={options.timeout!r}: MindSpore does not support a timeout per group, leave it out.")
    if options.high_priority:
        raise ValueError("high_priority=True: MindSpore chooses the streams of its groups itself, so leave it out.")
    if options.buffer_size is None:
        return None
    if backend != "hccl":
        raise ValueError(f"buffer_size={options.buffer_size} is an option of hccl; the group's backend is {backend}.")
    made = OwnOptions()
    made.hccl_config = {"hccl_buffer_size": options.buffer_size}
    return made
