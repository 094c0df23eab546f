"""Optimizers of PyTorch, and their states on the host, which visit the device in slices.

Note [Slices]
    A slice is some parameters of one group, whose states are one piece of the host's memory and, during their visit,
    one piece of the device's: a *slot*. Three slots take turns, so that one slice is updated while the next arrives
    and the one before leaves. A copy to a slot waits for the copy from it before; an update waits for the copy to its
    slot; a copy to the host waits for the update. Slots and the host's memory are allocated once, and between visits
    the optimizer's ``state`` has views of the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hp_optim.options import parameter_names
from hp_optim.swapping import SwapOptimizerConfig, check_state_keys, cut_in_slices
from hp_optim.torch.adamw import AdamW
from hp_optim.torch.exchanges.bucket import local_device
from hp_optim.torch.muon import Muon
from hp_optim.torch.states.blocks import Block, Members
from hp_optim.torch.states.momenta import Event, Pairs, SwappedMomenta, Transfers, aligned, held, part, release
from hp_platform import get_platform
from hp_platform.extend import CopyLink
from hp_platform.torch.internals import without_torch_function

_SLOTS = 3
_KINDS: dict[type, tuple[str, ...]] = {AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), Muon: ("momentum_buffer",)}


def swap(optimizers: Sequence[Any], config: SwapOptimizerConfig, link: CopyLink) -> None:
    for optimizer in optimizers:
        if type(optimizer) not in _KINDS:
            raise TypeError(
                f"swap_optimizer: takes an AdamW or a Muon of hp_optim, or a ChainedOptimizer of these, got"
                f" {type(optimizer).__module__}.{type(optimizer).__qualname__}. hp_optim.AdamW loads the state of"
                " torch.optim.AdamW"
            )
        if isinstance(optimizer._places, (SwappedBlocks, SwappedMomenta)):
            raise RuntimeError(f"swap_optimizer: this {type(optimizer).__name__} is swapped already")
        for number, group in enumerate(optimizer.param_groups):
            _check_devices(group, number)
    check_state_keys(config.state_keys, [key for optimizer in optimizers for key in _KINDS[type(optimizer)]])
    for optimizer in optimizers:
        transfers = Transfers(link, type(optimizer).__name__)
        with torch.no_grad(), without_torch_function():
            if isinstance(optimizer, AdamW):
                optimizer._places = SwappedBlocks(config, transfers)
                optimizer._lay_out([], range(len(optimizer.param_groups)))
            elif config.state_keys is None or "momentum_buffer" in config.state_keys:
                optimizer._places, optimizer._plan = SwappedMomenta(config, transfers), None
                for group in optimizer.param_groups:
                    optimizer._places.place(group["params"], optimizer.state)


def _check_devices(group: dict[str, Any], number: int) -> None:
    kind = get_platform().devices.kind
    for name, parameter in zip(parameter_names(group, number), group["params"]):
        if kind != "cpu" and local_device(parameter).type == "cpu":
            raise ValueError(
                f"swap_optimizer: parameter {name!r} is on the host, and its states are there, too. Leave it out, or"
                " train without CPUOffloadPolicy"
            )


class _Slot:
    """A piece of the device's memory that slices use in turn.

    Attributes:
        memory: its bytes.
        free: when the last slice that left it is on the host.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free: Event = None


