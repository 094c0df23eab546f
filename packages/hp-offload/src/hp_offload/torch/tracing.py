"""One step of a model traced: names, bytes and times of what it saves for backward.

The trace of a step and the blocks that follow a plan name by the same rules, so that a plan says the same to both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_offload.saved import Saved, block_of
from hp_offload.torch.regions.functions import is_heavy
from hp_offload.torch.regions.sites import Computed
from hp_offload.torch.regions.state import random_state, set_random_state
from hp_offload.torch.swapping import address_of, stays
from hp_platform import get_platform
from hp_platform.frames import frame
from hp_platform.torch.heavy import mark
from hp_platform.torch.internals import without_torch_function

T = torch.Tensor


class Sites:
    """The sites of what one run of a block saves; each storage has one.

    What the block is given has sites of its own, `"layers.3#given0"`: whether an input requires gradients, and so is
    left alone as parameters are, must not change the names of others.

    Args:
        name: of the block.
        given: its arguments.
    """

    def __init__(self, name: str, given: Any = ()) -> None:
        self.name, self.path = name, [name]
        self._given = {address_of(each) for each in tree_leaves(given) if isinstance(each, T)} - {0}
        self._counts: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}

    def site(self, tensor: T) -> tuple[str | None, bool]:
        """Return the site of a tensor's storage, None for a parameter's, and if it is saved here for the first time."""
        address = address_of(tensor)
        given = address in self._given
        if not address or (stays(tensor) and not given):
            return None, False
        known = self._storages.get(address)
        if known is not None and not known[0].expired():
            return known[1], False
        name = f"{self.name}#given" if given else f"{self.path[-1]}#"
        site = f"{name}{self._counts[name]}"
        self._counts[name] += 1
        self._storages[address] = StorageWeakRef(tensor.untyped_storage()), site
        return site, True


@contextlib.contextmanager
def walking(module: nn.Module, sites: Sites, prefix: str) -> Iterator[None]:
    """Let `sites` follow the calls of the modules in a module."""
    handles = []
    for name, child in module.named_modules():
        if not name:
            continue
        path = f"{prefix}.{name}" if prefix else name
        handles.append(child.register_forward_pre_hook(lambda *_, path=path: sites.path.append(path)))
        handles.append(child.register_forward_hook(lambda *_: _leave(sites), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave(sites: Sites) -> None:
    sites.path.pop()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model: modules whose name ends with the first number in it."""
    named = ((name, module) for name, module in model.named_modules() if name.rpartition(".")[2].isdigit())
    return {name: module for name, module in named if block_of(name) == name}


_REPEATS = 3
"""Steps: a first one is several times as slow as those that follow, so each operation counts by its fastest."""


class _Clock(TorchDispatchMode):
    """Notes the seconds that operations take, and at which of them and in which block a storage was computed."""

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self._sites = sites
        self._devices = get_platform().devices
        self.operations: list[Any] = []
        self.seconds: list[float] = []
        self.made: dict[int, tuple[int, str]] = {}

    @property
    def now(self) -> int:
        """The number of operations that have run."""
        return len(self.seconds)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self._devices.synchronize()
        self.seconds.append(time.perf_counter() - begin)
        self.operations.append(func)
        given = {address_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, T)}
        block = block_of(self._sites.path[-1])
        for each in tree_leaves(out):
            if isinstance(each, T) and address_of(each) not in given:
                self.made[address_of(each)] = self.now, block
        return out


@dataclass
class _Storage:
    """A storage that is saved."""

    site: str
    bytes: int
    made: int
    """Operations that had run, as `needed`."""
    inside: bool
    """It was computed in the block that saves it, and no other block saves it."""
    heavy: bool
    """A second run is handed it back if it is kept."""
    needed: int = 0
    aliases: list[str] = field(default_factory=list)


