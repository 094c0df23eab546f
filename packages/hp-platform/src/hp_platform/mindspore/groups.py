"""Process groups on MindSpore, one for each set of ranks. A group is its name, a `str`."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from mindspore import communication
from mindspore.communication import GlobalComm, management
from mindspore.mint import distributed as dist

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
from hp_platform.mindspore.devices import devices
from hp_platform.mindspore.options import own_options

MCCL, HCCL = "mccl", "hccl"

# How long mccl waits in an operation: as torch's gloo, since its own 30 s are less than a slow step of one rank.
DEFAULT_TIMEOUT = timedelta(minutes=30)
_TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"

# The groups by their ranks, each group's ranks, and how often a set was asked for, of which names are made: MindSpore
# can't make a destroyed group's name again.
_by_ranks: dict[tuple[int, ...], str] = {}
_ranks: dict[str, tuple[int, ...]] = {}
_options: dict[tuple[int, ...], Any] = {}
_made: Counter[tuple[int, ...]] = Counter()
_destroyed = False


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: int | None = None,
) -> None:
    """Initialise the default process group, under msrun without arguments.

    A second call that agrees with the group that is there does nothing.

    Args:
        backend: None picks hccl on Ascend and mccl on the CPU.
        init_method: where the ranks meet, as "tcp://127.0.0.1:29500"; by default the environment that msrun sets.
        timeout: how long an operation may take on mccl, by default 30 minutes (MindSpore's 30 s are the environment
            variable MS_CPU_COMM_OP_TIMEOUT's, which comes first), and how long the ranks may take to meet.
        world_size: number of ranks, needed with `store` or `init_method`.
        rank: this process's rank, needed with `store` or `init_method`.
        store: where the ranks meet, a `mindspore.mint.distributed.TCPStore`, instead of `init_method`.
        group_name: ignored, as torch does.
        pg_options: must be None; the default group has no options.
        device_id: the device that this process will use, by default what msrun says.

    Raises:
        RuntimeError: the default group exists with another backend, size or rank; there is nothing that says where the
            ranks meet; or mccl's default group was destroyed, which MindSpore can't make twice in a process.
        ValueError: a backend that MindSpore doesn't have on this device, or options.
    """
    if is_initialized():
        _check_same(backend, world_size, rank)
        return
    expected = HCCL if devices.kind == "npu" else MCCL
    if backend not in (None, expected):
        raise ValueError(f"backend={backend!r}, but on {devices.kind} MindSpore communicates with {expected!r}.")
    if pg_options is not None:
        raise ValueError(
            "pg_options: MindSpore's default group has no options: give them to split_group, or set HCCL_BUFFSIZE."
        )
    if devices.kind == "cpu" or device_id is not None:
        devices.set_device(device_id or 0)
    if expected == HCCL:
        dist.init_process_group(HCCL, init_method, timeout, world_size, rank, store)
    else:
        _init_mccl(init_method, timeout or DEFAULT_TIMEOUT, world_size, rank, store)


def _init_mccl(init_method: str | None, timeout: timedelta, world_size: int, rank: int, store: Any | None) -> None:
    """Do what `mint.distributed.init_process_group` does, which refuses every backend but hccl."""
    if _destroyed:
        raise RuntimeError("MindSpore can't initialise mccl a second time in a process: start the ranks anew.")
    os.environ.setdefault(_TIMEOUT_VARIABLE, str(max(1, round(timeout.total_seconds()))))
    if store is None and init_method is None:
        if "MS_ROLE" not in os.environ:
            raise RuntimeError(
                "nothing says where the ranks meet: start this program with msrun (as in: msrun --worker_num=4 "
                "--local_worker_num=4 program.py), or pass store or init_method with rank and world_size."
            )
        communication.init(MCCL)  # the scheduler's process, which runs the same program, does not return from here
        return
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"store and init_method need rank and world_size, got rank={rank}, world_size={world_size}.")
    if store is None:
        host, _, port = str(init_method).removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=timeout)
    management._init_with_store(MCCL, timeout, world_size, rank, store, "")


def _check_same(backend: str | None, world_size: int, rank: int) -> None:
    here = {"backend": get_backend(), "world_size": size(), "rank": get_group_local_rank()}
    given = {"backend": backend or here["backend"]}
    given["world_size"] = here["world_size"] if world_size == -1 else world_size
    given["rank"] = here["rank"] if rank == -1 else rank
    check_same_world(here, given)


def destroy_process_group(group: str | None = None) -> None:
    """Destroy one group, or with None all groups and the default one.

    Args:
        group: a group that was made here or by MindSpore.
    """
    global _destroyed
    if group is None or group == default():
        _destroyed = _destroyed or get_backend() == MCCL
        _by_ranks.clear()
        _options.clear()
        _ranks.clear()
        _made.clear()
        dist.destroy_process_group()
        groups_ended()
        return
    for key in [key for key, cached in _by_ranks.items() if cached == group]:
        del _by_ranks[key]
        _options.pop(key, None)
    _ranks.pop(group, None)
    devices.synchronize()
    communication.destroy_group(group)
    groups_ended()


def known_groups() -> Mapping[tuple[int, ...], str]:
    """Get the groups that this process is in, by their ranks."""
    world = default()
    if not _by_ranks:
        _by_ranks[_members(world)] = world
        groups_ended()
    return _by_ranks


def default() -> str:
    """Get the default group.

    Raises:
        RuntimeError: there is none yet.
    """
    if not is_initialized():
        raise no_default_group()
    return GlobalComm.WORLD_COMM_GROUP


def _members(group: str | None) -> tuple[int, ...]:
    """Get the ranks of a group; asking MindSpore costs more than a look-up."""
    if group is None:
        group = default()
    members = _ranks.get(group)
    if members is None:
        members = _ranks[group] = tuple(communication.get_process_group_ranks(group))
    return members


def is_initialized() -> bool:
    """Tell whether the default group exists."""
    return dist.is_initialized()


def new_group(ranks: Sequence[int], pg_options: Any | None = None) -> str:
    """Get the group of a set of ranks, made at the first call and the same ever after.

    Only the members call it, each with the same set in any order; ranks inside the group follow the global order.

    Args:
        ranks: global ranks, this one among them.
        pg_options: GroupOptions, or MindSpore's own, for the call that makes the group.

    Returns:
        The group's name.

    Raises:
        ValueError: a rank is doubled or not in the world, this process is not a member, or the group exists already,
            made with other options.
        RuntimeError: there is no default group yet.
    """
    key = tuple(sorted(ranks))
    group = known_groups().get(key)
    if group is None:
        check_ranks(key, get_group_local_rank(), size())
        group = _create(key, pg_options)
    check_options(pg_options, _options.get(key), key)
    return group


def _create(ranks: tuple[int, ...], options: Any | None = None) -> str:
    own = own_options(options, get_backend())
    number = _made[ranks]
    _made[ranks] += 1
    digest = hashlib.sha1(f"{ranks} {number}".encode(), usedforsecurity=False).hexdigest()
    group = f"hp_{len(ranks)}_{digest}"
    communication.create_group(group, list(ranks), own)
    _by_ranks[ranks], _ranks[group], _options[ranks] = group, ranks, options
    return group


def split_group(
    parent: str | None = None,
    split_ranks: int | Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
    *,
    parent_pg: str | None = None,
) -> str | None:
    """Get this rank's child of a group; one child for one set of ranks.

    Args:
        parent: the group to split; None is the default group.
        split_ranks: for each child its ranks inside the parent; no rank in two children. A number is the size of each
            child, of consecutive ranks.
        timeout: must be None; MindSpore's groups share the default group's.
        pg_options: GroupOptions for a new child, or MindSpore's own.
        group_desc: what a new child is for; MindSpore shows it nowhere.
        backend: None, or the parent's, which a child always has.
        parent_pg: torch's name of `parent`.

    Returns:
        The child that holds this rank, None if no child does.

    Raises:
        ValueError: `split_ranks` is empty, or its ranks are doubled or not in the parent, or there is a `timeout`.
        TypeError: `split_ranks` is no list of lists.
    """
    if timeout is not None:
        raise ValueError(f"timeout={timeout!r}: MindSpore's groups have none of their own, leave it out.")
    parent = choose_parent(parent, parent_pg)
    members = _members(parent)
    children = read_split_ranks(split_ranks, len(members))
    check_child_backend(backend, get_backend(parent))
    rank = get_group_local_rank()
    for ranks in children:
        key = tuple(sorted(members[index] for index in ranks))
        if rank in key:
            group = known_groups().get(key) or _create(key, pg_options)
            check_options(pg_options, _options.get(key), key)
            return group
    return None


def mark_created_groups(groups: str | Iterable[str]) -> None:
    """Register groups that were created elsewhere, so that the same ranks get them and no second communicator.

    A set of ranks that already has a group keeps the one it has.

    Args:
        groups: a group's name, or several; empty names, which MindSpore returns on failure, are passed over.
    """
    known_groups()
    for group in [groups] if isinstance(groups, str) else groups:
        if group:
            _by_ranks.setdefault(tuple(sorted(_members(group))), group)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    """List the global ranks of a group, in the order of their ranks inside it.

    Args:
        group: None is the default group.
    """
    return list(_members(group))


def get_backend(group: str | None = None) -> str:
    """Name the backend of a group, "mccl" or "hccl"; a process has one.

    Args:
        group: None is the default group.
    """
    default()
    return str(GlobalComm.BACKEND)


def get_group_local_rank(group: str | None = None) -> int:
    """Get this process's rank inside a group.

    Args:
        group: None is the default group.
    """
    return _members(group).index(communication.get_rank(default()))


def size(group: str | None = None) -> int:
    """Count the ranks of a group.

    Args:
        group: None is the default group.
    """
    return len(_members(group))


# The names of the platform's role; the long ones are the public API, named as torch names them.
destroy = destroy_process_group
ranks = get_process_group_ranks
rank = get_group_local_rank
backend = get_backend
mark_created = mark_created_groups
