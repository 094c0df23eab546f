"""What is refused before a collective sends anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

ProcessGroup = dist.ProcessGroup


def unknown_op(op: str, ops: Iterable[str]) -> ValueError:
    """Make the error for a reduction that there isn't."""
    return ValueError(f"op={op!r} is no reduction. Choose one of: {', '.join(ops)}.")


def not_contiguous(name: str, tensor: torch.Tensor) -> ValueError:
    """Make the error for a tensor with gaps or in another order."""
    return ValueError(
        f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
        f"pass {name}.contiguous()."
    )


def check_complex(op: str) -> None:
    """Refuse reductions that complex numbers don't have."""
    if op not in ("sum", "avg"):
        raise TypeError(f"op={op!r} is not defined on complex numbers: use sum or avg.")


def check_pair(kind: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Refuse an output and a tensor that differ in dtype or are not contiguous."""
    if output.dtype is not tensor.dtype:
        raise TypeError(f"{kind}: output is {output.dtype} and tensor {tensor.dtype}, they must be the same.")
    if not output.is_contiguous():
        raise ValueError(
            f"{kind}: output must be contiguous, got shape {tuple(output.shape)} with strides {output.stride()}."
        )
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)


def checked_splits(name: str, tensor: torch.Tensor, splits: Sequence[int] | None, group: ProcessGroup) -> list[int]:
    """Get the sizes of the pieces that dim 0 is cut in, empty for equal ones."""
    size = group.size()
    if splits is None:
        if tensor.ndim == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all: dim 0 of the {name} of shape {tuple(tensor.shape)} does not divide over {size} ranks: "
                f"pass {name}_splits."
            )
        return []
    if len(splits) != size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: {name}_splits must be {size} numbers (one a rank) whose sum is {tensor.shape[0]} "
            f"(dim 0 of the {name} of shape {tuple(tensor.shape)}), got {list(splits)}."
        )
    return splits if type(splits) is list else list(splits)


def check_peer(name: str, rank: int, group: ProcessGroup) -> None:
    """Refuse a rank that the group doesn't have."""
    if not 0 <= rank < group.size():
        raise ValueError(f"{name} is a rank inside the group, from 0 to {group.size() - 1}, got {rank}.")
