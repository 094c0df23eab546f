"""Policies: what becomes of an output or of a saved tensor between forward and backward."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class CheckpointPolicy(IntEnum):
    """What becomes of an operation's output between forward and backward; the values are torch's where both have one.

    A bool that a policy function returns counts as torch counts it: True is `MUST_SAVE`, False `PREFER_RECOMPUTE`.
    """

    MUST_SAVE = 0
    """Stays on the device."""
    PREFER_SAVE = 1
    """Stays on the device where that costs nothing else: at heavy operations; other outputs are computed again."""
    MUST_RECOMPUTE = 2
    """Is freed, and computed again in backward."""
    PREFER_RECOMPUTE = 3
    """Is freed, and computed again in backward."""
    MUST_SWAP = 4
    """Goes to the host's memory and is back before backward needs it; nothing is computed again."""


KEEPS = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SWAP})
"""Those that keep an output, here or on the host."""

_NAMES = ", ".join(f"{policy.name} ({policy.value})" for policy in CheckpointPolicy)


def checked_answer(answer: Any, asked: str) -> CheckpointPolicy:
    """Check what a policy function of `checkpoint` returned.

    Args:
        answer: a `CheckpointPolicy`, torch's with the same value, or a bool.
        asked: the operation that it was asked about, for the error.

    Raises:
        TypeError: the answer is none of these.
    """
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    value = getattr(answer, "value", answer)
    if isinstance(value, int) and not isinstance(value, bool) and value in CheckpointPolicy._value2member_map_:
        return CheckpointPolicy(value)
    raise TypeError(
        f"policy_fn returned {answer!r} for {asked}; it returns a CheckpointPolicy: {_NAMES}, or a bool"
        " (True keeps the output, False computes it again)."
    )


def checked_swap_answer(answer: Any, asked: str) -> CheckpointPolicy:
    """Check what a policy function of `swap` returned.

    Args:
        answer: `MUST_SAVE` or `MUST_SWAP`.
        asked: the tensor that it was asked about, for the error.

    Raises:
        TypeError: the answer is something else.
    """
    if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP) and not isinstance(answer, bool):
        return CheckpointPolicy(answer)
    raise TypeError(
        f"policy_fn returned {answer!r} for {asked}; of a swap it returns CheckpointPolicy.MUST_SAVE (the tensor stays)"
        " or MUST_SWAP (it goes to the host)."
    )


def keep_collectives_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what collectives computed, and compute all else again: a `policy_fn` of `checkpoint`.

    A second run then communicates nothing: exchanges of DTensors and torch's functional collectives are handed back.
    """
    collective = str(op).startswith(("c10d.", "_c10d_functional.", "c10d_functional."))
    return CheckpointPolicy.MUST_SAVE if collective else CheckpointPolicy.PREFER_RECOMPUTE
