"""Process groups, collectives, devices and random generators of the framework and device in use.

Everything is reached through `get_platform()`; no framework is imported before it is called.
"""

from __future__ import annotations

from hp_platform.communication.checks import CollectiveCounts, count_collectives
from hp_platform.failures.debugging import breakpoint
from hp_platform.failures.peers import LostRankError
from hp_platform.failures.watching import watch_hangs
from hp_platform.groups import (
    GroupOptions,
    destroy_process_group,
    get_backend,
    get_group_local_rank,
    get_process_group_ranks,
    init_process_group,
    mark_created_groups,
    split_group,
)
from hp_platform.platforms.platform import Platform, get_platform
from hp_platform.random import manual_seed

__all__ = [
    "CollectiveCounts",
    "GroupOptions",
    "LostRankError",
    "Platform",
    "breakpoint",
    "count_collectives",
    "destroy_process_group",
    "get_backend",
    "get_group_local_rank",
    "get_platform",
    "get_process_group_ranks",
    "init_process_group",
    "manual_seed",
    "mark_created_groups",
    "split_group",
    "watch_hangs",
]
