"""Process groups, one for each set of ranks: a process never makes two communicators for one set."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hp_platform.communication.carriers import any_broken, close_carrier, close_carriers, open_carrier
from hp_platform.communication.checks import (
    check_child_backend,
    check_options,
    check_ranks,
    check_same_world,
    check_timeout,
    choose_parent,
    no_default_group,
    read_split_ranks,
)
from hp_platform.platforms.launchers import half_launched, launch_command, launcher_place
from hp_platform.platforms.ports import platform_name
from hp_platform.port import Group, port

_log = logging.getLogger("hp_platform")


class _Registry:
    """The groups of this process. They live as long as the default group that they were made under.

    Attributes:
        world: that default group.
        by_ranks: each group by its ascending global ranks.
        options: those that each was created with; a group that the framework created is added when first requested.
        created: how often a group of these ranks was created; part of the new group's name.
        numbers: of each group that was created here, among those of its ranks; the default group's is 0.
        broken: this process has broken its connections to the other ranks.
    """

    def __init__(self) -> None:
        self.world: Group = None
        self.by_ranks: dict[tuple[int, ...], Group] = {}
        self.options: dict[tuple[int, ...], Any] = {}
        self.created: Counter[tuple[int, ...]] = Counter()
        self.numbers: dict[Group, int] = {}
        self.broken = False

    def clear(self) -> None:
        """Forget all groups; the default one is gone."""
        close_carriers()
        self.world, self.broken = None, False
        for entries in (self.by_ranks, self.options, self.created, self.numbers):
            entries.clear()
        port().groups.leave()


_registry = _Registry()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: Any | None = None,
) -> None:
    """Initialise the default process group, as `torch.distributed.init_process_group` does.

    A second call that agrees with the group that is there does nothing. A process that no launcher has started, and
    that is told neither ranks nor where they meet, becomes a world of one rank, in a notebook or a debugger; the logger
    `hp_platform` says so once. Tasks of srun meet without arguments, as those of torchrun and msrun do.

    Args:
        backend: None picks nccl, hccl or gloo (PyTorch), hccl or mccl (MindSpore) by the kind of device in use.
        init_method: where the ranks meet, as "tcp://127.0.0.1:29500"; by default the environment that torchrun, msrun
            or srun sets.
        timeout: how long an operation may take; by default the backend's own, on mccl 30 minutes (MindSpore's own 30 s
            are the environment variable MS_CPU_COMM_OP_TIMEOUT's, which comes first).
        world_size: number of ranks, needed with `store`, on MindSpore with `init_method` too.
        rank: this process's rank, needed where `world_size` is.
        store: where the ranks meet, the framework's `TCPStore` or another of its stores, instead of `init_method`.
        group_name: ignored, as torch does.
        pg_options: GroupOptions, or the backend's own; MindSpore's default group has none.
        device_id: the device that this process will use; by default what the launcher says.

    Raises:
        RuntimeError: the default group exists with another backend, size or rank; no rendezvous is configured; or
            mccl's default group was destroyed, and MindSpore cannot initialize it twice in a process.
        ValueError: the framework doesn't have the backend on this kind of device, or the group has no such options.
    """
    own = port().groups
    if own.world() is None:
        if init_method is None and store is None and world_size == -1 and rank == -1:
            place = launcher_place()
            if place is not None and place.meeting is not None:
                init_method, rank, world_size = "tcp://{}:{}".format(*place.meeting), place.rank, place.world_size
            elif place is None and not half_launched():
                store, rank, world_size = own.lone_store(), 0, 1
                _say_alone()
        own.initialize(backend, init_method, timeout, world_size, rank, store, pg_options, device_id)
        everyone = tuple(sorted(own.members(default_group())))
        known_groups()
        _registry.options[everyone] = pg_options
        own.meet(everyone, True)
        open_carrier(default_group())
        return
    world = default_group()
    here: dict[str, Any] = {"backend": own.backend(world), "world_size": own.size(world), "rank": own.rank(world)}
    requested = {"backend": backend or here["backend"]}
    requested["world_size"] = here["world_size"] if world_size == -1 else world_size
    requested["rank"] = here["rank"] if rank == -1 else rank
    check_same_world(here, requested)
    everyone = tuple(sorted(own.members(world)))
    check_options(pg_options, _registry.options.get(everyone), everyone)
    own.meet(everyone, False)


def init_on_this_machine(
    rank: int,
    world_size: int,
    announce: Callable[[int], None],
    port_of_rank_0: Callable[[], int],
    backend: str | None = None,
) -> None:
    """Initialise the default group of ranks that one process of this machine has started.

    Args:
        rank: this rank.
        world_size: number of ranks.
        announce: tells the other ranks the port that rank 0 listens on.
        port_of_rank_0: waits for what rank 0 has announced.
        backend: as `init_process_group` takes it.
    """
    store, number = port().groups.local_store(world_size, None if rank == 0 else port_of_rank_0())
    if rank == 0:
        announce(number)
    init_process_group(backend, store=store, rank=rank, world_size=world_size)


def hold_meeting(world_size: int) -> tuple[Any, int]:
    """Make the place where ranks of this machine meet, in a process that is none of them.

    Args:
        world_size: number of ranks.

    Returns:
        What keeps the place, for as long as it lives: without it, whoever waits there fails at once. And its port.
    """
    return port().groups.local_store(world_size, None)


def meet_on_this_machine(rank: int, world_size: int, number: int) -> None:
    """Initialise the default group of ranks that meet at a port of `hold_meeting`.

    Args:
        rank: this rank.
        world_size: number of ranks.
        number: the port.
    """
    store, _ = port().groups.local_store(world_size, number)
    init_process_group(store=store, rank=rank, world_size=world_size)


@functools.cache
def _say_alone() -> None:
    """Say once that this process is a world of one."""
    command = launch_command(platform_name(), 2)
    _log.warning("note: no launcher started this process, so it is the only rank; %s PROGRAM starts two", command)


def destroy_process_group(group: Group | None = None) -> None:
    """Destroy one group, or with None all groups and the default one.

    Args:
        group: a group that was made here or by the framework.
    """
    own = port().groups
    if group is None or group == own.world():
        _registry.clear()
        own.destroy(None)
        groups_ended()
        return
    for key in [key for key, member in _registry.by_ranks.items() if member == group]:
        del _registry.by_ranks[key]
        _registry.options.pop(key, None)
    _registry.numbers.pop(group, None)
    close_carrier(group)
    own.destroy(group)
    groups_ended()


def can_disconnect() -> bool:
    """Tell whether `disconnect` reaches ranks that wait in a collective: over gloo, on Linux."""
    return is_initialized() and port().groups.can_disconnect()


def disconnect() -> None:
    """Break this process's connections to the other ranks: their collectives fail, wherever they wait for it.

    A backend tells of a rank that has ended to those who wait for that rank alone. One of them that goes on without
    another collective would hold up those who wait for it in turn.
    """
    _registry.broken = True
    port().groups.disconnect()


def give_up(text: str) -> None:
    """Tell all ranks what this one raised, and end the collectives that any of them waits in: FailedRankError.

    For a rank that cannot take part any more in what others wait for. All process groups are broken afterwards. It may
    be called from another thread than that which waits. Where `can_disconnect` is false it does nothing.

    Args:
        text: what the others raise.
    """
    if can_disconnect():
        _registry.broken = True
        port().groups.give_up(text)


def is_broken() -> bool:
    """Return True where groups communicate no more: after `disconnect`, `give_up`, or what a carrier could not do."""
    return _registry.broken or any_broken()


def default_group() -> Group:
    """Get the default group.

    Raises:
        RuntimeError: there is none yet.
    """
    world = port().groups.world()
    if world is None:
        raise no_default_group()
    return world


def is_initialized() -> bool:
    """Tell whether the default group exists."""
    return port().groups.world() is not None


def known_groups() -> dict[tuple[int, ...], Group]:
    """Get the groups that this process is in, by their ranks.

    Raises:
        RuntimeError: there is no default group yet.
    """
    world = default_group()
    if world != _registry.world:
        _registry.clear()
        _registry.world = world
        _registry.by_ranks[tuple(sorted(port().groups.members(world)))] = world
        groups_ended()
    return _registry.by_ranks


def new_group(ranks: Sequence[int], pg_options: Any | None = None) -> Group:
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
    if key not in known_groups():
        check_ranks(key, rank(), size())
    return _of(key, pg_options)


def _of(
    key: tuple[int, ...], pg_options: Any, timeout: timedelta | None = None, group_desc: str | None = None
) -> Group:
    """Get the group of ascending ranks that this process is among, and compare what it was made with."""
    groups, own = known_groups(), port().groups
    if key not in groups:
        groups[key] = _make(key, pg_options, timeout, group_desc)
        _registry.options[key] = pg_options
        own.meet(key, False)
    elif key not in _registry.options:  # the framework made it
        _registry.options[key] = None
        own.meet(key, False)
        open_carrier(groups[key])
    check_options(pg_options, _registry.options[key], key)
    return groups[key]


def _make(key: tuple[int, ...], pg_options: Any, timeout: timedelta | None, group_desc: str | None) -> Group:
    number = _registry.created[key]
    _registry.created[key] += 1
    group = port().groups.create(key, number, timeout, pg_options, group_desc)
    _registry.numbers[group] = number + (len(key) == size(_registry.world))
    open_carrier(group)
    return group


def number_of(group: Group) -> int | None:
    """Return a group's number among those of its ranks, on all of them alike; None of one that was made elsewhere."""
    return 0 if group == _registry.world else _registry.numbers.get(group)


