"""Process groups on PyTorch, one for each set of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hp_platform.checks import (
    check_child_backend,
    check_options,
    check_ranks,
    check_same_world,
    choose_parent,
    no_default_group,
    read_split_ranks,
)
from hp_platform.endings import groups_ended
from hp_platform.torch import peers
from hp_platform.torch.creation import create, forget
from hp_platform.torch.devices import devices
from hp_platform.torch.options import backend_options, restore_priority, timeout_of

ProcessGroup = dist.ProcessGroup

# The groups by their ranks. They live as long as the default group `_world` they were made under.
_by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
_options: dict[tuple[int, ...], Any] = {}
_world: ProcessGroup | None = None


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Initialise the default process group, as `torch.distributed.init_process_group` does.

    A second call that agrees with the group that is there does nothing.

    Args:
        backend: None picks nccl, hccl or gloo by the kind of device in use.
        init_method: where the ranks meet; by default the environment that torchrun sets.
        timeout: how long an operation may take; by default torch's.
        world_size: number of ranks, needed with `store`.
        rank: this process's rank, needed with `store`.
        store: where the ranks meet, instead of `init_method`.
        group_name: ignored, as torch does.
        pg_options: GroupOptions, or the backend's own.
        device_id: the device that this process will use.

    Raises:
        RuntimeError: the default group exists with another backend, size or rank.
    """
    if dist.is_initialized():
        _check_same(backend, world_size, rank)
        everyone = tuple(range(dist.get_world_size()))
        check_options(pg_options, _options.get(everyone), everyone)
        peers.meet(everyone)
        return
    chosen = backend or dist.get_default_backend_for_device(devices.kind)
    made = backend_options(pg_options, chosen)
    dist.init_process_group(
        chosen,
        init_method=init_method,
        timeout=timeout_of(pg_options, timeout),
        world_size=world_size,
        rank=rank,
        store=store,
        group_name=group_name,
        pg_options=made,
        device_id=device_id,
    )
    restore_priority(pg_options, _default(), chosen)
    _cache()
    everyone = tuple(range(dist.get_world_size()))
    _options[everyone] = pg_options
    peers.meet(everyone, None)


