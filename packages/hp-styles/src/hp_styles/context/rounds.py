"""Rounds: the ranks of a context axis compare what they compute once per step, by messages of a fixed size.

Note [Rounds]
    A rank that alone sees something new (a length, a mask) must not be the only one to ask the others. So they compare
    at the first attention of each kind (a class of modules, causal or not: an encoder's, a decoder's) in each call of
    the module that `parallelize_module` was given, whatever that call's data is, and what comes later in the call is
    held against it on each rank alone. A module that is called outside of such a call is one itself. In backward, where
    checkpoints run modules again, a round ends where a module comes for the second time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hp_styles.context.documents import Part, Run


@dataclass
class Round:
    """Calls of attention that belong together.

    Attributes:
        settled: results of comparisons, by what they apply to.
        kept: results that are computed once, by their inputs, which stay alive with them.
        kinds: results of comparisons, by the kind of module.
        seen: modules that were called.
        fault: the error that this rank raises for all of them.
        met: number of calls of each module's attention.
        late: an error that this rank found too late to tell the others.
        followed: groups of ranks with attention that compared nothing.
    """

    settled: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    kinds: dict[Any, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    fault: Exception | None = None
    met: dict[int, int] = field(default_factory=dict)
    late: Exception | None = None
    followed: dict[Any, Any] = field(default_factory=dict)

    def place(self, module: int) -> tuple[int, int]:
        """Count one more attention of a module; its place is alike on all ranks, and in all rounds."""
        self.met[module] = self.met.get(module, 0) + 1
        return module, self.met[module]


class Rounds(threading.local):
    """The rounds of one style, on each thread; see Note [Rounds].

    Attributes:
        open: modules that are called, from the outermost on.
        current: the round.
        follows: places whose attention follows the first of its kind, with what each expects; Note [Later attention].
    """

    def __init__(self) -> None:
        self.follows: dict[Any, Any] = {}
        self.open: list[Any] = []
        self.current = Round()

    def enter(self, root: Any, *, anew: bool = False) -> None:
        """Begin a call of the module around those of the style; with ``anew``, an open one was ended by an error."""
        if anew:
            self.open = list(itertools.takewhile(lambda each: each is not root, self.open))
        if not self.open:
            self.current = Round()
        self.open.append(root)

    def leave(self, root: Any) -> None:
        """End the call, perhaps by an error before it was entered."""
        if self.open and self.open[-1] is root:
            self.open.pop()
            if not self.open:
                self.current = Round()

    def of(self, module: int, *, backward: bool) -> Round:
        """Return the round of a call of a module that has the style.

        Args:
            module: its number: alike on all ranks, which its id is not.
            backward: autograd runs it again.
        """
        if not self.open and (not backward or module in self.current.seen):
            self.current = Round()
        self.current.seen.add(module)
        return self.current

    def __deepcopy__(self, memo: Any) -> Rounds:
        return Rounds()


ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError)  # the third is one of the fourth
"""Classes of errors that a rank raises; the others then raise one of the same class."""
RUNS = 64
"""Runs of a part that fit into the message; of more, another message follows."""
_TENSORS, _DIMS, _FIXED, _RUN = 3, 6, 11, 4
SIZE = _FIXED + _TENSORS * _DIMS + RUNS * _RUN


@dataclass(frozen=True)
class Header:
    """Description of a rank's next computation.

    Attributes:
        shapes: of q, k and v, or of the one of them that is sent first.
        causal: None where it is not known yet.
        window: keys that a query sees; None is all.
        load_balance: the style's.
        degrees: ranks of its Ulysses groups, and of its inner rings.
        part: its part of the sequence.
        fault: index in `ERRORS` of the error that this rank raises, or None.
    """

    shapes: tuple[tuple[int, ...], ...]
    causal: bool | None
    window: int | None
    load_balance: bool
    degrees: tuple[int, int]
    part: Part
    fault: int | None = None

    def numbers(self) -> list[int]:
        """Encode the message; of more than `RUNS` runs, the first ones."""
        part = self.part
        fixed = [
            -1 if self.fault is None else self.fault,
            -1 if self.causal is None else int(self.causal),
            self.window or 0,
            int(self.load_balance),
            *self.degrees,
            int(part.positioned),
            int(part.packed),
            int(part.joined),
            len(self.shapes),
            sum(len(row) for row in part.rows),
        ]
        dims = [n for shape in self.shapes for n in (*shape[:_DIMS], *[-1] * (_DIMS - len(shape)))]
        dims += [-1] * (_TENSORS * _DIMS - len(dims))
        runs = self.runs()[: RUNS * _RUN]
        return [*fixed, *dims, *runs, *[0] * (RUNS * _RUN - len(runs))]

    def runs(self) -> list[int]:
        """Encode all runs of the part."""
        rows = enumerate(self.part.rows)
        return [n for i, row in rows for run in row for n in (i, run.start, run.position, int(run.kept))]

    @staticmethod
    def read(numbers: Sequence[int], runs: Sequence[int] | None = None) -> Header:
        """Decode a rank's message, with its runs where they came in a second message."""
        fault, causal, window, load_balance, ulysses, inner, positioned, packed, joined, tensors, count = numbers[
            :_FIXED
        ]
        dims = numbers[_FIXED : _FIXED + _TENSORS * _DIMS]
        shapes = (tuple(n for n in dims[i * _DIMS : (i + 1) * _DIMS] if n >= 0) for i in range(tensors))
        flat = (numbers[_FIXED + _TENSORS * _DIMS :] if runs is None else runs)[: count * _RUN]
        quads = [flat[i : i + _RUN] for i in range(0, len(flat), _RUN)]
        rows = [
            tuple(Run(start, position, bool(kept)) for _, start, position, kept in row)
            for _, row in groupby(quads, lambda quad: quad[0])
        ]
        return Header(
            tuple(shapes),
            None if causal < 0 else bool(causal),
            window or None,
            bool(load_balance),
            (ulysses, inner),
            Part(tuple(rows), bool(packed), bool(joined), bool(positioned)),
            None if fault < 0 else fault,
        )

    @staticmethod
    def longest(messages: Sequence[Sequence[int]]) -> int:
        """Return the most numbers that the runs of a rank take; 0 if all fit in the messages."""
        most = max(numbers[_FIXED - 1] for numbers in messages)
        return most * _RUN if most > RUNS else 0


