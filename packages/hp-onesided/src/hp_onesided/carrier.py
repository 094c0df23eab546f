"""Collectives of a group whose ranks share a host, over memory that they share: hp-platform's Carrier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from hp_onesided.cores.core import Core, Team
from hp_onesided.cores.processes import release
from hp_onesided.cores.waiting import Failure, WaitError
from hp_onesided.planning import steps
from hp_onesided.planning.headers import DTYPES, REDUCED_AS, WIDTHS, Call, disagreement
from hp_onesided.port import Tensor, port
from hp_platform.extend import process_state

_PATIENCE = 10.0
"""Seconds that a group's end waits for what was issued and nobody waited for."""
_PROGRAMS = 1024
"""Programs that a group keeps; when it has as many, it forgets them all."""
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_REDUCED = frozenset({*DTYPES[: len(WIDTHS)], *REDUCED_AS})
_OF_BOOL = {"sum": "max", "product": "min"}
"""What reductions of truth values are: any, and all."""


class SharedMemory:
    """The collectives of one group; a `hp_platform.communication.carriers.Carrier`.

    Args:
        core: that runs them.
        team: the ranks, as the core has them.
        members: their global ranks.

    Attributes:
        issued: collectives that were begun.
    """

    def __init__(self, core: Core, team: Team, members: Sequence[int]) -> None:
        self._core, self._team, self._members = core, team, members
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._kept: dict[int, Any] = {}
        self._last = self.issued = 0
        port()  # found here, and not in a collective

    def takes(self, kind: str, tensor: Tensor | None, op: str) -> bool:
        """Tell whether a collective of such a tensor goes through shared memory."""
        if tensor is None:
            return True
        dtype = port().dtype(tensor)
        return dtype is not None and (kind not in _REDUCTIONS or dtype in _REDUCED)

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

    def is_broken(self) -> bool:
        """Tell whether a collective failed, so that the group is of no use any more."""
        return self._core.failed()

    def abort(self) -> None:
        """End what runs, here and on the ranks that wait for this one; from any thread."""
        self._core.abort()

    def close(self) -> None:
        """Finish what was issued, if the others come to it, and end the group's thread."""
        deadline = time.monotonic() + _PATIENCE
        while self._core.finished() < self._last and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._core.finished() < self._last:
            self._core.abort()
        self._core.stop()
        self._kept.clear()
        release(self._team.pids[peer] for peer in self._team.processes)

    def _issue(self, kind: str, prepared: Any, output: Any, tensor: Any, target: int, source: int) -> Pending:
        done = self._core.finished()
        for number in [number for number in self._kept if number <= done]:  # that nobody waited for
            self._kept.pop(number, None)
        self._last = number = self._core.issue(prepared, target, source)
        self._kept[number] = prepared, output, tensor
        return Pending(self, number, kind)

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
        if call.dtype == "bool" and call.kind in _REDUCTIONS:
            call = replace(call, op=_OF_BOOL.get(call.op, call.op))
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

    def _failed(self, error: WaitError, kind: str) -> RuntimeError:
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
        return RuntimeError(f"hp_onesided: {text}")


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

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it can't be done.
        """
        self._carrier.finish(self._number, self._kind)


def _bytes_of(tensor: Tensor, rows: Sequence[int], size: int) -> tuple[int, ...]:
    """Count the bytes for each rank of a group of so many: those of its rows, or an equal part."""
    if not rows:
        return (tensor.nbytes // size,) * size
    row = tensor.nbytes // len(tensor) if len(tensor) else 0
    return tuple(row * count for count in rows)