class _Packed:
    """A saved tensor in the traced step."""

    def __init__(self, tensor: T, storage: _Storage | None, clock: _Clock) -> None:
        self._tensor, self._storage, self._clock = tensor.detach(), storage, clock

    def load(self) -> T:
        if self._storage is not None:
            self._storage.needed = max(self._storage.needed, self._clock.now)
        return self._tensor


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[..., T] | None
) -> list[Saved]:
    """Run one step, and list what it saves in the order of saving."""
    sites = Sites("")
    clock = _Clock(sites)
    storages: dict[int, _Storage] = {}
    held = {address_of(each) for each in (*model.parameters(), *model.buffers())}
    held |= {address_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, T)}
    blocks = blocks_of(model)
    begins: dict[str, int] = {}
    per_block: dict[str, Sites] = {}

    def pack(tensor: T) -> _Packed:
        with without_torch_function():
            block = block_of(sites.path[-1])
            own = per_block.setdefault(block, Sites(block))
            own.path = sites.path
            site, new = own.site(tensor)
            address = address_of(tensor)
            if site is None or address in held:
                return _Packed(tensor, None, clock)
            known = storages.get(address)
            if known is None:
                made, where = clock.made.get(address, (0, ""))
                inside = block in blocks and where == block
                heavy = made > 0 and is_heavy(clock.operations[made - 1])
                known = storages[address] = _Storage(site, tensor.untyped_storage().nbytes(), made, inside, heavy)
            elif new:
                known.aliases.append(site)
                known.inside = False
            return _Packed(tensor, known, clock)

    def begin(name: str, given: Any) -> None:
        per_block[name] = Sites(name, given)
        if name in begins:
            raise NotImplementedError(
                f"trace_saved: the block {name!r} runs twice in a step, which no plan can tell apart."
            )
        begins[name] = clock.now

    handles = []
    for name, block in blocks.items():
        hook = functools.partial(lambda name, _, args, kwargs: begin(name, (args, kwargs)), name)
        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        mark(block)
    clocks = [clock]
    with _unchanged(model) as restart, torch.enable_grad():
        try:
            with saved_tensors_hooks(pack, _Packed.load), clock, walking(model, sites, ""), _as_planned():
                total = _total(model(*args, **kwargs), loss)
            with clock:
                total.backward()
        finally:
            for handle in handles:
                handle.remove()
        for _ in range(_REPEATS - 1):
            restart()
            clocks.append(_Clock(Sites("")))
            with clocks[-1], _as_planned():
                _total(model(*args, **kwargs), loss).backward()
    return _listed(storages, begins, _fastest(clocks))


def _as_planned() -> AbstractContextManager[Any]:
    """Let linear layers save what they save in blocks that follow a plan: inputs, not the copies that kernels need."""
    return frame(outputs=Computed())


def _fastest(clocks: list[_Clock]) -> list[float]:
    """Return the seconds until each operation of the first step, each by its fastest run."""
    alike = [each.seconds for each in clocks if each.operations == clocks[0].operations]
    return [0.0, *itertools.accumulate(map(min, *alike))] if len(alike) > 1 else [0.0, *itertools.accumulate(alike[0])]


def _listed(storages: Mapping[int, _Storage], begins: Mapping[str, int], until: list[float]) -> list[Saved]:
    saved: list[Saved] = []
    last = {block: until[begin] for block, begin in begins.items()}
    for each in sorted(storages.values(), key=lambda each: each.made):
        block, made = block_of(each.site), until[each.made]
        again, rerun = math.inf, 0.0
        if each.inside:
            since, own = max(made - last[block], 0.0), made - until[each.made - 1]
            again = min(own, since) if each.heavy else 0.0
            rerun, last[block] = since - again, made
        needed = max(until[each.needed] if each.needed else until[-1], made)
        saved.append(Saved(each.site, each.bytes, made, needed, again, swappable=each.inside, rerun=rerun))
        saved += [Saved(alias, 0, made, needed, math.inf, False, each.site) for alias in each.aliases]
    return saved


def _total(output: Any, loss: Callable[..., T] | None) -> T:
    """Return what the step differentiates."""
    if loss is not None:
        return loss(output)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), T):
        return output["loss"]
    found = [each for each in tree_leaves(output) if isinstance(each, T) and each.requires_grad]
    if not found:
        raise ValueError(
            "trace_saved: no tensor of the model's output requires gradients; pass loss=, a function of the output that"
            " returns what the step differentiates."
        )
    total: Any = sum(each.sum() for each in found)
    return total


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Leave gradients, buffers and random numbers as they were; yield what starts another step alike."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = random_state()

    def restart() -> None:
        set_random_state(random)
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    restart()
    try:
        yield restart
    finally:
        restart()
        for parameter, gradient in gradients:
            parameter.grad = gradient
