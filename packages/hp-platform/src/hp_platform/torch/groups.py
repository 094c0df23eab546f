"""PyTorch's process groups.

Note [Names of groups]: a group's members meet under its name, a prefix in the default group's store. `new_group(...,
use_local_synchronization=True)` salts the name with the number of groups that this process is in, so members that are
in different numbers of groups (a 3-d mesh, uneven stages) wait for each other under different names, forever. Without
local synchronization every rank of the world has to take part. Here the name is made of the ranks and of how
often this set was asked for, which all members know.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hp_platform.devices import devices
from hp_platform.groups import GroupOptions
from hp_platform.platforms.launchers import wait_for_threads
from hp_platform.torch import peers
from hp_platform.torch.peers import can_disconnect, disconnect, give_up, leave

__all__ = ["can_disconnect", "disconnect", "give_up", "leave"]

atexit.register(wait_for_threads, "pt_gloo_runloop")  # Note [Threads at the end] in `hp_platform.failures.listening`
ProcessGroup = dist.ProcessGroup
TIMEOUTS = True


def initialize(
    backend: str | None,
    init_method: str | None,
    timeout: timedelta | None,
    world_size: int,
    rank: int,
    store: Any,
    pg_options: Any,
    device_id: torch.device | int | None,
) -> None:
    """Make the default group."""
    chosen = backend or dist.get_default_backend_for_device(devices.kind)
    if init_method is None and store is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        store, rank, world_size = _restarted_store(timeout_of(pg_options, timeout))
    dist.init_process_group(
        chosen,
        init_method=init_method,
        timeout=timeout_of(pg_options, timeout),
        world_size=world_size,
        rank=rank,
        store=store,
        pg_options=backend_options(pg_options, chosen),
        device_id=device_id,
    )
    restore_priority(pg_options, _world(), chosen)


def lone_store() -> Any:
    """Make a store for a world of one, without a port."""
    return dist.HashStore()


def local_store(world_size: int, port: int | None) -> tuple[Any, int]:
    """Make a store at a free port, or join one."""
    store = dist.TCPStore("127.0.0.1", port or 0, world_size, is_master=port is None, wait_for_workers=False)
    return store, store.port


def _restarted_store(timeout: timedelta | None) -> tuple[Any, int, int]:
    """Return a store of this restart alone, this rank and their number.

    torchrun keeps one store for all restarts: with the keys of the ranks before, others would connect to those.
    """
    at = os.environ
    if at.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0's own, which is new
        return None, -1, -1
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    shared = dist.TCPStore(at["MASTER_ADDR"], int(at["MASTER_PORT"]), is_master=False, **options)
    return (
        dist.PrefixStore(f"restart-{at['TORCHELASTIC_RESTART_COUNT']}", shared),
        int(at["RANK"]),
        int(at["WORLD_SIZE"]),
    )


def world() -> ProcessGroup | None:
    """Get the default group."""
    return dist.group.WORLD if dist.is_available() else None


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def create(
    ranks: tuple[int, ...], number: int, timeout: timedelta | None, pg_options: Any, group_desc: str | None
) -> ProcessGroup:
    """Make a group with the backend of the default one."""
    world = _world()
    backend: Any
    backend, store = c10d._world.pg_map[world]
    name: Any = hashlib.sha1(f"{ranks} {number}".encode(), usedforsecurity=False).hexdigest()
    own_options = backend_options(pg_options, str(backend))
    # A device that the world is bound to makes torch split the world's communicator, for which nccl waits for all
    # ranks of the world, and only the members are here.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            backend,
            store,
            name,
            backend_options=own_options,
            timeout=timeout_of(pg_options, timeout) or c10d._get_default_timeout(backend),
            group_desc=group_desc,
        )
    except RuntimeError as error:
        peers.raise_if_lost(error, "new_group", ranks)
        raise
    finally:
        world.bound_device_id = bound
    assert isinstance(group, ProcessGroup), "this process is a member"
    restore_priority(pg_options, group, str(backend))
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def destroy(group: ProcessGroup | None) -> None:
    """Destroy one group, or all."""
    dist.destroy_process_group(group)


def members(group: ProcessGroup) -> list[int]:
    """List the global ranks in the order of their ranks inside the group."""
    return dist.get_process_group_ranks(group)


def rank(group: ProcessGroup) -> int:
    """Get this process's rank inside a group."""
    return group.rank()


def size(group: ProcessGroup) -> int:
    """Count the ranks."""
    return group.size()


def backend(group: ProcessGroup) -> str:
    """Name the backend."""
    return str(dist.get_backend(group))


def is_group(value: object) -> bool:
    """Tell a group from what torch returns to ranks outside of one."""
    return isinstance(value, ProcessGroup)


def meet(ranks: Sequence[int], patiently: bool) -> None:
    """Learn where the ranks of a group listen."""
    peers.meet(ranks, None if patiently else peers.PATIENCE)


def networks(ranks: Sequence[int]) -> list[str] | None:
    """Get the networks that global ranks named when they met."""
    return peers.networks(ranks)


def backend_options(options: Any, backend: str) -> Any:
    """Translate GroupOptions into the backend's own; whatever else is given passes as it is.

    Args:
        options: GroupOptions, the backend's own options, or None.
        backend: the backend's name.

    Raises:
        ValueError: the backend has no such option.
    """
    if not isinstance(options, GroupOptions):
        return options
    if options.buffer_size is not None and backend != "hccl":
        raise ValueError(f"buffer_size={options.buffer_size} is an option of hccl; the group's backend is {backend}.")
    if options.high_priority and backend not in ("hccl", "nccl"):
        raise ValueError(f"high_priority=True is an option of hccl and nccl; the group's backend is {backend}.")
    if backend == "nccl":
        return dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority)
    if backend != "hccl":
        return None
    import torch_npu  # type: ignore[import-not-found]

    native = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    native.is_high_priority_stream = options.high_priority
    if options.buffer_size is not None:
        native.hccl_config = {"hccl_buffer_size": options.buffer_size}
    return native


def timeout_of(options: Any, timeout: timedelta | None) -> timedelta | None:
    """Choose the time limit: the argument of that name, else the options'."""
    return options.timeout if timeout is None and isinstance(options, GroupOptions) else timeout


def restore_priority(options: Any, group: dist.ProcessGroup, backend: str) -> None:
    """Ask hccl for the priority again once the group is made; its streams are made at its first operation.

    torch_npu resets it while it makes the group.

    Args:
        options: the requested ones.
        group: the new group.
        backend: its backend's name.
    """
    if isinstance(options, GroupOptions) and options.high_priority and backend == "hccl":
        cast(Any, group._get_backend(torch.device("npu"))).options.is_high_priority_stream = True
