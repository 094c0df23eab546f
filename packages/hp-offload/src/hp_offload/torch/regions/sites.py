"""Heavy operations of a region whose outputs are kept: handed back when the region runs again.

See `hp_platform.frames`: a heavy operation asks its frame for its output, so nothing else of the region is slowed down.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from hp_offload.saved import KEEPS, CheckpointPolicy
from hp_offload.torch.regions.functions import (
    Calls,
    Filling,
    Role,
    Site,
    Walk,
    Watched,
    hand_back,
    is_function,
    layout_of,
)
from hp_offload.torch.regions.state import random_state, set_random_state
from hp_offload.torch.swapping import Kept, Packed
from hp_platform.frames import frame
from hp_platform.torch.heavy import EXCHANGE
from hp_platform.torch.internals import keeps_graph, without_torch_function

T = torch.Tensor
Key = tuple["str | None", int]
"""A site and how often it was reached before in this run of the region."""


def show(key: Key) -> str:
    """Return a site as text, "mlp.up#0"."""
    return f"{key[0] or '(unnamed)'}#{key[1]}"


def module_of(function: Callable[..., object]) -> nn.Module | None:
    """Return the module that a function is or belongs to; None where it is a function of its own."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


class Group(Protocol):
    """Takes what goes to the host."""

    def out(self, tensor: T) -> Packed:
        """Return what stands for a tensor."""
        ...

    def finish(self) -> None:
        """End the run of the function."""
        ...


class Computed:
    """`hp_platform.frames.Outputs` that computes every output."""

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        """Return `compute()`."""
        return compute()


