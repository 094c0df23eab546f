"""What is refused before a collective sends anything, in the same words on every platform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hp_platform.port import Tensor


def unknown_op(op: str, ops: Iterable[str]) -> ValueError:
    """Make the error for a reduction that there isn't."""
    return ValueError(f"op={op!r} is no reduction. Choose one of: {', '.join(ops)}.")


def not_contiguous(name: str, tensor: Tensor) -> ValueError:
    """Make the error for a tensor with gaps or in another order."""
    return ValueError(
        f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}: "
        f"pass {name}.contiguous()."
    )


def integer_average(tensor: Tensor) -> TypeError:
    """Make the error for an average of whole numbers, which would have to be rounded."""
    return TypeError(f"avg needs floating point, got {tensor.dtype}: use sum, and divide as you want it rounded.")


def check_complex(op: str) -> None:
    """Refuse reductions that complex numbers don't have."""
    if op not in ("sum", "avg"):
        raise TypeError(f"op={op!r} is not defined on complex numbers: use sum or avg.")


def check_pair(kind: str, output: Tensor, tensor: Tensor) -> None:
    """Refuse an output and a tensor that differ in dtype or are not contiguous."""
    if output.dtype is not tensor.dtype:
        raise TypeError(f"{kind}: output is {output.dtype} and tensor {tensor.dtype}, they must be the same.")
    if not output.is_contiguous():
        strides = tuple(output.stride())
        raise ValueError(f"{kind}: output must be contiguous, got shape {tuple(output.shape)} with strides {strides}.")
    if not tensor.is_contiguous():
        raise not_contiguous("tensor", tensor)


def gather_mismatch(output: Tensor, piece: Tensor, size: int) -> ValueError:
    """Make the error for an output that the pieces of all ranks don't fill."""
    return ValueError(
        f"all_gather: {size} ranks with a piece of shape {tuple(piece.shape)} make {piece.numel() * size} elements, "
        f"output has {output.numel()} (shape {tuple(output.shape)})."
    )


def scatter_mismatch(piece: Tensor, tensor: Tensor, size: int) -> ValueError:
    """Make the error for a tensor that the pieces of all ranks don't make."""
    return ValueError(
        f"reduce_scatter: {size} ranks with a piece of shape {tuple(piece.shape)} take {piece.numel() * size} "
        f"elements, tensor has {tensor.numel()} (shape {tuple(tensor.shape)})."
    )


def checked_splits(name: str, tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Get the sizes of the pieces that dim 0 is cut in over `size` ranks, empty for equal ones."""
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


def check_peer(name: str, rank: int, size: int) -> None:
    """Refuse a rank that a group of `size` ranks doesn't have."""
    if not 0 <= rank < size:
        raise ValueError(f"{name} is a rank inside the group, from 0 to {size - 1}, got {rank}.")


def check_ranks(ranks: tuple[int, ...], rank: int, size: int) -> None:
    """Refuse sorted ranks that make no group, or one that `rank` of a world of `size` is not in."""
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a group needs different ranks from 0 to {size - 1} (the world size is {size}), got {ranks}.")
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group {ranks}: only members call new_group().")


def check_options(asked: object, made: object, ranks: Sequence[int]) -> None:
    """Refuse options for a group that exists, unless it was made with them."""
    if asked is not None and asked != made:
        raise ValueError(
            f"pg_options={asked!r}, but the group of ranks {tuple(ranks)} exists already, made with {made!r}: options "
            "are for the call that makes a group, which comes first."
        )


def choose_parent(parent: Any, parent_pg: Any) -> Any:
    """Choose the parent of `split_group` among its two names, ours and torch's."""
    if parent is not None and parent_pg is not None and parent is not parent_pg:
        raise ValueError(f"parent={parent!r} and parent_pg={parent_pg!r} name one argument: give one of them.")
    return parent_pg if parent is None else parent


def check_child_backend(asked: object, parent: str) -> None:
    """Refuse a child whose backend is not its parent's."""
    if asked is not None and str(asked).lower() != parent:
        raise ValueError(
            f"backend={str(asked)!r}, and the parent's is {parent!r}, which its children have: leave it out."
        )


def check_timeout(timeout: object, of_groups: bool) -> None:
    """Refuse a timeout of one group where the framework's groups have none of their own."""
    if timeout is not None and not of_groups:
        raise ValueError(f"timeout={timeout!r}: MindSpore's groups have none of their own, leave it out.")


def read_split_ranks(split_ranks: int | Sequence[Sequence[int]] | None, size: int) -> Sequence[Sequence[int]]:
    """List each child's ranks inside a parent of `size` ranks; refuse children that overlap or have other ranks.

    >>> read_split_ranks(2, 4)
    [[0, 1], [2, 3]]
    """
    if isinstance(split_ranks, int) and not isinstance(split_ranks, bool):
        if split_ranks < 1 or size % split_ranks:
            raise ValueError(
                f"split_ranks={split_ranks} is the size of each child, which must divide the parent's {size} ranks: "
                "for children of unequal sizes, list each one's ranks."
            )
        return [list(range(first, first + split_ranks)) for first in range(0, size, split_ranks)]
    if not split_ranks:
        raise ValueError(f"split_ranks needs at least one list of ranks, got {split_ranks!r}.")
    if isinstance(split_ranks, bool) or not all(isinstance(ranks, Sequence) for ranks in split_ranks):
        raise TypeError(
            f"split_ranks is a list with a list of ranks for each child, as [[0, 1], [2, 3]], or a child's size, got "
            f"{split_ranks!r}."
        )
    flat = [rank for ranks in split_ranks for rank in ranks]
    if len(set(flat)) != len(flat) or min(flat, default=-1) < 0 or max(flat) >= size:
        raise ValueError(
            f"split_ranks needs different ranks from 0 to {size - 1} (the parent has {size}), "
            f"got {[list(ranks) for ranks in split_ranks]}."
        )
    return split_ranks


def no_default_group() -> RuntimeError:
    """Make the error for what needs the default group before there is one."""
    return RuntimeError("there is no default process group: call init_process_group() first.")


def check_same_world(here: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse another initialisation that disagrees with the default group that is there."""
    different = [f"{name} is {here[name]!r}, got {given[name]!r}" for name in here if given[name] != here[name]]
    if different:
        raise RuntimeError(
            f"the default process group exists already: its {'; '.join(different)}. "
            "Call destroy_process_group() first, or leave the arguments out."
        )
