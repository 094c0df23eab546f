"""Checks over all ranks: did they shard the same model in the same way, and run as many micro-batches?

Only whole numbers are sent, and each rank gets the largest: a text travels as its bytes, each rank's at its own
offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hp_fsdp.port import model_states
from hp_fsdp.ranks.axes import DataAxes


def check_alike(groups: Sequence[Any], axes: DataAxes) -> None:
    """Raise on all ranks alike if their groups differ; it costs one reduction of two numbers if they don't.

    Args:
        groups: of a model.
        axes: of its outermost group.

    Raises:
        ValueError: the groups differ; the text shows the first that does.
    """
    lines = [_described(group) for group in groups]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    if _extremes(digest, axes) == (digest, digest):
        return
    expected, different = (text.split("\n") for text in _two_texts("\n".join(lines), digest, axes))
    for one, other in zip(expected, different):
        if one != other:
            break
    else:
        one, other = (f"{len(each)} groups" for each in (expected, different))
    raise ValueError(
        "fully_shard: ranks sharded different models, or the same model in different ways, and would hang or mix up"
        f" parameters. On some: {one}. On others: {other}. Build the same model and make the same calls on all ranks"
    )


def check_counts(axes: DataAxes, count: int) -> None:
    """Raise on all ranks alike if they ran different numbers of micro-batches.

    Args:
        axes: of the ranks to compare.
        count: this rank's number.

    Raises:
        ValueError: the numbers differ.
    """
    most, least = _extremes(count, axes)
    if most != least:
        raise ValueError(
            f"fully_shard(deterministic=True): this rank ran {count} micro-batches since the last step, others from"
            f" {least} to {most}. Their order is global, so give each rank as many (consecutive ones)"
        )


def _extremes(number: int, axes: DataAxes) -> tuple[int, int]:
    """Return the largest and the smallest of the ranks' numbers."""
    most, least = _largest([number, -number], axes)
    return most, -least


def _largest(numbers: Sequence[int], axes: DataAxes) -> list[int]:
    """Return the largest of the ranks' numbers, element by element; wait for all ranks of the axes."""
    lines = ((axes.shard_group, axes.shard_size), (axes.replicate_group, axes.replicate_size))
    return model_states().largest(numbers, axes.mesh, [group for group, size in lines if size > 1])


def _described(group: Any) -> str:
    buckets = [
        f"{bucket.dtype} as {bucket.compute_dtype} of {[p.name + str(list(p.global_shape)) for p in bucket.parameters]}"
        for bucket in group.buckets
    ]
    options = f"deterministic={group.deterministic}, {group.axes.replicate_size} x {group.axes.shard_size} ranks"
    return f"group {group.name!r} with {'; '.join(buckets)} ({options})"


def _two_texts(text: str, digest: int, axes: DataAxes) -> list[str]:
    """Return the text of the first rank, and of the first rank with another digest."""
    replica = axes.mesh.get_local_rank(0) if axes.replicate_size > 1 else 0
    me = replica * axes.shard_size + axes.shard_rank
    digests = _largest(_at(me, [digest], axes.replicate_size * axes.shard_size), axes)
    chosen = (0, next(rank for rank, each in enumerate(digests) if each != digests[0]))
    own = text.encode()
    (length,) = _largest([len(own)], axes)
    texts = _largest(_at(chosen.index(me), own, 2, length) if me in chosen else [0] * (2 * length), axes)
    return [bytes(texts[at : at + length]).rstrip(b"\0").decode() for at in (0, length)]


def _at(index: int, numbers: Sequence[int], count: int, size: int = 1) -> list[int]:
    """Put numbers into one of ``count`` slots of a size, zeros into the others."""
    slots = [0] * (count * size)
    slots[index * size : index * size + len(numbers)] = numbers
    return slots
