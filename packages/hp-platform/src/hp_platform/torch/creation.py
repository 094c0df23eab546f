"""Making a process group whose members alone take part.

Note [Names of groups]: a group's members meet under its name, a prefix in the default group's store. `new_group(...,
use_local_synchronization=True)` salts the name with the number of groups that this process is in, so members that are
in different numbers of groups (a 3-d mesh, uneven stages) wait for each other under different names, forever. Without
local synchronization every rank of the world has to take part. Here the name is made of the ranks and of how
often this set was asked for, which all members know.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hp_platform.torch.options import backend_options, restore_priority, timeout_of
from hp_platform.torch.peers import raise_if_lost

ProcessGroup = dist.ProcessGroup

_made: Counter[tuple[ProcessGroup, tuple[int, ...]]] = Counter()


def create(
    ranks: tuple[int, ...],
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Make a new group with the backend of the default one.

    Args:
        ranks: ascending global ranks; each of them calls this with the same arguments, and nobody else.
        timeout: how long an operation may take; by default torch's.
        pg_options: GroupOptions, or the backend's own.
        group_desc: what the group is for, shown in torch's logs.
    """
    world = dist.group.WORLD
    assert world is not None
    number = _made[world, ranks]
    _made[world, ranks] += 1
    backend: Any
    backend, store = c10d._world.pg_map[world]
    name: Any = hashlib.sha1(f"{ranks} {number}".encode(), usedforsecurity=False).hexdigest()
    made = backend_options(pg_options, str(backend))
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            backend,
            store,
            name,
            backend_options=made,
            timeout=timeout_of(pg_options, timeout) or c10d._get_default_timeout(backend),
            device_id=world.bound_device_id,
            group_desc=group_desc,
        )
    except RuntimeError as error:
        raise_if_lost(error, "new_group", ranks)
        raise
    assert isinstance(group, ProcessGroup), "this process is a member"
    restore_priority(pg_options, group, str(backend))
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def forget() -> None:
    """Forget what was made; the default group is gone."""
    _made.clear()
