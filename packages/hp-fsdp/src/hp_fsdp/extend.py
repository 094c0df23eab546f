"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hp_fsdp.grad_norm import counts_here
from hp_fsdp.groups.managed_params import Roster
from hp_fsdp.port import explaining, sharding

__all__ = ["Roster", "counts_here", "kept_gathered", "watch_optimizers"]


@contextlib.contextmanager
def kept_gathered(models: Sequence[Any], most: int | None = None) -> Iterator[tuple[list[str], bool]]:
    """Inside, groups of sharded models stay gathered once a forward has gathered them; then all are shards again.

    Args:
        models: the outermost sharded modules.
        most: bytes of gathered parameters that stay. Default: all.

    Yields:
        The names of the groups that stay gathered: the outermost first, then in order, as long as they fit. And whether
        these are all groups.
    """
    groups = [group for model in models for group in model._groups(True)]
    before, names, left = [(group, group.reshard_after_forward) for group in groups], list[str](), most
    try:
        for group, _ in before:
            nbytes = sum(explaining().bytes_of(bucket).gathered for bucket in group.buckets)
            stays = left is None or nbytes <= left
            group.reshard_after_forward = not stays
            if stays:
                left = None if left is None else left - nbytes
                names.append(group.name)
        yield names, len(names) == len(before)
    finally:
        for group, reshards in before:
            group.reshard_after_forward = reshards
            group.reshard()


def watch_optimizers() -> None:
    """Check the parameters of optimizers from now on, before their first step."""
    sharding().watch_optimizers()
