"""What of context parallelism needs calls of attention to be intercepted, which MindSpore does not let."""

from __future__ import annotations

from typing import Any, NoReturn


def attach_sparse(*args: Any) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "context parallelism of sparse attention, and as a block, is for PyTorch only, as MindSpore's attention is not"
        " intercepted; use ContextParallel on a Cell that is passed q, k and v (qkv_indices= or qkv_kwarg_names=)"
    )


attention_over = cut_in_place = attach_sparse
