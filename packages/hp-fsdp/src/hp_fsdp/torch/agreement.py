"""Whether all ranks sharded the same model in the same way, asked once, before the first parameters are gathered."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from hp_fsdp.axes import DataAxes
from hp_fsdp.torch.host import transport
from hp_platform.torch import collectives

__all__ = ["check_alike", "extremes"]


def check_alike(groups: Sequence[Any], axes: DataAxes) -> None:
    """Raises on all ranks alike where their groups differ; one reduction of two numbers where they don't.

    Args:
        groups: of a model.
        axes: of its outermost group, whose ranks are asked.

    Raises:
        ValueError: with the first group that is not the same.
    """
    lines = [_told(group) for group in groups]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    if extremes(digest, axes) == (digest, digest):
        return
    texts = ["\n".join(lines)]
    for group, size in _lines(axes):
        texts = _gathered("\x1e".join(texts), group, size, axes)
    different = next(text for text in texts if text != texts[0]).split("\n")
    expected = texts[0].split("\n")
    for one, other in zip(expected, different):
        if one != other:
            break
    else:
        one, other = (f"{len(each)} groups" for each in (expected, different))
    raise ValueError(
        "fully_shard: ranks sharded different models, or one in different ways, and would wait for each other or mix up"
        f" their parameters. On some: {one}. On others: {other}. Build the same model and make the same calls on all"
    )


def _told(group: Any) -> str:
    buckets = [
        f"{bucket.dtype} as {bucket.compute_dtype} of {[p.name + str(list(p.shape)) for p in bucket.parameters]}"
        for bucket in group.buckets
    ]
    options = f"deterministic={group.deterministic}, {group.axes.replicate_size} x {group.axes.shard_size} ranks"
    return f"group {group.name!r} with {'; '.join(buckets)} ({options})"


def _lines(axes: DataAxes) -> list[tuple[Any, int]]:
    lines = ((axes.shard_group, axes.shard_size), (axes.replicate_group, axes.replicate_size))
    return [(group, size) for group, size in lines if size > 1]


def extremes(number: int, axes: DataAxes) -> tuple[int, int]:
    """The largest and the smallest of the ranks' numbers; it waits for them."""
    pair = torch.tensor([number, -number], device=transport(axes.mesh))
    for group, _ in _lines(axes):
        collectives.all_reduce(pair, "max", group=group)
    return int(pair[0]), -int(pair[1])


def _gathered(text: str, group: Any, size: int, axes: DataAxes) -> list[str]:
    device = transport(axes.mesh)
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    longest = torch.tensor([data.numel()], device=device)
    collectives.all_reduce(longest, "max", group=group)
    own = torch.zeros(int(longest), dtype=torch.uint8, device=device)
    own[: data.numel()] = data
    every = torch.empty(size * own.numel(), dtype=torch.uint8, device=device)
    collectives.all_gather(every, own, group=group)
    told = [bytes(each.tolist()).rstrip(b"\0").decode() for each in every.cpu().chunk(size)]
    return [text for each in told for text in each.split("\x1e")]
