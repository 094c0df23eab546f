"""The operations that computed what a region saves, in an order that the runs of a region share.

Note [Histories]
    A second run that takes another branch may save tensors of the same shapes and dtypes. The operations that computed
    them tell. So after a run the graph of each saved tensor is walked, from the tensor back to what was walked before
    or was there before the region; a node is visited once. The operation that saves a tensor last is not reached, and
    need not be: backward runs the node of the forward, with the tensor that it is handed, and whose graph was walked.

    Passed over, since one run may have them and the other not: what wraps modules in the forward alone (Functions and
    views), casts (autocast keeps those of weights), and what heavy functions and excluded modules consist of, whose
    outputs may be handed back. Of an operation's own numbers, those count that its node keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

T = torch.Tensor
_PASSED = {"ViewBackward0", "AliasBackward0", "ToCopyBackward0", "AccumulateGrad"}
_SIZES = ("size", "stride", "numel", "shape", "layout", "options", "generator")
"""Parts of the names of what a node keeps that its tensors tell already, or that is no number."""
_kinds: dict[type, Callable[[Any], Any]] = {}
"""Of a node's class: what returns its numbers, `_none` where it has none, `_passed` where it is passed over."""


def _none(node: Any) -> None: ...


def _passed(node: Any) -> None: ...


class Walk:
    """One run's walk through the graph of a region.

    Args:
        outer: nodes that were there before the region.
        since: autograd's number of the region's first node; None where `outer` names all that the walk meets.

    Attributes:
        outer: the same, and those that the walk met.
        operations: those that computed what was saved, in the order of the walk; known when it is finished.
        until: how many of them computed what was saved up to number n.
    """

    def __init__(self, outer: Iterable[Any], since: int | None = None) -> None:
        self.outer = {*outer}
        self.operations: list[Any] = []
        self.until: list[int] = []
        self._since = since
        self._roots: list[Any] = []
        self._packs: list[int] = []
        self._inside = False

    def save(self, node: Any) -> None:
        """Note that the next tensor is saved.

        Args:
            node: that computed it; None if nothing did, or if it is none of the region's.
        """
        if not self._inside:
            self._roots.append(node)
        self._packs.append(len(self._roots))

    @contextmanager
    def opaque(self, given: Iterable[Any]) -> Iterator[None]:
        """Pass over what is saved while inside.

        Args:
            given: what the tensors inside are computed from; what is no tensor is left out.
        """
        outer = self._inside
        if not outer:
            self._roots += [each.grad_fn for each in given if isinstance(each, T)]
        self._inside = True
        try:
            yield
        finally:
            self._inside = outer

    def computed(self, results: Iterable[Any]) -> None:
        """Take the results of what is opaque as walked."""
        self._roots += [_Opaque(each.grad_fn) for each in results if isinstance(each, T) and each.grad_fn is not None]

    def finish(self) -> None:
        """Walk, and let go of the nodes: they hold what they saved."""
        seen, found, ends = set(self.outer), self.operations, [0]
        for root in self._roots:
            if type(root) is _Opaque:
                seen.add(root.node)
            elif root is not None and root not in seen:
                self._visit([(root, 0)], seen)
            ends.append(len(found))
        self.until = [ends[each] for each in self._packs]
        self._roots, self._packs = [], []

    def so_far(self) -> Walk:
        """Return what is known before the run's end."""
        walk = Walk(self.outer, self._since)
        walk._roots, walk._packs = [*self._roots], [*self._packs]
        walk.finish()
        return walk

    def _visit(self, todo: list[Any], seen: set[Any]) -> None:
        since, found = self._since, self.operations
        while todo:
            node, number = todo.pop()
            if node is None or node in seen:
                continue
            if since is not None and node._sequence_nr() < since:  # a leaf's number is the largest
                self.outer.add(node)
                seen.add(node)
                continue
            kind = type(node)
            numbers = _kinds.get(kind) or _numbers(kind)
            edges = node.next_functions
            if numbers is not _passed:
                found.append(kind)
                if numbers is not _none:
                    found.append(numbers(node))
            elif len(edges) > 1 and len(edges) == len(node._input_metadata):  # an output for each input: a wrapper
                if (node, number) not in seen:
                    seen.add((node, number))
                    todo.append(edges[number])
                continue
            seen.add(node)
            todo += edges


class _Opaque:
    """The last node of what is passed over."""

    def __init__(self, node: Any) -> None:
        self.node = node


def _numbers(kind: type) -> Callable[[Any], Any]:
    names = {*dir(kind)}
    saved = (name for name in sorted(names) if name.startswith("_saved_") and "_raw" + name not in names)
    kept = [name for name in saved if not any(part in name for part in _SIZES)]
    passed = issubclass(kind, BackwardCFunction) or kind.__name__ in _PASSED
    return _kinds.setdefault(kind, _passed if passed else attrgetter(*kept) if kept else _none)


def differing(first: Walk, again: Walk) -> str:
    """Return how a second run, or the part of it that ran, differs from the first; "" where it does not."""
    until = first.until[len(again.until) - 1] if again.until else 0
    if again.operations == first.operations[:until]:
        return ""
    for place, (before, now) in enumerate(zip(first.operations[:until], again.operations)):
        if repr(before) != repr(now):  # what is not a number is not equal to itself
            return f"computed {_shown(again, place)} where its forward computed {_shown(first, place)}"
    counts = [sum(isinstance(each, type) for each in found) for found in (again.operations, first.operations[:until])]
    if counts[0] == counts[1]:
        return ""
    return f"saved what {counts[0]} operations computed where its forward saved what {counts[1]} did"


def _shown(walk: Walk, place: int) -> str:
    """Return an operation as text, "GeluBackward0('tanh')"."""
    found = walk.operations[place]
    if isinstance(found, type):
        return found.__name__
    return f"{walk.operations[place - 1].__name__} with {found!r}"
