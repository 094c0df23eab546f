"""Checks of arguments, and of what ranks have in common, in the same words on every framework."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from hp_moe.routes.dispatch import DISPATCHERS
from hp_platform import get_platform
from hp_platform.extend import reduce_numbers


def check_bias(experts: int, shape: Sequence[int]) -> None:
    """Refuse a bias of another number of experts, also where it would be broadcast.

    Raises:
        ValueError: it is.
    """
    if tuple(shape) != (experts,):
        raise ValueError(
            f"TokenChoiceTopKRouter: expert_bias of shape {tuple(shape)} is none of {experts} experts: ({experts},)."
        )


def check_counted_together(function: str, model: Any, layers: Mapping[str, int], purpose: str, group: Any) -> None:
    """Refuse to add up the counts of different layers, or of none, on all ranks alike.

    Args:
        function: that adds them up, for the error.
        model: the model.
        layers: this rank's: name -> number of experts.
        purpose: what a model has layers of, for the error.
        group: the ranks; None is all.

    Raises:
        ValueError: ranks have different layers, or none has any.
    """
    groups = get_platform().groups
    # Numbers are equal if and only if ranks * sum of squares = square of sum; 22 bits, as squares' sums have 64.
    number = zlib.crc32(repr(sorted(layers.items())).encode()) % 2**22
    ranks, total, squares = 1, number, number**2
    if groups.is_initialized():
        group = groups.default_group() if group is None else group
        ranks, total, squares = reduce_numbers([1, number, number**2], "sum", group)
    if ranks * squares != total**2:
        own = ", ".join(name or "the model itself" for name in layers) or "none"
        raise ValueError(
            f"{function}: ranks have different layers, as stages of a pipeline have; this rank has {own}. Pass group=,"
            " the ranks that have the same ones, such as those of data parallelism"
        )
    if not layers:
        raise ValueError(f"{function}: {type(model).__name__} has no {purpose}")


def check_dispatcher(token_dispatcher: str, combine: str) -> None:
    """Refuse a dispatcher that is none, or that does not fit the way to combine.

    Raises:
        ValueError: it does not.
    """
    if token_dispatcher not in DISPATCHERS:
        *some, last = map(repr, DISPATCHERS)
        raise ValueError(f"ExpertParallel: token_dispatcher is {', '.join(some)} or {last}, got {token_dispatcher!r}.")
    if combine == "exact" and token_dispatcher != "all_to_all":
        raise ValueError(
            f"ExpertParallel: token_dispatcher={token_dispatcher!r} adds a token's results up on their way, so its bits"
            " depend on where experts are; use combine='fast', or token_dispatcher='all_to_all'."
        )


def check_overlap(style: Any, base: type, dispatcher: str, async_combine: bool, combine: str, chunks: int) -> None:
    """Refuse overlap that a style cannot run.

    Args:
        style: to be run.
        base: whose ``dispatch`` and ``combine`` are run in parts.
        dispatcher: its ``token_dispatcher``.
        async_combine: see ``ExpertParallel``.
        combine: see ``ExpertParallel``.
        chunks: see ``ExpertParallel``.

    Raises:
        ValueError: arguments that don't go together.
        TypeError: a style with its own ``dispatch`` or ``combine``.
    """
    name = type(style).__name__
    if chunks < 1:
        raise ValueError(f"{name}: chunks is the number of parts of a rank's tokens, 1 or more, got {chunks}.")
    if chunks == 1 and not async_combine:
        return
    what = f"chunks={chunks}" if chunks > 1 else "async_combine=True"
    if dispatcher == "all_gather":
        raise ValueError(f"{name}: all_gather is waited for at once, {what} hides nothing; use another dispatcher.")
    if chunks > 1 and combine == "exact":
        raise ValueError(
            f"{name}: with {what} a weight's gradient is a sum over parts of the tokens of each rank, whose bits depend"
            " on the number of ranks; use combine='fast', or one chunk."
        )
    for method in ("dispatch", "combine"):
        if getattr(type(style), method) is not getattr(base, method):
            raise TypeError(
                f"{name}: {what} begins and ends exchanges apart, but {method} is the style's own; override it without"
                " this option."
            )


def check_capacity(capacity: int | None, dispatcher: str, combine: str, chunks: int, slots: int) -> None:
    """Refuse a capacity that is none, or does not go with the other arguments of ``ExpertParallel``.

    Raises:
        ValueError: it does not.
    """
    if capacity is None:
        return
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(
            f"ExpertParallel: capacity is how many tokens of each rank an expert takes, an int of 1 or more, got"
            f" {capacity!r}; for a factor, compute it: ceil(factor * tokens * choices / experts)."
        )
    wrong = {
        "combine='exact'": combine == "exact" and "what is dropped depends on the number of ranks, and so do the bits",
        f"token_dispatcher={dispatcher!r}": dispatcher != "all_to_all" and "its shapes depend on the choices",
        f"chunks={chunks}": chunks > 1 and "each part of the tokens would have a capacity of its own",
        f"slots={slots}": slots > 0 and "a replica is for what a capacity drops",
    }
    for argument, reason in wrong.items():
        if reason:
            raise ValueError(f"ExpertParallel: capacity={capacity} does not go with {argument}: {reason}.")
