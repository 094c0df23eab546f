"""Collectives and messages of a group whose ranks share a host, over memory that they share: hp-platform's Carrier."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from hp_onesided.carriers.messages import Message, Messages
from hp_onesided.cores.core import Core, Team
from hp_onesided.cores.processes import release
from hp_onesided.cores.waiting import Failure, WaitError
from hp_onesided.planning import steps
from hp_onesided.planning.headers import REDUCED, Call, disagreement, reduction
from hp_onesided.port import Tensor, port
from hp_platform.extend import process_state

_log = logging.getLogger("hp_onesided")
PATIENCE = 10.0
"""Seconds that a group's end waits for what was issued and nobody waited for."""
_PROGRAMS = 1024
"""Programs that a group keeps; when it has as many, it forgets them all."""
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_MESSAGES = ("send", "recv")


class SharedMemory:
    """The collectives and messages of one group; a `hp_platform.communication.carriers.Carrier`.

    Args:
        core: that runs them.
        team: the ranks, as the core has them.
        members: their global ranks.
        messages: between two of them.

    Attributes:
        issued: collectives and messages that were begun.
    """

    def __init__(self, core: Core, team: Team, members: Sequence[int], messages: Messages) -> None:
        self._core, self._team, self._members, self._messages = core, team, members, messages
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._kept: dict[int, Any] = {}
        self._last = self.issued = 0
        self._broken = ""  # what every call says from then on
        port()  # found here, and not in a collective

    def takes(self, kind: str, tensor: Tensor | None, op: str) -> bool:
        """Tell whether a collective of such a tensor goes through shared memory."""
        if tensor is None:
            return True
        if kind in _MESSAGES:
            return port().stored_dtype(tensor) is not None
        dtype = port().dtype(tensor)
        return dtype is not None and (kind not in _REDUCTIONS or dtype in REDUCED)

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
    ) -> Pending | None:
        """Do a collective here, or issue it to the group's thread."""
        if tensor is None or output is None:
            key: tuple[Any, ...] = (kind,)
            target = source = 0
        else:
            own = port()
            target, source = own.address(output), own.address(tensor)
            if kind == "all_to_all":
                size = len(self._members)
                key = (
                    kind,
                    own.dtype(tensor),
                    op,
                    root,
                    0,
                    _bytes_of(tensor, sent, size),
                    _bytes_of(output, received, size),
                )
            else:
                nbytes = output.nbytes if kind == "reduce_scatter" else tensor.nbytes
                key = (kind, own.dtype(tensor), op, root, nbytes)
        prepared = self._programs.get(key)
        if prepared is None:
            prepared = self._prepare(key)
        self.issued += 1
        with port().seen(f"hp_onesided:{kind}") or nullcontext():
            return self._go(kind, prepared, output, tensor, target, source, async_op)

    def _go(
        self, kind: str, prepared: Any, output: Any, tensor: Any, target: int, source: int, async_op: bool
    ) -> Pending | None:
        if async_op:
            return self._issue(kind, prepared, output, tensor, target, source)
        try:
            self._core.run(prepared, target, source)
        except WaitError as error:
            raise self._failed(error, kind) from None
        return None

    def message(self, tensor: Tensor, peer: int, kind: str, tag: int, async_op: bool) -> PendingMessage | None:
        """Send a tensor to a rank of the group, or receive one, or begin to."""
        own = port()
        dtype = own.stored_dtype(tensor)
        assert dtype is not None, "asked before"
        if not own.is_plain(tensor):  # the other rank can't know
            raise TypeError(f"{kind}: takes a plain tensor, got {type(tensor).__name__}; take its local values")
        if self._broken:
            raise RuntimeError(self._broken)
        self.issued += 1
        message = Message(kind == "send", peer, own.address(tensor), tensor.nbytes, dtype, tag, tensor)
        with own.seen(f"hp_onesided:{kind}") or nullcontext():
            pending = PendingMessage(self, message)
            try:
                self._messages.begin(message)
            except (WaitError, OSError) as error:
                raise self._failed(error, kind) from None
            if async_op:
                return pending
            pending.wait()
        return None

    def is_message_done(self, message: Message) -> bool:
        """Tell whether a message has ended, well or not."""
        try:
            return self._messages.is_done(message) or bool(self._broken)
        except (WaitError, OSError):  # whoever waits raises it
            return True

    def finish_message(self, message: Message) -> None:
        """Wait for a message.

        Raises:
            RuntimeError: it can't be done.
        """
        try:
            self._messages.wait(message)
        except (WaitError, OSError) as error:
            raise self._failed(error, "send" if message.sending else "recv") from None
        if message.problem:
            rank = self._members[message.peer]
            raise RuntimeError(f"hp_onesided: rank {rank} {message.problem} (tag {message.tag})")

    def is_broken(self) -> bool:
        """Tell whether a collective failed, so that the group is of no use any more."""
        return bool(self._broken) or self._core.failed()

    def abort(self) -> None:
        """End what runs, here and on the ranks that wait for this one; from any thread."""
        self._core.abort()
        self._messages.abort()

    def close(self) -> None:
        """Finish what was issued, if the others come to it, and end the group's thread."""
        deadline = time.monotonic() + PATIENCE
        while self._core.finished() < self._last and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._core.finished() < self._last:
            self._core.abort()
        self._core.stop()  # those that wait for this rank learn of it, and need not be waited for if they end, too
        failing = bool(self._broken) or sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        patience = min(PATIENCE, self._team.limit) if failing else self._team.limit
        for peer, count in self._messages.close(patience).items():
            text = "hp_onesided: rank %d has left with %d messages that rank %d had not read within %g s: they are lost"
            _log.warning(text, self._members[self._team.rank], count, self._members[peer], patience)
        self._kept.clear()
        release(self._team.pids[peer] for peer in self._team.processes)

    def _issue(self, kind: str, prepared: Any, output: Any, tensor: Any, target: int, source: int) -> Pending:
        done = self._core.finished()
        for number in [number for number in self._kept if number <= done]:  # that nobody waited for
            self._kept.pop(number, None)
        self._last = number = self._core.issue(prepared, target, source)
        self._kept[number] = prepared, output, tensor
        return Pending(self, number, kind)

    def is_done(self, number: int) -> bool:
        """Tell whether what was issued has ended, well or not."""
        return self._core.finished() >= number

    def finish(self, number: int, kind: str) -> None:
        """Wait for what was issued, and let go of its tensors."""
        try:
            self._core.wait(number)
        except WaitError as error:
            raise self._failed(error, kind) from None
        finally:
            if self._core.finished() >= number:
                self._kept.pop(number, None)

    def _prepare(self, key: tuple[Any, ...]) -> Any:
        call = Call(*key)
        rank, shape = self._team.rank, self._team.shape
        place = rank, shape.size
        if call.kind in _REDUCTIONS:
            call = replace(call, op=reduction(call.dtype, call.op)[1])
        if call.kind == "barrier":
            program = steps.barrier(*place)
        elif call.kind == "broadcast":
            program = steps.broadcast(*place, call.root, call.nbytes, shape.slot)
        elif call.kind == "all_to_all":
            program = steps.all_to_all(*place, call.sent, call.received, shape.slot)
        else:
            program = getattr(steps, call.kind)(*place, call.nbytes, shape.slot)
        if len(self._programs) >= _PROGRAMS:
            self._programs = {}
        prepared = self._programs[key] = self._core.prepare(program, call)
        return prepared

    def _failed(self, error: WaitError | OSError, kind: str) -> RuntimeError:
        """Make of a failure the error that this and all later calls raise; the other ranks learn that this one left."""
        if not self._broken:
            self._broken = f"hp_onesided: {self._reason(error, kind)}"
            self.abort()
        return RuntimeError(self._broken)

    def _reason(self, error: WaitError | OSError, kind: str) -> str:
        if isinstance(error, OSError):
            return f"rank {self._members[self._team.rank]} can't get memory for its {kind}: {error}"
        rank = self._members[error.peer]
        among = f"the {kind} over ranks {list(self._members)}"
        if error.failure is Failure.REFUSED:
            text = f"{disagreement(self._core.calls())}; ranks {list(self._members)} are the group"
        elif error.failure is Failure.DIED:
            text = f"rank {rank} has died, so {among} can't be done"
        elif error.failure is Failure.LEFT:
            text = f"rank {rank} has closed its connection to the group, so {among} can't be done"
        elif error.failure is Failure.ABORTED:
            text = f"the connections of rank {rank} were broken, so {among} can't be done"
        else:
            state = "is stopped" if process_state(self._team.pids[error.peer]) == "T" else "lives"
            text = f"rank {rank} did not come to {among} within {self._team.limit:g} s; its process {state}"
        return text


class Pending:
    """A collective under way.

    Args:
        carrier: whose.
        number: among those that were issued.
        kind: of the collective.
    """

    __slots__ = ("_carrier", "_kind", "_number")

    def __init__(self, carrier: SharedMemory, number: int, kind: str) -> None:
        self._carrier, self._number, self._kind = carrier, number, kind

    def is_done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._carrier.is_done(self._number)

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it can't be done.
        """
        self._carrier.finish(self._number, self._kind)


class PendingMessage:
    """A message under way.

    Args:
        carrier: whose.
        message: as this rank has it.
    """

    __slots__ = ("_carrier", "_message")

    def __init__(self, carrier: SharedMemory, message: Message) -> None:
        self._carrier, self._message = carrier, message

    def is_done(self) -> bool:
        """Tell whether it is done."""
        return self._carrier.is_message_done(self._message)

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it can't be done.
        """
        self._carrier.finish_message(self._message)


def _bytes_of(tensor: Tensor, rows: Sequence[int], size: int) -> tuple[int, ...]:
    """Count the bytes for each rank of a group of so many: those of its rows, or an equal part."""
    if not rows:
        return (tensor.nbytes // size,) * size
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return tuple(row * count for count in rows)
