"""Context parallelism is not on MindSpore; each of its functions says so."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["attach", "attach_sparse", "attention_over", "cut_in_place", "enclose", "shard", "unshard"]


def attach(*args: Any) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "context parallelism is for PyTorch only, as MindSpore's attention is not intercepted; shard the heads or "
        "the batch instead (ColwiseParallel and RowwiseParallel over the heads)"
    )


attach_sparse = attention_over = cut_in_place = enclose = shard = unshard = attach
