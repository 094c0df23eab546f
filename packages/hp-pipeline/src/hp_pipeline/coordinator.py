"""The meetings of two threads: see Note [Meetings]."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hp_pipeline.meetings import HookRole

__all__ = ["HookCoordinator", "OtherFailed"]

_FORWARD, _BACKWARD = 0, 1
_SIDES = ("forward", "backward")


class OtherFailed(RuntimeError):
    """The other thread of a pair raised; it is the cause."""


class _Side:
    """How far one thread has come.

    Attributes:
        met: the hooks and roles of the meetings that it has come to.
        begun: how many meetings it had come to when it began its last exchange.
        released: it has begun an exchange.
        ended: it comes to no more meetings, or waits for the other's end.
        finished: its work is done.
        error: what it raised.
    """

    def __init__(self) -> None:
        self.met: list[tuple[str, HookRole]] = []
        self.begun = 0
        self.released = self.ended = self.finished = False
        self.error: BaseException | None = None


class HookCoordinator:
    """Lets a forward and a backward in two threads meet at hooks; outside of a pair hooks do nothing.

    The thread that calls ``enable`` runs the forward; the backward runs in any other (on devices autograd has threads
    of its own). The forward waits until the backward has begun its first exchange, or comes to its first meeting.

    Attributes:
        exchanging: locked while an exchange that blocks its thread is under way.
    """

    def __init__(self) -> None:
        self.exchanging = threading.Lock()
        self._changed = threading.Condition()
        self._forward: int | None = None
        self._sides = (_Side(), _Side())

    @property
    def enabled(self) -> bool:
        """Tell whether a pair runs."""
        return self._forward is not None

    def enable(self) -> None:
        """Begin a pair, whose forward runs in this thread."""
        if self.enabled:
            raise RuntimeError("HookCoordinator: a pair runs already; disable() ends it.")
        self._sides = (_Side(), _Side())
        self._forward = threading.get_ident()

    def disable(self) -> None:
        """End the pair, and let go of what it raised."""
        self._forward = None
        self._sides = (_Side(), _Side())

    def in_forward(self) -> bool:
        """Tell whether this thread runs the forward of a pair."""
        return threading.get_ident() == self._forward

    def _own(self) -> int:
        return _FORWARD if self.in_forward() else _BACKWARD

    def begin_forward(self) -> None:
        """Wait until the backward has begun an exchange, meets, or is done."""
        other = self._sides[_BACKWARD]
        self._wait(other, lambda: other.released or bool(other.met) or other.finished)

    def rendezvous(self, hook_name: str, role: HookRole) -> None:
        """Meet the other thread.

        With ``COMM`` the caller begins an exchange next and then calls ``notify_dispatched``; with ``COMPUTE`` it goes
        on once the other's exchange has begun. A thread whose other comes to no more meetings goes on alone.

        Args:
            hook_name: the place, for errors.
            role: what the caller does next; the other must do the opposite.

        Raises:
            RuntimeError: both have the same role, or the other thread failed.
        """
        if not self.enabled:
            return
        own = self._own()
        side, other = self._sides[own], self._sides[1 - own]
        with self._changed:
            place = len(side.met)
            side.met.append((hook_name, role))
            self._changed.notify_all()
        self._wait(other, lambda: len(other.met) > place or other.ended)
        if len(other.met) <= place:
            return
        hook, others = other.met[place]
        if others is role:
            raise RuntimeError(
                f"HookCoordinator: at meeting {place} the {_SIDES[own]} at {hook_name} and the {_SIDES[1 - own]} at"
                f" {hook} both are to {role.value}."
            )
        if role is HookRole.COMPUTE:
            self._wait(other, lambda: other.begun > place or len(other.met) > place + 1 or other.finished)

    def notify_dispatched(self, role: HookRole) -> None:
        """Say that what this thread's role lets it do has begun: the other, which computes, goes on."""
        if not self.enabled or role is not HookRole.COMM:
            return
        side = self._sides[self._own()]
        with self._changed:
            side.begun, side.released = len(side.met), True
            self._changed.notify_all()

    def end(self) -> None:
        """Come to no more meetings, and wait until the other thread is done."""
        if not self.enabled:
            return
        own = self._own()
        with self._changed:
            self._sides[own].ended = True
            self._changed.notify_all()
        other = self._sides[1 - own]
        self._wait(other, lambda: other.finished)

    def finish(self, error: BaseException | None) -> None:
        """Let the other thread go on: this one is done, or has raised."""
        side = self._sides[self._own()]
        with self._changed:
            side.ended = side.finished = True
            side.error = error
            self._changed.notify_all()

    def _wait(self, other: _Side, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: other.error is not None or condition())
        if other.error is not None:
            name = _SIDES[self._sides.index(other)]
            raise OtherFailed(
                f"the {name} that ran together with this step failed: {type(other.error).__name__}: {other.error}"
            ) from other.error