def error_number(fault: Exception | None) -> int | None:
    """Return the index in `ERRORS` of the error that a rank raises."""
    return None if fault is None else next(i for i, kind in enumerate(ERRORS) if isinstance(fault, kind))


def check_refusals(faults: Sequence[int | None], ranks: Sequence[int], fault: Exception | None) -> None:
    """Refuse the step if any rank refuses it.

    Args:
        faults: for each rank the index in `ERRORS` of its error, or None.
        ranks: their names.
        fault: the error that this rank raises, if any.

    Raises:
        Exception: ``fault``; where other ranks refuse, an error of that class which names them.
    """
    if fault is not None:
        raise fault
    refusing = {rank: number for rank, number in zip(ranks, faults, strict=True) if number is not None}
    if refusing:
        raise ERRORS[min(refusing.values())](
            f"ContextParallel: ranks {list(refusing)} refuse this step, for the reasons that their errors give; this "
            "rank cannot compute it alone"
        )


def check_alike(headers: Sequence[Header], ranks: Sequence[int], fault: Exception | None) -> None:
    """Refuse ranks that differ.

    Args:
        headers: each rank's, in the order of the axis.
        ranks: their names.
        fault: the error that this rank raises, if any.

    Raises:
        ValueError: shapes, causality, windows or settings that differ.
        Exception: ``fault``; where other ranks refuse, an error of that class which names them.
    """
    check_refusals([h.fault for h in headers], ranks, fault)
    settings = {rank: (h.load_balance, *h.degrees) for rank, h in zip(ranks, headers, strict=True)}
    if len(set(settings.values())) > 1:
        each = "; ".join(f"rank {rank}: load_balance={b}, {u}, {i}" for rank, (b, u, i) in settings.items())
        raise ValueError(
            f"ContextParallel: the ranks' styles differ in load_balance or in the ranks of a Ulysses group or an inner"
            f" ring: {each}"
        )
    if len({(h.shapes, h.causal, h.window) for h in headers}) > 1:
        three = len(headers[0].shapes) == _TENSORS
        each = "; ".join(
            f"rank {rank}: {[n for shape in h.shapes for n in shape]}, is_causal={h.causal}, window={h.window}"
            for rank, h in zip(ranks, headers, strict=True)
        )
        raise ValueError(
            "ContextParallel: the ranks of the context axis hold parts of different shapes, or differ in is_causal."
            f" The shapes of {'q, k, v' if three else 'the tensor'}, in this order, are {each}. Shard the sequence with"
            " context_parallel_shard, which refuses lengths that do not divide"
        )
