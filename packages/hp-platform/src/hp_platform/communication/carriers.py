"""Carriers: other ways than the backend's for a group's collectives and messages, as memory that a host's ranks share.

Note [Carriers]
    A package offers one by an entry point of the group `hp_platform.carriers`; hp-onesided does. Its function is called
    by all ranks of each new group, and returns a carrier on all of them or on none. Then the checked collectives ask it
    whether it takes a tensor, and issue there what it takes, messages between two ranks too; everything else goes
    through the backend as before. Without such a package nothing is asked. HYPER_PARALLEL_TRANSPORT=backend, on all
    ranks, leaves all to the backend.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hp_platform.platforms.ports import SettingError
from hp_platform.port import Group, Handle, Tensor, port

TRANSPORT = "HYPER_PARALLEL_TRANSPORT"
ENTRY_POINTS = "hp_platform.carriers"
_CHOICES = ("auto", "backend")
_RECORD = 1024  # bytes in which a rank says something while a carrier is opened
_carriers: dict[Group, Carrier | None] = {}
_chosen = "auto"


class Carrier(Protocol):
    """Collectives of one group. What ranks call alike is taken by all of them, or by none.

    Attributes:
        issued: collectives that were begun.
    """

    issued: int

    def takes(self, kind: str, tensor: Tensor | None, op: str) -> bool:
        """Tell whether it does a collective.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "barrier"; or "send" and
                "recv", which are taken both or neither.
            tensor: contiguous; None for a barrier.
            op: of a reduction: "sum", "avg", "min", "max" or "product".
        """
        ...

    def start(
        self,
        kind: str,
        output: Tensor | None,
        tensor: Tensor | None,
        op: str,
        received: Sequence[int],
        sent: Sequence[int],
        root: int,
        async_op: bool,
    ) -> Handle | None:
        """Do a collective that it takes, or begin it.

        Args:
            kind: as `takes` was asked.
            output: where the result lands; the tensor itself, where a collective is in place.
            tensor: the input.
            op: of a reduction.
            received: rows of an all-to-all from each rank; empty are equal numbers.
            sent: rows to each.
            root: the sender of a broadcast.
            async_op: return a handle at once, and complete without any rank's `wait`.

        Raises:
            RuntimeError: a rank has ended, did not come in time, or called something else; also of the handle's `wait`.
        """
        ...

    def message(self, tensor: Tensor, peer: int, kind: str, tag: int, async_op: bool) -> Handle | None:
        """Send a tensor that it takes, or receive one, or begin to.

        Args:
            tensor: contiguous.
            peer: the other rank, in the group.
            kind: "send" or "recv".
            tag: tells messages between the same two ranks apart.
            async_op: return a handle at once.

        Raises:
            RuntimeError: the peer has ended, did not come in time, or sent something else; also of the handle's `wait`.
        """
        ...

    def is_broken(self) -> bool:
        """Tell whether a collective failed, after which each of the group's does."""
        ...

    def abort(self) -> None:
        """End what any rank of the group waits in; from any thread."""
        ...

    def close(self) -> None:
        """Finish what was issued, and let go of all memory."""
        ...


Open = Callable[[Group, Callable[[bytes], list[bytes]]], Carrier | None]
"""What an entry point names: called with the group and a function by which its ranks tell each other short texts."""


def carrier_of(group: Group) -> Carrier | None:
    """Get a group's carrier; None where the backend does everything.

    Args:
        group: of this process.
    """
    return _carriers.get(group) if _chosen == "auto" else None


def set_transport(transport: str) -> None:
    """Choose what collectives go through from here on, in groups that there are too; all ranks call it alike.

    Args:
        transport: "auto" asks carriers, where HYPER_PARALLEL_TRANSPORT does not say otherwise; "backend" asks none.

    Raises:
        ValueError: another one.
    """
    global _chosen
    if transport not in _CHOICES:
        raise ValueError(f"set_transport: {transport!r} is unknown. Choose one of: {', '.join(_CHOICES)}.")
    _chosen = transport


