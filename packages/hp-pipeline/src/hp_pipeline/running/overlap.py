"""A forward and a backward that run together, each computing while the other exchanges."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from hp_pipeline.orders.checking import HookRole, Meeting
from hp_pipeline.port import port

# ---- threads that meet: see Note [Meetings] ----
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


Function = Callable[..., Any]


class CommComputeOverlap:
    """Runs a forward and a backward in two threads that meet at the exchanges inside of their stages.

    A model's dispatch of tokens to experts and the combine of what experts return are wrapped, in the order of the
    layers; a schedule with steps in pairs is told of the object, and runs those pairs with it::

        overlap = CommComputeOverlap()
        for number, layer in enumerate(layers):  # those of stage 2
            layer.dispatch = overlap.wrap_dispatch(layer.dispatch, stage=2)
            layer.combine = overlap.wrap_combine(layer.combine, number == len(layers) - 1, stage=2)
        schedule = ScheduleInterleaved1F1B(stages, 8, overlap_b_f=True, overlap=overlap)

    One thread computes at a time, and the order of all they do is the same in each run: Note [Meetings]. So results
    have the bits of a run of one after the other. On MindSpore, and under a dispatch or function mode of PyTorch, which
    belongs to one thread, pairs run one after the other. Exchanges inside of stages that are not wrapped must be in
    groups of their own.

    Args:
        coordinator: of the meetings; None makes one.

    Attributes:
        meetings: by stage, those of its forward; ``check`` proves that they meet in opposite roles.
    """

    def __init__(self, coordinator: HookCoordinator | None = None) -> None:
        self.coordinator = HookCoordinator() if coordinator is None else coordinator
        self.meetings: dict[int, list[Meeting]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def wrap_dispatch(self, fn: Function, *, stage: int = 0, blocking: bool = False) -> Function:
        """Return an exchange with a meeting before and after it.

        Args:
            fn: takes and returns any nest of tensors; a gradient passes through it by an exchange too. It is to return
                when the exchange has begun, as asynchronous collectives do.
            stage: the stage that calls it.
            blocking: the function, and its backward, return only when the exchange is done: the other thread then goes
                on as it begins. On devices, where a function that waits makes the stream wait, this hides nothing.

        Returns:
            A function to call in the place of ``fn``.
        """
        return self._wrap("dispatch", fn, stage, blocking, last=False)

    def wrap_combine(
        self, fn: Function, is_last_layer: bool = False, *, stage: int = 0, blocking: bool = False
    ) -> Function:
        """Return an exchange with a meeting before and after it, for the stage's last layer before it alone.

        Args:
            fn: as for ``wrap_dispatch``.
            is_last_layer: no exchange of the stage comes after it.
            stage: the stage that calls it.
            blocking: as for ``wrap_dispatch``.
        """
        return self._wrap("combine", fn, stage, blocking, last=is_last_layer)

    def _wrap(self, kind: str, fn: Function, stage: int, blocking: bool, last: bool) -> Function:
        listed = self.meetings.setdefault(stage, [])
        number = sum(meeting.hook.startswith(f"before {kind}") for meeting in listed)
        before, after = (f"{place} {kind} {number} of stage {stage}" for place in ("before", "after"))
        listed.append(Meeting(before, HookRole.COMM))
        if not last:
            listed.append(Meeting(after, HookRole.COMPUTE))
        exchange = _Exchange(self.coordinator, before, None if last else after, blocking)
        return functools.partial(exchange.call, fn)

    def meets(self, forward: int, backward: int) -> bool:
        """Tell whether a forward of one stage and a backward of another have meetings."""
        return bool(self.meetings.get(forward) and self.meetings.get(backward))

    def run(self, fwd_fn: Callable[[], Any], bwd_fn: Callable[[], Any]) -> tuple[Any, Any]:
        """Run a forward in this thread and a backward in another; return what both return.

        Args:
            fwd_fn: the forward.
            bwd_fn: the backward.

        Raises:
            Exception: what either raised; the other ends at its next meeting.
        """
        surroundings = port().surroundings() if self.meetings else None
        if surroundings is None:
            return fwd_fn(), bwd_fn()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="hp-pipeline-backward")
        self.coordinator.enable()
        try:
            backward = self._threads.submit(self._side, bwd_fn, surroundings)
            ahead = error = None
            try:
                self.coordinator.begin_forward()
                ahead = fwd_fn()
            except BaseException as raised:
                error = raised
            self.coordinator.finish(error)
            other = backward.exception()
        finally:
            self.coordinator.disable()
        try:
            if error is not None and (other is None or not isinstance(error, OtherFailed)):
                raise error
            return ahead, backward.result()
        finally:
            del error, other, backward  # an error and a frame that names it are a cycle

    def _side(self, work: Callable[[], Any], surroundings: Callable[[], AbstractContextManager[Any]]) -> Any:
        try:
            with surroundings():
                result = work()
        except BaseException as error:
            self.coordinator.finish(error)
            raise
        self.coordinator.finish(None)
        return result


class _Exchange:
    """An exchange between two hooks; the second is None behind a stage's last."""

    def __init__(self, coordinator: HookCoordinator, before: str, after: str | None, blocking: bool) -> None:
        self.coordinator, self.before, self.after, self.blocking = coordinator, before, after, blocking

    def call(self, fn: Function, *args: Any, **kwargs: Any) -> Any:
        """Call the exchange, and let its backward meet as well."""
        ahead = self.coordinator.in_forward()  # not where a checkpoint computes a layer again
        if ahead:
            self.coordinator.rendezvous(self.before, HookRole.COMM)
        args, kwargs = port().hooked((args, kwargs), self._begun_backward)
        # Exchanges of one group must begin in one order on all ranks: one that is part of a layer computed again in
        # backward comes behind the forward's that blocks meanwhile.
        with self.coordinator.exchanging if self.blocking else contextlib.nullcontext():
            if ahead and self.blocking:
                self.coordinator.notify_dispatched(HookRole.COMM)
            result = fn(*args, **kwargs)
        result = port().hooked(result, self._begin_backward)
        if ahead:
            self.coordinator.notify_dispatched(HookRole.COMM)
            if self.after is None:
                self.coordinator.end()
            else:
                self.coordinator.rendezvous(self.after, HookRole.COMPUTE)
        return result

    def _begin_backward(self) -> None:
        if self.coordinator.in_forward():  # a gradient that the forward itself asks for
            return
        if self.after is not None:
            self.coordinator.rendezvous(self.after, HookRole.COMM)
        if self.blocking:
            self.coordinator.notify_dispatched(HookRole.COMM)

    def _begun_backward(self) -> None:
        if not self.coordinator.in_forward():
            self.coordinator.notify_dispatched(HookRole.COMM)
            self.coordinator.rendezvous(self.before, HookRole.COMPUTE)