class SwappedBlocks:
    """Blocks of AdamW whose states are on the host, but for small ones.

    Args:
        config: which states, and in how many slices.
        transfers: copies them.
    """

    def __init__(self, config: SwapOptimizerConfig, transfers: Transfers) -> None:
        self.config, self.transfers = config, transfers

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `hp_optim.torch.states.blocks.Resident`."""
        return held(state_dict, _KINDS[AdamW])

    def settle(self) -> None:
        """Wait for the copies."""
        self.transfers.synchronize()

    def moves(self, key: str) -> bool:
        """Tell whether a state is moved."""
        return self.config.state_keys is None or key in self.config.state_keys

    def added(self, blocks: list[Block], members: list[Members], state: Any) -> list[Block]:
        """Return blocks of all parameters, those of more among them, cut anew; see `Resident`."""
        if blocks and not members:
            return blocks
        self.transfers.synchronize()
        every = [*((block.group, block.parameters, block.names) for block in blocks), *members]
        small: list[Members] = []
        large: list[tuple[Members, int]] = []
        for group, parameters, names in every:
            numbers = range(len(parameters))
            own = (group, parameters, names)
            large += [(own, at) for at in numbers if parameters[at].numel() >= self.config.min_numel]
            kept = [at for at in numbers if parameters[at].numel() < self.config.min_numel]
            if kept:
                small.append((group, [parameters[at] for at in kept], [names[at] for at in kept]))
        for _, parameters, _ in every:
            for parameter in parameters:
                release(state[parameter])
        return [*(Block(*each, state) for each in small), *self._slices(large, state)]

    def _slices(self, large: list[tuple[Members, int]], state: Any) -> list[Slice]:
        def nbytes(item: tuple[Members, int]) -> int:
            (group, parameters, _), at = item
            keys = filter(self.moves, _KINDS[AdamW][: 3 if group["amsgrad"] else 2])
            return aligned(parameters[at].nbytes) * len(list(keys))

        target = sum(map(nbytes, large)) / self.config.swap_times
        cut: list[Members] = []
        for items in cut_in_slices(large, nbytes, target):
            by_members: dict[int, tuple[Members, list[int]]] = {}
            for members, at in items:
                by_members.setdefault(id(members), (members, []))[1].append(at)
            for (group, parameters, names), numbers in by_members.values():
                cut.append((group, [parameters[at] for at in numbers], [names[at] for at in numbers]))
        if not cut:
            return []
        most = max(sum(nbytes((members, at)) for at in range(len(members[1]))) for members in cut)
        slots = [_Slot(most, cut[0][1][0].device) for _ in range(min(_SLOTS, len(cut)))]
        return [Slice(members, state, number, slots[number % len(slots)], self) for number, members in enumerate(cut)]

    def visit(self, blocks: list[Block], update: Callable[[Block], None]) -> None:
        """Update each block, with its states on the device."""
        slices = [block for block in blocks if isinstance(block, Slice)]
        if slices:
            slices[0].load()
        for block in blocks:
            if not isinstance(block, Slice):
                update(block)
        for number, each in enumerate(slices):
            if number + 1 < len(slices):
                slices[number + 1].load()
            each.visit(update)


class Slice(Block):
    """A block whose states are on the host between visits; see Note [Slices].

    Args:
        members: the group, its parameters and their names.
        state: the optimizer's.
        number: of the slice.
        slot: its place on the device.
        places: says which states are moved, and copies them.
    """

    def __init__(self, members: Members, state: Any, number: int, slot: _Slot, places: SwappedBlocks) -> None:
        self.number, self.slot, self.transfers = number, slot, places.transfers
        self.moves = places.moves
        self.slot_starts: dict[str, int] = {}
        self.used = 0
        super().__init__(*members, state)
        packed: Pairs = [(slot.memory[: self.used], self.host)]
        numbers = range(len(self.parameters))
        each = [(self._view(self.flat[key], n), self.views[key][n]) for key in self.slot_starts for n in numbers]
        self.pairs: Pairs = packed if places.config.packed_swap else each

    def _memory(self, key: str) -> torch.Tensor:
        if not self.moves(key):
            return super()._memory(key)
        self.slot_starts[key] = self.used
        self.used += aligned(self.offsets[-1] * self.itemsize)
        return self._part(self.slot.memory, key)

    def _part(self, memory: torch.Tensor, key: str) -> torch.Tensor:
        return part(memory, self.slot_starts[key], self.offsets[-1], self.parameters[0].dtype)

    def _shown_memory(self) -> dict[str, torch.Tensor]:
        self.host = self.transfers.host(self.used)
        return {key: self._part(self.host, key) if key in self.slot_starts else flat for key, flat in self.flat.items()}

    def adopt(self) -> None:
        """Take over states that were set from outside, into the host's memory; see `Block.adopt`."""
        if not self.contiguous and [parameter.stride() for parameter in self.parameters] != self.strides:
            raise RuntimeError(
                f"swap_optimizer: the elements of a parameter among {', '.join(self.names[:5])} lie in memory in"
                " another order than before. Change memory formats before you make the optimizer"
            )
        if not self._shows():
            self.transfers.synchronize()
            self._lay_out()

    def _add_largest(self) -> None:
        raise RuntimeError("swap_optimizer: amsgrad was switched on afterwards; set it when you make the AdamW")

    def load(self) -> None:
        """Begin to copy the states to the slot."""
        self.arrived = self.transfers.load(self.number, self.pairs, self.slot.free)

    def visit(self, update: Callable[[Block], None]) -> None:
        """Update the parameters, and begin to copy the states back."""
        if self.arrived is not None:
            self.arrived.wait()
        self.transfers.note("update", self.number)
        try:
            update(self)
        finally:
            back = [(source, target) for target, source in self.pairs]
            self.slot.free = self.transfers.store(self.number, back)


State = dict[str, Any]


def named_parameters(model: nn.Module | Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters()) if isinstance(model, nn.Module) else list(model)


CLASSES = {"adamw": AdamW, "muon": Muon}


def set_lr(group: State, value: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def check_gradients(gradients: object) -> None:
    """Raise for gradients that are passed.

    Raises:
        TypeError: see above.
    """
    if gradients is not None:
        raise TypeError("ChainedOptimizer.step: on PyTorch the gradients are the parameters' .grad; call step()")


def step(optimizer: Optimizer, gradients: Sequence[Any] | None) -> None:
    optimizer.step()


def zero_grad(optimizer: Optimizer, set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)


def states(optimizer: Optimizer) -> list[State]:
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


def load(optimizer: Optimizer, states: Sequence[State], groups: Sequence[State]) -> None:
    packed = optimizer.state_dict()
    packed["state"] = {number: dict(state) for number, state in enumerate(states) if state}
    for group, values in zip(packed["param_groups"], groups, strict=True):
        group.update(values)
    optimizer.load_state_dict(packed)