def _check_same(backend: str | None, world_size: int, rank: int) -> None:
    here = {"backend": dist.get_backend(), "world_size": dist.get_world_size(), "rank": dist.get_rank()}
    given = {"backend": backend or here["backend"]}
    given["world_size"] = here["world_size"] if world_size == -1 else world_size
    given["rank"] = here["rank"] if rank == -1 else rank
    check_same_world(here, given)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy one group, or with None all groups and the default one.

    Args:
        group: a group that was made here or by torch.
    """
    global _world
    if group is None or group is dist.group.WORLD:
        _by_ranks.clear()
        _options.clear()
        _world = None
        forget()
        peers.leave()
    else:
        for key in [key for key, cached in _by_ranks.items() if cached is group]:
            del _by_ranks[key]
            _options.pop(key, None)
    dist.destroy_process_group(group)
    groups_ended()


def _cache() -> dict[tuple[int, ...], ProcessGroup]:
    global _world
    world = _default()
    if world is not _world:
        _by_ranks.clear()
        _options.clear()
        forget()
        peers.leave()
        _by_ranks[tuple(range(world.size()))] = world
        _world = world
        groups_ended()
    return _by_ranks


def known_groups() -> Mapping[tuple[int, ...], ProcessGroup]:
    """Get the groups that this process is in, by their ranks."""
    return _cache()


def _default() -> ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise no_default_group()
    return world


def is_initialized() -> bool:
    """Tell whether the default group exists."""
    return dist.is_available() and dist.is_initialized()


def new_group(ranks: Sequence[int], pg_options: Any | None = None) -> ProcessGroup:
    """Get the group of a set of ranks, made at the first call and the same ever after.

    Only the members call it, each with the same set in any order; ranks inside the group follow the global order.

    Args:
        ranks: global ranks, this one among them.
        pg_options: GroupOptions, or the backend's own, for the call that makes the group.

    Returns:
        The group.

    Raises:
        ValueError: a rank is doubled or not in the world, this process is not a member, or the group exists already,
            made with other options.
        RuntimeError: there is no default group yet.
    """
    key = tuple(sorted(ranks))
    groups = _cache()
    group = groups.get(key)
    if group is None:
        check_ranks(key, dist.get_rank(), dist.get_world_size())
        group = groups[key] = create(key, pg_options=pg_options)
        _options[key] = pg_options
        peers.meet(key)
    elif key not in _options:  # torch made it
        _options[key] = None
        peers.meet(key)
    check_options(pg_options, _options.get(key), key)
    return group


def second_group(ranks: Sequence[int]) -> ProcessGroup:
    """Make another group of a set of ranks, whose collectives may run beside those of the first.

    Only the members call it, each alike; what is made is not cached.

    Args:
        ranks: ascending global ranks, this one among them.
    """
    _cache()
    return create(tuple(ranks))


def split_group(
    parent: ProcessGroup | None = None,
    split_ranks: int | Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
    *,
    parent_pg: ProcessGroup | None = None,
) -> ProcessGroup | None:
    """Get this rank's child of a group, as `torch.distributed.split_group`; one child for one set of ranks.

    Args:
        parent: the group to split; None is the default group.
        split_ranks: for each child its ranks inside the parent; no rank in two children. A number is the size of each
            child, of consecutive ranks.
        timeout: how long an operation in a new child may take; by default torch's.
        pg_options: GroupOptions for a new child, or the backend's own.
        group_desc: what a new child is for, shown in torch's logs.
        backend: None, or the parent's, which a child always has.
        parent_pg: torch's name of `parent`.

    Returns:
        The child that holds this rank, None if no child does.

    Raises:
        ValueError: `split_ranks` is empty, its ranks are doubled or not in the parent, or the child exists already,
            made with other options.
        TypeError: `split_ranks` is no list of lists.
    """
    parent = choose_parent(parent, parent_pg)
    members = get_process_group_ranks(parent)
    children = read_split_ranks(split_ranks, len(members))
    check_child_backend(backend, get_backend(parent))
    rank = dist.get_rank()
    groups = _cache()
    for ranks in children:
        key = tuple(sorted(members[index] for index in ranks))
        if rank in key:
            if key not in groups:
                groups[key] = create(key, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
                _options[key] = pg_options
                peers.meet(key)
            check_options(pg_options, _options.get(key), key)
            return groups[key]
    return None


def mark_created_groups(groups: ProcessGroup | Iterable[ProcessGroup]) -> None:
    """Register groups that were created elsewhere, so that the same ranks get them and no second communicator.

    A set of ranks that already has a group keeps the one it has.

    Args:
        groups: a group, or several; what torch returns to ranks outside of a group is passed over.
    """
    known = _cache()
    for group in [groups] if isinstance(groups, ProcessGroup) else groups:
        if isinstance(group, ProcessGroup):
            known.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """List the global ranks of a group, in the order of their ranks inside it.

    Args:
        group: None is the default group.
    """
    return dist.get_process_group_ranks(group if group is not None else _default())


def get_backend(group: ProcessGroup | None = None) -> str:
    """Name the backend of a group, such as "gloo".

    Args:
        group: None is the default group.
    """
    return str(dist.get_backend(group if group is not None else _default()))


def get_group_local_rank(group: ProcessGroup | None = None) -> int:
    """Get this process's rank inside a group.

    Args:
        group: None is the default group.
    """
    return (group if group is not None else _default()).rank()


def size(group: ProcessGroup | None = None) -> int:
    """Count the ranks of a group.

    Args:
        group: None is the default group.
    """
    return (group if group is not None else _default()).size()


# The names of the platform's role; the long ones are the public API, named as torch names them.
destroy = destroy_process_group
ranks = get_process_group_ranks
rank = get_group_local_rank
backend = get_backend
mark_created = mark_created_groups
