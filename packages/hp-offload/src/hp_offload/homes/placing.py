"""place: which modules have a home, checked by name before anything moves; and what a report tells of their visits."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from hp_offload.homes.cache import Step
from hp_offload.homes.planning import ParameterVisits, check_cache
from hp_offload.port import Module, port
from hp_platform import get_platform
from hp_platform.extend import agree, share_bytes

_HOMES = ("host",)


@dataclass(frozen=True)
class PlacedReport:
    """What the cache of a placed model holds, and what its last step moved.

    Args:
        blocks: bytes of the parameters of each block; a shared parameter counts in each.
        host: bytes of parameters that live on the host.
        cache: bytes of the device that blocks visit.
        ahead: how many uses ahead a block is copied.
        order: the blocks in the order in which the last step used them: forward, then backward where it needs them.
        fetched: bytes that the last step copied to the device.
        evicted: bytes of them that left the cache before the step was over.
        peak: the most bytes that were there.
        gradients: bytes of gradients that left to the host.
        planned: the last step followed the order of the step before it, copying ahead.
    """

    blocks: Mapping[str, int]
    host: int
    cache: int
    ahead: int
    order: tuple[str, ...]
    fetched: int
    evicted: int
    peak: int
    gradients: int
    planned: bool


class Visits(Protocol):
    """What a framework does for placed modules; made by `Port.place`."""

    @property
    def last(self) -> Step:
        """What the last whole step did."""
        ...

    @property
    def gradients(self) -> int:
        """Bytes of gradients that left to the host in the last whole step."""
        ...

    def resize(self, budget: int) -> None:
        """Give the cache another number of bytes."""
        ...


class Parts(Protocol):
    """The parameters of modules that get a home; made by `Port.find_parts`.

    Attributes:
        of: the names of the parts of each block.
        sizes: bytes of each part.
    """

    of: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]


class Placed:
    """A model some of whose modules have their home on the host; what `place` returns."""

    def __init__(self, parts: Parts, cache: int, ahead: int, visits: Visits) -> None:
        self._parts, self._cache, self._ahead, self._visits = parts, cache, ahead, visits

    def report(self) -> PlacedReport:
        """Return what the last step moved; without a step yet, what is to be moved."""
        last = self._visits.last
        return PlacedReport(
            blocks=_bytes_of(self._parts),
            host=sum(self._parts.sizes.values()),
            cache=self._cache,
            ahead=self._ahead,
            order=last.order,
            fetched=last.fetched,
            evicted=last.evicted,
            peak=last.peak,
            gradients=self._visits.gradients,
            planned=last.planned,
        )

    def visits(self) -> ParameterVisits:
        """Return the uses of the last step, for `plan_memory`.

        Raises:
            RuntimeError: there was no step yet.
        """
        if not self._visits.last.order:
            raise RuntimeError("Placed.visits: the order of uses is that of a step, and there was none yet.")
        return ParameterVisits(
            self._visits.last.order, self._parts.of, self._parts.sizes, self._visits.gradients, self._ahead
        )

    def resize(self, cache: int) -> None:
        """Give the cache another number of bytes, between steps.

        Raises:
            ValueError: the largest block doesn't fit in it.
        """
        check_cache(_bytes_of(self._parts), cache, self._ahead)
        self._cache = cache
        self._visits.resize(cache)


def place(model: Module, homes: Mapping[str, str], *, cache: int | None = None, ahead: int = 1) -> Placed:
    """Let parameters of a model live on the host, and visit the device block by block.

    A block is a module that a pattern matches. Its parameters, their gradients and so the states of any optimizer are
    in the host's memory: `parameters()`, `state_dict()` and `grad` show these, and a step of an optimizer is computed
    by the host. When the block runs, and when its backward needs them, its parameters are copied to a cache on the
    device. The first step finds out in which order blocks are used; from the second on a block is copied `ahead` uses
    ahead, beside the computation, and what leaves the cache is what is used again last (Belady, 1966). A gradient
    leaves as soon as it is complete. Copies change neither dtype nor bits, so neither do losses and weights, where the
    host's optimizer computes as the device's. On CPU the same program runs, with copies that are done at once.

    What has no home moves to this process's device, with all buffers; build the model on the CPU, so that the device
    never holds all of it. A call of `model` is what begins a step: call the model itself, or what calls it.

        >>> placed = place(model, {"layers.*": "host", "embed": "host", "head": "host"}, cache=2 * 2**30)
        >>> model(x).backward()                  # p.grad is on the host
        >>> optimizer.step()                     # any optimizer of torch's
        >>> placed.report().fetched              # bytes that the step copied to the device

    Args:
        model: a module, changed in place; names of modules and parameters stay. Every rank calls this.
        homes: the home of the modules whose name matches, `"host"`, by name or pattern; `*` is anything in one dotted
            part. Modules that match may not be inside of each other.
        cache: bytes of the device for parameters that visit. Default: room for the largest block `ahead + 1` times.
        ahead: how many uses ahead a block is copied; 0 copies when it is used.

    Returns:
        What reports on the visits.

    Raises:
        TypeError: not a module, or `homes` is no mapping.
        ValueError: an unknown home, a pattern that matches nothing, or two that match modules inside of each other; a
            cache that the largest block doesn't fit in; a parameter that a module without a home shares; a parameter
            without memory. On all ranks, before anything moves.
        NotImplementedError: parameters that are sharded (hp_fsdp's, DTensors) or of another
            class; modules that keep their parameters in a list of their own (`nn.LSTM`); on MindSpore.
        RuntimeError: the model has homes already. In a step: a parameter was replaced or written to.
    """
    if not port().is_module(model):
        raise TypeError(f"place takes a module, got {type(model).__name__}.")
    checked: list[tuple[Parts, int]] = []

    def check() -> bytes:
        names = blocks_at_home(homes, port().module_names(model), type(model).__name__)
        parts = port().find_parts(model, names)
        sizes = _bytes_of(parts)
        budget = (ahead + 1) * max(sizes.values()) if cache is None else cache
        check_cache(sizes, budget, ahead)
        checked.append((parts, budget))
        return b""

    groups = get_platform().groups
    group = groups.default_group() if groups.is_initialized() else None
    agree(check, _failed, functools.partial(share_bytes, group=group))
    parts, budget = checked[0]
    return Placed(parts, budget, ahead, port().place(model, parts, budget, ahead))


def blocks_at_home(homes: Mapping[str, str], names: Collection[str], model: str) -> list[str]:
    """Return the names of the modules that have a home.

    Args:
        homes: by pattern.
        names: of all modules.
        model: names the model in errors.

    Raises:
        TypeError, ValueError, NotImplementedError: as `place`.
    """
    if not isinstance(homes, Mapping):
        raise TypeError(f"place: homes maps patterns to homes, as {{'layers.*': 'host'}}; got {homes!r}.")
    if not homes:
        raise ValueError("place: homes is empty; name the modules that live on the host, as {'layers.*': 'host'}.")
    found: dict[str, str] = {}
    for pattern, home in homes.items():
        _check_home(pattern, home)
        matched = [pattern] if pattern in names else [name for name in names if _matches(pattern, name)]
        if not matched:
            near = difflib.get_close_matches(pattern, [name for name in names if name], n=3)
            there = f"near: {', '.join(near)}" if near else f"there are {', '.join([*names][1:6])}"
            raise ValueError(f"place: {pattern!r} matches no module of {model}; {there}")
        for name in matched:
            for other, first in found.items():
                if name == other or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                    raise ValueError(
                        f"place: {first!r} and {pattern!r} overlap: {other!r} and {name!r} are the same module, or one"
                        " is inside of the other. A module has one home; leave one of the patterns out."
                    )
            found[name] = pattern
    return [name for name in names if name in found]


def _check_home(pattern: str, home: Any) -> None:
    if home == "neighbour":
        raise ValueError(
            f"place: {pattern!r} has the home 'neighbour', whose memory is as full as this rank's: each would take what"
            " it gives. Use 'host', or fully_shard, which spreads parameters over ranks."
        )
    if home not in _HOMES:
        raise ValueError(
            f"place: {pattern!r} has the unknown home {home!r}; the one home is 'host'. What has no home is on the"
            " device."
        )


def _matches(pattern: str, name: str) -> bool:
    ours, theirs = pattern.split("."), name.split(".")
    return bool(name) and len(ours) == len(theirs) and all(map(fnmatchcase, theirs, ours))


def _bytes_of(parts: Parts) -> dict[str, int]:
    return {block: sum(parts.sizes[part] for part in own) for block, own in parts.of.items()}


def _failed(texts: Mapping[int, str], error: Exception | None) -> Exception:
    if error is not None:
        return error
    rank, text = next(iter(texts.items()))
    return RuntimeError(f"place failed on rank {rank}, so it moves nothing on any rank: {text}")
