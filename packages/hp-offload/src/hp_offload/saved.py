"""Policies, storages that a step saves for backward, and the plan that gives each storage a policy: data."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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


_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


@dataclass(frozen=True)
class Saved:
    """One storage that backward needs.

    Attributes:
        site: `"layers.3.mlp.act#0"`: the module that saves it and how many it saved before; the same in every step.
        bytes: of the storage.
        made_at: seconds of computation from the step's begin until it is there.
        needed_at: seconds until backward uses it for the last time; forward comes first.
        recompute: seconds that computing it again takes, and keeping it spares; infinite where that is impossible: what
            a block is given.
        swappable: it may go to the host.
        alias_of: the site that the same storage has already; this one has no bytes of its own.
        rerun: seconds that are spent on it or on the way to it once anything of its block is computed again, whatever
            becomes of it itself: a second run skips heavy operations whose outputs are kept, and nothing else.
    """

    site: str
    bytes: int
    made_at: float
    needed_at: float
    recompute: float
    swappable: bool = True
    alias_of: str | None = None
    rerun: float = 0.0

    def __post_init__(self) -> None:
        if min(self.bytes, self.made_at, self.recompute, self.rerun) < 0 or math.isnan(self.recompute + self.rerun):
            raise ValueError(f"Saved: bytes, made_at, recompute and rerun are not negative, got {self}.")
        if self.needed_at < self.made_at:
            raise ValueError(
                f"Saved {self.site!r} is needed at {self.needed_at} s, before it is made, {self.made_at} s."
            )


@dataclass(frozen=True)
class MemoryPlan:
    """Keep, swap or recompute, for each site; `print` shows it as a table.

    Attributes:
        policies: `MUST_SAVE`, `MUST_SWAP` or `MUST_RECOMPUTE` of each site.
        predicted_peak: the most bytes of saved storages on the device at once, and of the cache.
        predicted_step: seconds of the step: its computation, what is computed again, and waits for copies.
        cache: bytes for parameters that visit.
    """

    policies: Mapping[str, CheckpointPolicy]
    predicted_peak: int
    predicted_step: float
    bytes: Mapping[str, int] = field(default_factory=dict, repr=False)
    cache: int = 0

    def total(self, policy: CheckpointPolicy) -> int:
        """Count the bytes of the sites with a policy."""
        return sum(self.bytes.get(site, 0) for site, each in self.policies.items() if each is policy)

    def __str__(self) -> str:
        blocks: dict[str, list[int]] = {}
        kinds = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE)
        for site, policy in self.policies.items():
            row = blocks.setdefault(block_of(site), [0, 0, 0])
            row[kinds.index(policy)] += self.bytes.get(site, 0)
        width = max([len(block) for block in blocks] + [5])
        lines = [f"{'block':{width}}  {'keep':>10}  {'swap':>10}  {'recompute':>10}"]
        lines += [
            f"{block:{width}}  " + "  ".join(f"{size(each):>10}" for each in row) for block, row in blocks.items()
        ]
        if self.cache:
            lines.append(f"a cache of {size(self.cache)} for parameters")
        lines.append(f"peak {size(self.predicted_peak)}, step {self.predicted_step:.4g} s")
        return "\n".join(lines)


def block_of(site: str) -> str:
    """Return the block of a site: its path to the first number; what no numbered module holds is a block of its own.

    >>> block_of("model.layers.3.experts.0#0"), block_of("head#1"), block_of("#0")
    ('model.layers.3', 'head', '')
    """
    path = site.partition("#")[0].split(".")
    return ".".join(path[: next((place + 1 for place, name in enumerate(path) if name.isdigit()), len(path))])


def near(name: str, names: Iterable[str]) -> str:
    """Return names that `name` may have been meant for, as an error's last words."""
    close = difflib.get_close_matches(name, [*names], 3, 0.4)
    return f"; close: {', '.join(close)}" if close else ""


def size(number: float) -> str:
    """Return bytes as people read them.

    >>> size(131_072), size(3 * 2**30)
    ('128 KiB', '3 GiB')
    """
    for unit in ("GiB", "MiB", "KiB"):
        if number >= _UNITS[unit]:
            return f"{number / _UNITS[unit]:.4g} {unit}"
    return f"{number:.0f} B"


def parse_size(text: str) -> int:
    """Return the bytes that a text says, the inverse of `size`.

    >>> parse_size("20GiB"), parse_size("1.5 MB")
    (21474836480, 1500000)

    Raises:
        ValueError: it is not a number above 0 and a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", text)
    if found is None or not float(found[1]):
        raise ValueError(f'got {text!r}, expected a number and a unit ({", ".join(_UNITS)}), such as "20GiB"')
    return int(float(found[1]) * _UNITS[found[2]])
