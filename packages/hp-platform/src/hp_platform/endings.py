"""What is to be done when process groups are destroyed, or the default one is made anew."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["groups_ended", "when_groups_end"]

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