def second_group(ranks: Sequence[int], timeout: timedelta | None = None) -> Group:
    """Make another group of a set of ranks, whose collectives may run beside those of the first.

    Only the members call it, each alike; it is not the one that `new_group` returns.

    Args:
        ranks: global ranks, this one among them.
        timeout: how long an operation in it may take; by default the backend's.
    """
    known_groups()
    return _make(tuple(sorted(ranks)), None, timeout, None)


def split_group(
    parent: Group | None = None,
    split_ranks: int | Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
    *,
    parent_pg: Group | None = None,
) -> Group | None:
    """Get this rank's child of a group, as `torch.distributed.split_group`; one child for one set of ranks.

    Args:
        parent: the group to split; None is the default group.
        split_ranks: for each child its ranks inside the parent; no rank in two children. A number is the size of each
            child, of consecutive ranks.
        timeout: how long an operation in a new child may take; by default the backend's. MindSpore's groups have none
            of their own.
        pg_options: GroupOptions for a new child, or the backend's own.
        group_desc: description of a new child, shown in torch's logs.
        backend: None, or the parent's, which a child always has.
        parent_pg: torch's name of `parent`.

    Returns:
        The child that holds this rank, None if no child does.

    Raises:
        ValueError: `split_ranks` is empty, its ranks are doubled or not in the parent, the child exists already, made
            with other options, or a `timeout` on MindSpore.
        TypeError: `split_ranks` is not a list of lists.
    """
    check_timeout(timeout, port().groups.TIMEOUTS)
    parent = choose_parent(parent, parent_pg)
    members = get_process_group_ranks(parent)
    children = read_split_ranks(split_ranks, len(members))
    check_child_backend(backend, get_backend(parent))
    this_rank = rank()
    for ranks_in_parent in children:
        key = tuple(sorted(members[index] for index in ranks_in_parent))
        if this_rank in key:
            return _of(key, pg_options, timeout, group_desc)
    return None


