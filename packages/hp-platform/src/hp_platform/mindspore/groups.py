"""MindSpore's process groups. A group is its name, a `str`."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindspore import communication
from mindspore._c_expression import GroupOptions as OwnOptions
from mindspore.communication import GlobalComm, management
from mindspore.mint import distributed as dist

from hp_platform.devices import devices
from hp_platform.groups import GroupOptions

MCCL, HCCL = "mccl", "hccl"
TIMEOUTS = False

# How long mccl waits in an operation: as torch's gloo, since its own 30 s are less than a slow step of one rank.
DEFAULT_TIMEOUT = timedelta(minutes=30)
_MEET = timedelta(seconds=60)
_TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"

_members: dict[str, tuple[int, ...]] = {}
_destroyed = False


def initialize(
    backend: str | None,
    init_method: str | None,
    timeout: timedelta | None,
    world_size: int,
    rank: int,
    store: Any,
    pg_options: Any,
    device_id: int | None,
) -> None:
    """Make the default group, under msrun without arguments."""
    expected = HCCL if devices.kind == "npu" else MCCL
    if backend not in (None, expected):
        raise ValueError(f"backend={backend!r}, but on {devices.kind} MindSpore supports only {expected!r}.")
    if pg_options is not None:
        raise ValueError(
            "pg_options: MindSpore's default group has no options: pass them to split_group for fewer ranks, or set"
            " HCCL_BUFFSIZE."
        )
    if devices.kind == "cpu" or device_id is not None:
        devices.set_device(device_id or 0)
    if expected == HCCL:
        dist.init_process_group(HCCL, init_method, timeout, world_size, rank, store)
    else:
        _init_mccl(init_method, timeout or DEFAULT_TIMEOUT, world_size, rank, store)


def lone_store() -> Any:
    """Make a store for a world of one."""
    return local_store(1, None)[0]


def local_store(world_size: int, port: int | None) -> tuple[Any, int]:
    """Make a store at a free port, or join one."""
    if port is not None:
        return dist.TCPStore("127.0.0.1", port, world_size, False, _MEET, wait_for_workers=False), port
    # The store wants a number. One that is bound with this option, and not listened on, is nobody else's but may be
    # bound again with the same option, as the store does.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        number = reserved.getsockname()[1]
        return dist.TCPStore("127.0.0.1", number, world_size, True, _MEET, wait_for_workers=False), number


def _init_mccl(init_method: str | None, timeout: timedelta, world_size: int, rank: int, store: Any | None) -> None:
    """Do what `mint.distributed.init_process_group` does, which refuses every backend but hccl."""
    if _destroyed:
        raise RuntimeError("MindSpore cannot initialize mccl a second time in a process: restart the ranks.")
    os.environ.setdefault(_TIMEOUT_VARIABLE, str(max(1, round(timeout.total_seconds()))))
    if store is None and init_method is None:
        if "MS_ROLE" not in os.environ:
            raise RuntimeError(
                "No rendezvous is configured: start this program with msrun (as in: msrun --worker_num=4 "
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


def world() -> str | None:
    """Get the default group."""
    return GlobalComm.WORLD_COMM_GROUP if dist.is_initialized() else None


def create(
    ranks: tuple[int, ...], number: int, timeout: timedelta | None, pg_options: Any, group_desc: str | None
) -> str:
    """Make a group, under a name of its own: MindSpore can't make a destroyed group's name again."""
    own = own_options(pg_options, str(GlobalComm.BACKEND))
    digest = hashlib.sha1(f"{ranks} {number}".encode(), usedforsecurity=False).hexdigest()
    group = f"hp_{len(ranks)}_{digest}"
    communication.create_group(group, list(ranks), own)
    _members[group] = ranks
    return group


def destroy(group: str | None) -> None:
    """Destroy one group, or all."""
    global _destroyed
    if group is None:
        _destroyed = _destroyed or str(GlobalComm.BACKEND) == MCCL
        _members.clear()
        dist.destroy_process_group()
        return
    _members.pop(group, None)
    devices.synchronize()
    communication.destroy_group(group)


def members(group: str) -> tuple[int, ...]:
    """Get the ranks of a group; asking MindSpore costs more than a look-up."""
    ranks = _members.get(group)
    if ranks is None:
        ranks = _members[group] = tuple(communication.get_process_group_ranks(group))
    return ranks


def rank(group: str) -> int:
    """Get this process's rank inside a group."""
    return members(group).index(communication.get_rank(GlobalComm.WORLD_COMM_GROUP))


def size(group: str) -> int:
    """Count the ranks."""
    return len(members(group))


def backend(group: str) -> str:
    """Name the backend; a process has one."""
    return str(GlobalComm.BACKEND)


def is_group(value: object) -> bool:
    """Tell a group's name from the empty one that MindSpore returns on failure."""
    return isinstance(value, str) and bool(value)


def meet(ranks: Sequence[int], patiently: bool) -> None:
    """Do nothing: MindSpore raises nothing where a rank is lost, so nobody needs to be known."""


def networks(ranks: Sequence[int]) -> list[str] | None:
    """Know of none; see `meet`."""
    return None


def leave() -> None:
    """Do nothing; see `meet`."""


def can_disconnect() -> bool:
    """Tell that ranks which wait would not hear of it: mccl goes on waiting."""
    return False


def disconnect() -> None:
    """Do nothing; see `can_disconnect`."""


def give_up(text: str) -> None:
    """Do nothing; see `can_disconnect`."""


def own_options(options: Any, backend: str) -> Any:
    """Translate GroupOptions into MindSpore's own; whatever else is given passes as it is.

    Args:
        options: GroupOptions, MindSpore's own, or None.
        backend: "hccl" or "mccl".

    Raises:
        ValueError: MindSpore's groups have no such option.
    """
    if not isinstance(options, GroupOptions):
        return options
    if options.timeout is not None:
        raise ValueError(f"timeout={options.timeout!r}: MindSpore does not support a timeout per group, leave it out.")
    if options.high_priority:
        raise ValueError("high_priority=True: MindSpore chooses the streams of its groups itself, so leave it out.")
    if options.buffer_size is None:
        return None
    if backend != "hccl":
        raise ValueError(f"buffer_size={options.buffer_size} is an option of hccl; the group's backend is {backend}.")
    native = OwnOptions()
    native.hccl_config = {"hccl_buffer_size": options.buffer_size}
    return native
