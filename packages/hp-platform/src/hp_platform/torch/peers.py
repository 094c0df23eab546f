"""Lost ranks on PyTorch: a failed collective's error becomes one that names the rank whose process has ended.

See Note [Lost ranks] in `hp_platform.failures.peers`. It needs a backend that reports the failure in the call or in
`wait()`, as gloo does. nccl and hccl on devices report it later, where the host waits for the device, or their watchdog
ends the process after the group's timeout: that is as it is without this.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hp_platform.communication.carriers import abort_carriers
from hp_platform.communication.checks import observers
from hp_platform.failures.peers import (
    Address,
    FailedRankError,
    Listener,
    LostRankError,
    find_lost,
    lost_text,
    own_host,
    tell_failure,
)
from hp_platform.platforms.launchers import break_connections

ProcessGroup = dist.ProcessGroup

PATIENCE = timedelta(seconds=5)
_OF_TRANSPORT = re.compile("gloo/transport|connect|socket|timed out|timeout|nccl|hccl|has died", re.IGNORECASE)
_lock = threading.Lock()
_here: _World | None = None


class _World:
    """Knowledge of this process about the ranks of the default group `world`."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self.listener: Listener | None = None
        self.addresses: dict[int, Address] = {}
        self.error: LostRankError | None = None
        self.store: Any = None
        self.prefix = ""
        if world.size() == 1 or dist.get_backend(world) == "fake":
            return
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):  # a store that keeps nothing
            store = c10d._get_default_store()
            # A store may serve one default group after the other.
            number = (store.add("hp_peers/arrived", 1) - 1) // world.size()
            prefix = f"hp_peers/{number}"
            try:
                listener = Listener(world.rank(), world.size(), own_host(_host_of(store)))
            except OSError:
                store.set(f"{prefix}/{world.rank()}", "")  # the others need not wait for an address
                return
            store.set(f"{prefix}/{world.rank()}", str(listener.address))
            self.store, self.prefix, self.listener = store, prefix, listener
            listener.watch(partial(_call, weakref.WeakMethod(self.break_up)))

    def meet(self, ranks: Sequence[int], patience: timedelta | None) -> None:
        """Read where ranks listen, and wait for those that have not said so."""
        missing = [rank for rank in ranks if rank not in self.addresses]
        if self.listener is None or not missing:
            return
        keys = [f"{self.prefix}/{rank}" for rank in missing]
        with contextlib.suppress(RuntimeError):  # not all have come: whoever is missing can be asked for later
            if patience is not None:
                self.store.wait(keys, patience)
            extended = self.store.has_extended_api()
            values = self.store.multi_get(keys) if extended else [self.store.get(key) for key in keys]
            addresses = {rank: value.decode() for rank, value in zip(missing, values) if value}
            self.addresses |= {rank: Address.parse(text) for rank, text in addresses.items()}

    def meet_late(self) -> None:
        """Read where the ranks listen that were not there in time, if the store still lives."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self.world.size()):
                if rank not in self.addresses and self.store.check([f"{self.prefix}/{rank}"]):
                    self.meet([rank], None)

    def blame(self, error: RuntimeError, kind: str, group: Sequence[int]) -> None:
        """Raise LostRankError if a rank was lost, else note on the error that all live."""
        if self.listener is None:
            return
        self.meet_late()
        lost = find_lost(self.listener, self.addresses, group)
        if self.listener.failed:
            self.error = FailedRankError(self.listener.failed)
            observers.append(_refuse)
            raise self.error from error
        if not lost.ranks:
            error.add_note(
                f"hp_platform: the processes of all {len(self.addresses)} ranks that could be asked live, so no rank"
                f" was lost in this {kind}: some rank was late, or issued other collectives."
            )
            return
        self.error = LostRankError(lost_text(lost, kind, group, self.world.rank()), lost.ranks)
        observers.append(_refuse)
        raise self.error from error

    def break_up(self) -> None:
        """Break this process's connections to other ranks, but those on which they tell each other who was lost."""
        if self.world is dist.group.WORLD and can_disconnect():
            abort_carriers()
            ports = {address.port for address in self.addresses.values()}
            break_connections(keep_ports=ports | _store_ports())

    def give_up(self, text: str) -> None:
        """Tell the others what this rank raised, and end the collectives of all."""
        if self.listener is not None:
            self.meet_late()
            tell_failure(self.listener, self.addresses, text)
            self.break_up()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()