def run_unobserved(kind: str, output: Tensor, tensor: Tensor, op: str, group: Group) -> None:
    """Do a collective that is a part of another one, by the group's carrier or its backend; observers don't see it.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all" of equal parts.
        output: where the result lands; of an all-reduce the tensor itself.
        tensor: the input.
        op: of a reduction: "sum", "min", "max" or "product".
        group: whose ranks all call this.
    """
    carrier = carrier_of(group)
    if carrier is not None and carrier.takes(kind, tensor, op):
        work = carrier.start(kind, output, tensor, op, (), (), 0, False)
    elif kind == "all_reduce":
        work = port().collectives.all_reduce(tensor, op, group, False)
    elif kind == "all_gather":
        work = port().collectives.all_gather(output, tensor, group, False)
    elif kind == "all_to_all":
        work = port().collectives.all_to_all(output, tensor, [], [], group, False)
    else:
        work = port().collectives.reduce_scatter(output, tensor, op, group, False)
    if work is not None:
        work.wait()


def open_carrier(group: Group) -> None:
    """Look for a carrier of a group, which has none so far; all its ranks call this.

    Args:
        group: just made, or just registered.

    Raises:
        SettingError: HYPER_PARALLEL_TRANSPORT has an unknown value.
    """
    setting = os.environ.get(TRANSPORT) or _CHOICES[0]
    if setting not in _CHOICES:
        raise SettingError(f"{TRANSPORT}={setting!r} is unknown. Choose one of: {', '.join(_CHOICES)}.")
    if setting == "backend" or group in _carriers or port().groups.size(group) == 1:
        return
    _carriers[group] = None
    for open_one in _installed():
        carrier = open_one(group, functools.partial(_share, group))
        if carrier is not None:
            _carriers[group] = carrier
            return


def close_carrier(group: Group) -> None:
    """Let go of a group's carrier, before the group ends.

    Args:
        group: it may have none.
    """
    carrier = _carriers.pop(group, None)
    if carrier is not None:
        carrier.close()


@atexit.register
def close_carriers() -> None:
    """Let go of all carriers."""
    for group in list(_carriers):
        close_carrier(group)


def abort_carriers() -> None:
    """End what the ranks of all groups wait in, as the end of their connections does for the backend's collectives."""
    for carrier in list(_carriers.values()):
        if carrier is not None:
            carrier.abort()


@functools.cache
def _installed() -> tuple[Open, ...]:
    return tuple(each.load() for each in importlib.metadata.entry_points(group=ENTRY_POINTS))


def any_broken() -> bool:
    """Tell whether a group of this process is of no use any more."""
    return any(carrier is not None and carrier.is_broken() for carrier in _carriers.values())


def _share(group: Group, payload: bytes) -> list[bytes]:
    """Return what each rank says, by the backend, seen by no observer: it is no collective of the program's."""
    if len(payload) > _RECORD - 2:
        raise ValueError(f"a carrier's ranks tell each other at most {_RECORD - 2} bytes, got {len(payload)}.")
    own, size = port().collectives, port().groups.size(group)
    record = len(payload).to_bytes(2, "little") + payload.ljust(_RECORD - 2, b"\0")
    output = own.from_bytes(bytes(size * _RECORD), group)
    work = own.all_gather(output, own.from_bytes(record, group), group, False)
    if work is not None:
        work.wait()
    data = own.to_bytes(output)
    records = [data[at : at + _RECORD] for at in range(0, len(data), _RECORD)]
    return [each[2 : 2 + int.from_bytes(each[:2], "little")] for each in records]


_of_parent: list[Any] = []
"""Carriers of the process that this one was forked from: neither used here nor closed."""


def _forget_after_fork() -> None:
    _of_parent.extend(_carriers.values())
    _carriers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