def mark_created_groups(groups: Group | Iterable[Group]) -> None:
    """Register groups that were created elsewhere, so that the same ranks get them and no second communicator.

    A set of ranks that already has a group keeps the one it has.

    Args:
        groups: a group, or several; what a framework returns to ranks outside of a group is passed over.
    """
    registered, own = known_groups(), port().groups
    for group in [groups] if own.is_group(groups) or isinstance(groups, str) else groups:
        if own.is_group(group):
            registered.setdefault(tuple(sorted(own.members(group))), group)


def get_process_group_ranks(group: Group | None = None) -> list[int]:
    """List the global ranks of a group, in the order of their ranks inside it.

    Args:
        group: None is the default group.
    """
    return list(port().groups.members(default_group() if group is None else group))


def get_backend(group: Group | None = None) -> str:
    """Name the backend of a group, such as "gloo".

    Args:
        group: None is the default group.
    """
    return port().groups.backend(default_group() if group is None else group)


def get_group_local_rank(group: Group | None = None) -> int:
    """Get this process's rank inside a group.

    Args:
        group: None is the default group.
    """
    return port().groups.rank(default_group() if group is None else group)


def own_rank() -> int:
    """Return this process's global rank, 0 where there is no process group."""
    return get_group_local_rank() if is_initialized() else 0


def size(group: Group | None = None) -> int:
    """Count the ranks of a group.

    Args:
        group: None is the default group.
    """
    return port().groups.size(default_group() if group is None else group)


# The names of the platform's role; the long ones are the public API, named as torch names them.
destroy = destroy_process_group
ranks = get_process_group_ranks
rank = get_group_local_rank
backend = get_backend
mark_created = mark_created_groups


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of a new process group; a backend refuses those it does not support.

    Attributes:
        timeout: how long an operation may take; None is the backend's default. PyTorch's groups only.
        buffer_size: MB of device memory that hccl communicates through; None is its default (200). hccl only.
        high_priority: communicate on a stream of high priority. PyTorch's hccl and nccl.

    Raises:
        ValueError: `buffer_size` is below 1.
    """

    timeout: timedelta | None = None
    buffer_size: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < 1:
            raise ValueError(f"buffer_size, in MB, must be at least 1, got {self.buffer_size}.")


_forget: list[Callable[[], object]] = []


def when_groups_end(forget: Callable[[], object]) -> Callable[[], object]:
    """Register a function that forgets process groups; a decorator.

    It runs when `destroy_process_group` has destroyed some, and when the first group under a new default group is asked
    for: then this process may have another rank. It must ask for no group itself.

    Args:
        forget: called without arguments.
    """
    _forget.append(forget)
    return forget


def groups_ended() -> None:
    """Call what `when_groups_end` registered."""
    for forget in _forget:
        forget()
