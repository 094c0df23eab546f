"""Plans and hyperparameters, which are the same on all ranks, or none of them steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hp_optim.options import different_parameters
from hp_platform import get_platform
from hp_platform.extend import agree, own_rank, share_bytes

_KINDS: Mapping[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def agree_on(caller: str, describe: Callable[[], list[str]], world: Sequence[int]) -> None:
    """Raise on all ranks where one of them fails, or describes something else; a small collective where none does.

    Args:
        caller: the optimizer, for the error.
        describe: returns lines; it may raise.
        world: the ranks, all of which call this.

    Raises:
        ValueError: the first line that differs.
        Exception: this rank's; or another rank's, with its class if it is a ValueError, a TypeError or a RuntimeError.
    """
    group = get_platform().groups.new_group(list(world)) if len(world) > 1 else None

    def failed(texts: Mapping[int, str], own: Exception | None) -> Exception:
        if own is not None:
            return own
        place, text = min(texts.items())
        kind, _, said = text.partition(": ")
        return _KINDS.get(kind, RuntimeError)(f"{said} (on rank {world[place]}; no rank took the step)")

    everyone = agree(
        lambda: "\n".join(describe()).encode(),
        failed,
        partial(share_bytes, group=group),
        lambda error: f"{type(error).__name__}: {error}",
    )
    if len(set(everyone)) == 1:
        return
    told = [each.decode().split("\n") for each in everyone]
    most = max(map(len, told))
    padded = [[*lines, *["no more parameters"] * (most - len(lines))] for lines in told]
    first = next(at for at in range(most) if len({lines[at] for lines in padded}) > 1)
    mine = padded[list(world).index(own_rank())][first]
    others = {rank: lines[first] for rank, lines in zip(world, padded) if lines[first] != mine}
    raise different_parameters(caller, mine, others)