class Ordinals:
    """Counts how often each site was reached."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()

    def key(self, site: str | None) -> Key:
        """Return the key of a site that is reached now."""
        self._counts[site] += 1
        return site, self._counts[site] - 1


class KeptOutput:
    """An output on the device."""

    def __init__(self, tensor: T) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def load(self) -> T:
        writes = self._tensor._version - self._version
        if writes:
            raise RuntimeError(
                f"it was modified in place after it was kept ({writes} {'time' if writes == 1 else 'times'}): do not"
                " keep this output, or write to a copy."
            )
        return self._tensor.detach()  # a new alias each time: it becomes the output of another node


class SitePasses:
    """The runs of one region in which the outputs of some heavy operations are kept.

    Args:
        name: of the region, for errors.
        answers: what becomes of the outputs; those that are not named are computed again.
        group: takes the outputs of `MUST_SWAP`.
        missing: told the key of an operation that `answers` does not know.
    """

    def __init__(
        self,
        name: str,
        answers: Mapping[Key, CheckpointPolicy],
        group: Group,
        missing: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._name, self._answers, self._group, self._missing = name, answers, group, missing
        # What a layout exchanges may be shared with what was exchanged before the region: only who keeps it counts it.
        self.exchanges = any(key[0] == EXCHANGE and answer in KEEPS for key, answer in answers.items())
        # A mode looks for functions, which every call of torch in the region pays for.
        self.functions = any(is_function(key[0]) and answer in KEEPS for key, answer in answers.items())
        self._reached: list[Key] = []
        self._kept: dict[int, Packed] = {}
        self._calls: dict[int, tuple[list[Role], list[Any], tuple[T, ...] | None]] = {}
        """Of functions, by position: what they saved, the layouts of their arguments, random numbers after them."""
        self._watched: Watched | None = None
        self._swapping = False

    @contextmanager
    def first(self, walk: Walk) -> Iterator[None]:
        """Enter the frame of the forward."""
        self._walk = walk
        outputs = _First(self)
        with frame(outputs=outputs), Calls(outputs) if self.functions else nullcontext():
            yield
        outputs.over = True
        self._group.finish()

    @contextmanager
    def again(self, filling: Filling) -> Iterator[None]:
        """Enter the frame in which the outputs are handed back."""
        outputs = _Again(self, filling)
        try:
            with frame(outputs=outputs), Calls(outputs) if self.functions else nullcontext():
                yield
        finally:
            if not keeps_graph():  # those that this run did not reach before it ended
                self._kept.clear()

    def pack(self, index: int, tensor: T) -> Packed | None:
        """Let saved tensors be computed again, but for what functions save whose outputs are kept."""
        if self._watched is None or self._watched.note(index, tensor):
            return None
        return self._group.out(tensor) if self._swapping else Kept(tensor)

    def call(self, key: Key, site: Site) -> T:
        """Call a function in the forward, and keep its output if it is to be kept."""
        answer = self._answers.get(key)
        if answer not in KEEPS:
            out = site.run()
        else:
            self._swapping = answer is CheckpointPolicy.MUST_SWAP
            out = self.watch(site)
        self.keep(key, out)
        return out

    def watch(self, site: Site) -> T:
        """Call a function, and note what it saves."""
        watched = self._watched = Watched(site)
        try:
            with self._walk.opaque(site.tensors):
                out = site.run()
        finally:
            self._watched = None
        self._walk.computed([out])
        layouts = [layout_of(each)[:2] for each in site.tensors]
        self._calls[len(self._reached)] = watched.roles, layouts, random_state() if site.random else None
        return out

    def call_again(self, position: int, key: Key, site: Site, filling: Filling) -> T:
        """Return a function's output in the second run."""
        kept = self._taken(position, key)
        if position not in self._calls:
            return site.run()
        roles, layouts, random = self._calls[position]
        with filling.walk.opaque(site.tensors):
            if kept is None or layouts != [layout_of(each)[:2] for each in site.tensors]:
                out = site.run()
            else:
                if random is not None:
                    set_random_state(random)
                out = hand_back(site, kept, roles, filling)
        filling.walk.computed([out])
        return out

    def keep(self, key: Key, out: T) -> None:
        """Note the output of an operation that the forward reaches, and keep it if it is to be kept."""
        position = len(self._reached)
        self._reached.append(key)
        answer = self._answers.get(key)
        if answer is None:
            self._missing(key)
        elif answer in KEEPS:
            with without_torch_function():
                swapped = answer is CheckpointPolicy.MUST_SWAP
                self._kept[position] = self._group.out(out) if swapped else KeptOutput(out)

    def hand_back(self, position: int, key: Key, compute: Callable[[], T]) -> T:
        """Return the output that was kept for this operation, or compute it where none was."""
        out = self._taken(position, key)
        return compute() if out is None else out

    def _taken(self, position: int, key: Key) -> T | None:
        """Return the output that was kept for this operation, if one was.

        Raises:
            RuntimeError: the forward reached another operation here, or the output was written to.
        """
        if position >= len(self._reached) or self._reached[position] != key:
            first = show(self._reached[position]) if position < len(self._reached) else "none"
            raise RuntimeError(
                f"The recomputation of {self._name} reached {show(key)} as heavy operation {position} where its forward"
                f" reached {first}: it took another path. What it computes may depend on its arguments, its"
                " parameters and torch's random numbers alone."
            )
        kept = self._kept.get(position) if keeps_graph() else self._kept.pop(position, None)
        if kept is None:
            return None
        try:
            return kept.load()
        except RuntimeError as error:
            raise RuntimeError(f"The output of {show(key)} in {self._name}: {error}") from error


class _First:
    def __init__(self, passes: SitePasses) -> None:
        self._passes, self._ordinals = passes, Ordinals()
        self.over = False
        """A region inside of this one that runs again in backward, in the frame it was in, is not in the forward."""

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        out = compute()
        if self.over or (site == EXCHANGE and not self._passes.exchanges):
            return out
        self._passes.keep(self._ordinals.key(site), out)
        return out

    def call(self, site: Site) -> T:
        return site.run() if self.over else self._passes.call(self._ordinals.key(site.name), site)


class _Again:
    def __init__(self, passes: SitePasses, filling: Filling) -> None:
        self._passes, self._filling, self._ordinals, self._position = passes, filling, Ordinals(), 0

    def output(self, site: str | None, compute: Callable[[], T]) -> T:
        if site == EXCHANGE and not self._passes.exchanges:
            return compute()
        position, self._position = self._position, self._position + 1
        return self._passes.hand_back(position, self._ordinals.key(site), compute)

    def call(self, site: Site) -> T:
        position, self._position = self._position, self._position + 1
        return self._passes.call_again(position, self._ordinals.key(site.name), site, self._filling)
