"""Questions to all ranks: whether they sharded one model in one way, and ran as many micro-batches.

All that is sent are whole numbers, of which each rank gets the largest: a text goes as its bytes, each rank's in places
of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from hp_fsdp.axes import DataAxes

__all__ = ["Largest", "check_alike", "check_counts", "lines_of"]

Largest = Callable[[Sequence[int], DataAxes], list[int]]
"""Gives the largest of the ranks' numbers, place by place; it waits for all ranks of the axes."""


def check_alike(groups: Sequence[Any], axes: DataAxes, largest: Largest) -> None:
    """Raises on all ranks alike where their groups differ; one reduction of two numbers where they don't.

    Args:
        groups: of a model.
        axes: of its outermost group, whose ranks are asked.
        largest: the framework's.

    Raises:
        ValueError: with the first group that is not the same.
    """
    lines = [_told(group) for group in groups]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    if extremes(digest, axes, largest) == (digest, digest):
        return
    expected, different = (text.split("\n") for text in _two_texts("\n".join(lines), digest, axes, largest))
    for one, other in zip(expected, different):
        if one != other:
            break
    else:
        one, other = (f"{len(each)} groups" for each in (expected, different))
    raise ValueError(
        "fully_shard: ranks sharded different models, or one in different ways, and would wait for each other or mix up"
        f" their parameters. On some: {one}. On others: {other}. Build the same model and make the same calls on all"
    )


def check_counts(axes: DataAxes, count: int, largest: Largest) -> None:
    """Raises on all ranks alike where they ran different numbers of micro-batches.

    Args:
        axes: of whose ranks.
        count: this rank's number.
        largest: the framework's.

    Raises:
        ValueError: the numbers differ.
    """
    most, least = extremes(count, axes, largest)
    if most != least:
        raise ValueError(
            f"fully_shard(deterministic=True): this rank ran {count} micro-batches since the last step, others from"
            f" {least} to {most}. Their order is global, so give each rank as many (consecutive ones)"
        )


def extremes(number: int, axes: DataAxes, largest: Largest) -> tuple[int, int]:
    """The largest and the smallest of the ranks' numbers."""
    most, least = largest([number, -number], axes)
    return most, -least


def lines_of(axes: DataAxes) -> list[Any]:
    """The process groups of more than one rank, along which all ranks are reached one after the other."""
    lines = ((axes.shard_group, axes.shard_size), (axes.replicate_group, axes.replicate_size))
    return [group for group, size in lines if size > 1]


def _told(group: Any) -> str:
    buckets = [
        f"{bucket.dtype} as {bucket.compute_dtype} of {[p.name + str(list(p.global_shape)) for p in bucket.parameters]}"
        for bucket in group.buckets
    ]
    options = f"deterministic={group.deterministic}, {group.axes.replicate_size} x {group.axes.shard_size} ranks"
    return f"group {group.name!r} with {'; '.join(buckets)} ({options})"


def _two_texts(text: str, digest: int, axes: DataAxes, largest: Largest) -> list[str]:
    """That of the first rank, and of the first rank with another digest."""
    replica = axes.mesh.get_local_rank(0) if axes.replicate_size > 1 else 0
    me = replica * axes.shard_size + axes.shard_rank
    digests = largest(_at(me, [digest], axes.replicate_size * axes.shard_size), axes)
    chosen = (0, next(rank for rank, each in enumerate(digests) if each != digests[0]))
    own = text.encode()
    (length,) = largest([len(own)], axes)
    told = largest(_at(chosen.index(me), own, 2, length) if me in chosen else [0] * (2 * length), axes)
    return [bytes(told[at : at + length]).rstrip(b"\0").decode() for at in (0, length)]


def _at(place: int, numbers: Sequence[int], places: int, size: int = 1) -> list[int]:
    """Numbers in one of several places of a size, zeros in the others."""
    made = [0] * (places * size)
    made[place * size : place * size + len(numbers)] = numbers
    return made