def _known() -> LostRankError | None:
    """Return the loss already found in the current default group, without the last raise's traceback."""
    if _here is None or _here.error is None:
        return None
    if _here.world is not dist.group.WORLD:  # somebody else made a new one
        leave()
        return None
    return _here.error.with_traceback(None)


def _host_of(store: Any) -> str | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def _refuse(kind: str, size: int, group: Any) -> None:
    """Keep collectives from waiting for a rank that is known to be lost; an observer."""
    error = _known()
    if error is not None:
        raise error


def meet(ranks: Sequence[int], patience: timedelta | None = PATIENCE) -> None:
    """Learn where ranks of the default group listen, and let them know where this one does.

    Args:
        ranks: global ranks, each of which calls this with the same ones.
        patience: how long to wait for them; None is the store's time limit.
    """
    global _here
    world = dist.group.WORLD
    if _here is None or _here.world is not world:
        leave()
        assert world is not None
        _here = _World(world)
    _here.meet(ranks, patience)


def networks(ranks: Sequence[int]) -> list[str] | None:
    """Get the networks that ranks of the default group named; None where one of them has not said it.

    Args:
        ranks: global ranks.
    """
    known = {} if _here is None else _here.addresses
    return [known[rank].network for rank in ranks] if all(rank in known for rank in ranks) else None


def leave() -> None:
    """Stop listening; the default group is gone."""
    global _here
    if _here is not None and _here.listener is not None:
        _here.listener.close()
    if _refuse in observers:
        observers.remove(_refuse)
    _here = None


def disconnect() -> None:
    """Break the connections to the other ranks; not that to the store, from which they read where others listen."""
    abort_carriers()
    ports = _store_ports()
    leave()
    break_connections(keep_ports=ports)


def can_disconnect() -> bool:
    """Tell whether ranks that wait would hear of it."""
    return sys.platform == "linux" and dist.get_backend() == "gloo"


def _store_ports() -> set[int]:
    store: Any = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return {store.port} if isinstance(store, dist.TCPStore) else set()


def give_up(text: str) -> None:
    """Tell the others what this rank raised, and end the collectives of all."""
    if _here is not None and _here.world is dist.group.WORLD:
        _here.give_up(text)


def _leave_after_fork() -> None:
    """Close what a rank's forked child has of the listening socket, else the child would answer for it."""
    if _here is not None and _here.listener is not None:
        _here.listener.close_after_fork()
    leave()


os.register_at_fork(after_in_child=_leave_after_fork)


def raise_if_lost(error: RuntimeError, kind: str, group: ProcessGroup | Sequence[int]) -> None:
    """Raise LostRankError in place of a backend's error, where a rank was lost.

    Args:
        error: the backend's error; if all ranks live, it gets a note that says so.
        kind: the collective, as "all_gather".
        group: the group, or its global ranks.

    Raises:
        LostRankError: the processes of some ranks have ended.
    """
    if _here is None or isinstance(error, LostRankError):
        return
    if not (isinstance(error, dist.DistError) or _OF_TRANSPORT.search(str(error))):
        return
    with _lock:
        lost = _known()
        if lost is not None:
            raise lost from error
        if _here is None:
            return
        ranks = dist.get_process_group_ranks(group) if isinstance(group, ProcessGroup) else list(group)
        _here.blame(error, kind, ranks)


class Pending:
    """A collective under way, whose failure says which rank was lost.

    Args:
        work: the process group's handle.
        kind: the collective, as "all_gather".
        group: the ranks that take part.
    """

    __slots__ = ("group", "kind", "work")

    def __init__(self, work: Any, kind: str, group: ProcessGroup) -> None:
        self.work, self.kind, self.group = work, kind, group

    def wait(self) -> None:
        """Wait for the collective.

        Raises:
            LostRankError: the process of a rank has ended.
        """
        lost = _known()
        if lost is not None:  # the others may wait for each other
            raise lost
        try:
            self.work.wait()
        except RuntimeError as error:
            raise_if_lost(error, self.kind, self.group)
            raise
