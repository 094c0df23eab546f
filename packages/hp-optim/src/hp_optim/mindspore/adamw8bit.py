"""AdamW8bit is for PyTorch."""

from __future__ import annotations

from typing import Any


class AdamW8bit:
    """Refused on MindSpore.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "AdamW8bit is not supported on MindSpore, whose operations don't see the bits of a float32 as integers. Use"
            " AdamW, and shard its states by hp_fsdp.fully_shard"
        )
