"""Muon's momenta on the host between steps.

Note [Momenta on the host]
    Matrices are exchanged all at once, so all momenta are on the device in a step: they arrive there slice by slice, in
    new memory that is let go when they are on the host again. Between visits the optimizer's ``state`` has views of the
    host's memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_optim.swapping import SwapOptimizerConfig, cut_in_slices
from hp_optim.torch.states.blocks import view_like, wrapped_like
from hp_optim.torch.states.transfers import Transfers, aligned, held, part, release

# ---- momenta on the device ----


class Momenta:
    """Momenta in the optimizer's state, read and written by a step."""

    def place(self, parameters: Sequence[torch.Tensor], state: Any) -> None:
        """Take over the momenta that the state has now, in their parameters' dtype and on their device."""
        for parameter in parameters:
            own = state[parameter]
            buffer = own.get("momentum_buffer")
            if buffer is not None and (buffer.dtype, buffer.device) != (parameter.dtype, parameter.device):
                own["momentum_buffer"] = torch.empty_like(parameter, requires_grad=False).copy_(buffer)

    def keep(self, parameters: Container[torch.Tensor]) -> None:
        """Let go what is not of one of these parameters."""

    def settle(self) -> None:
        """Wait until the states can be read."""

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state that is to be loaded, without what torch would move or convert."""
        return state_dict

    def scaled(
        self, parameters: Sequence[torch.Tensor], states: Sequence[Any], factors: list[float]
    ) -> list[torch.Tensor]:
        """Return new tensors: each momentum times its factor.

        Args:
            parameters: those that have elements here.
            states: of each.
            factors: one for each.
        """
        return list(torch._foreach_mul([state["momentum_buffer"] for state in states], factors))

    def store(self, parameters: Sequence[torch.Tensor], states: Sequence[Any], momenta: list[torch.Tensor]) -> None:
        """Keep the new momenta.

        Args:
            parameters: some of those that `scaled` had.
            states: of each.
            momenta: the tensors that `scaled` returned for them, changed.
        """
        torch._foreach_copy_([state["momentum_buffer"] for state in states], momenta)


_plain = torch._C.DisableTorchFunctionSubclass


@dataclass
class _Shelf:
    """Momenta of some parameters in one piece of the host's memory.

    Attributes:
        number: of the slice.
        memory: its bytes.
        views: of each parameter; DTensors count as their local tensors.
        starts: where they begin, in bytes.
    """

    number: int
    memory: torch.Tensor
    views: dict[torch.Tensor, torch.Tensor]
    starts: dict[torch.Tensor, int]


class SwappedMomenta(Momenta):
    """Momenta of Muon on the host, but for small ones; see Note [Momenta on the host].

    Args:
        config: how many slices.
        transfers: copies them.
    """

    def __init__(self, config: SwapOptimizerConfig, transfers: Transfers) -> None:
        self.config, self.transfers = config, transfers
        self.shelves: dict[torch.Tensor, _Shelf] = {}
        self.count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SwappedMomenta, (self.config, self.transfers)  # a copy places its momenta when it needs them

    def keep(self, parameters: Container[torch.Tensor]) -> None:
        """Let shelves of other parameters go."""
        self.shelves = {each: shelf for each, shelf in self.shelves.items() if each in parameters}

    def settle(self) -> None:
        """Wait for the copies."""
        self.transfers.synchronize()

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `Momenta`."""
        return held(state_dict, ("momentum_buffer",))

    def place(self, parameters: Sequence[torch.Tensor], state: Any) -> None:
        """Move momenta to the host that are not there yet."""
        self.transfers.synchronize()
        with torch.no_grad(), _plain():
            self._place(parameters, state)

    def _place(self, parameters: Sequence[torch.Tensor], state: Any) -> None:
        moved = []
        for parameter in parameters:
            own = state[parameter]
            release(own)
            shelf = self.shelves.get(parameter)
            if shelf is not None and "momentum_buffer" in own and _fits(shelf.views[parameter], parameter):
                self._take_over(shelf, parameter, own)
            elif "momentum_buffer" in own and parameter.numel() >= max(1, self.config.min_numel):
                moved.append(parameter)
        target = sum(parameter.nbytes for parameter in moved) / self.config.swap_times
        for members in cut_in_slices(moved, lambda parameter: parameter.nbytes, target):
            self._shelve(members, state)

    def _shelve(self, members: list[torch.Tensor], state: Any) -> None:
        starts, end = {}, 0
        for parameter in members:
            starts[parameter] = end
            end += aligned(parameter.nbytes)
        memory = self.transfers.host(end)
        views = {each: wrapped_like(view, each) for each, view in self._views(memory, starts).items()}
        shelf = _Shelf(self.count, memory, views, starts)
        self.count += 1
        for parameter, view in shelf.views.items():
            view.copy_(state[parameter]["momentum_buffer"])
            state[parameter]["momentum_buffer"] = view
            self.shelves[parameter] = shelf

    def _views(self, memory: torch.Tensor, starts: dict[torch.Tensor, int]) -> dict[torch.Tensor, torch.Tensor]:
        return {
            parameter: view_like(part(memory, start, parameter.numel(), parameter.dtype), parameter)
            for parameter, start in starts.items()
        }

    def _take_over(self, shelf: _Shelf, parameter: torch.Tensor, own: dict[str, Any]) -> None:
        """Copy a momentum that was set from outside."""
        if own["momentum_buffer"] is not shelf.views[parameter]:
            self.transfers.synchronize()
            shelf.views[parameter].copy_(own["momentum_buffer"])
            own["momentum_buffer"] = shelf.views[parameter]

    def scaled(
        self, parameters: Sequence[torch.Tensor], states: Sequence[Any], factors: list[float]
    ) -> list[torch.Tensor]:
        """Bring momenta to the device, each times its factor; see `Momenta.scaled`."""
        here = [at for at, each in enumerate(parameters) if each not in self.shelves]
        tensors: dict[torch.Tensor, torch.Tensor] = {}
        if here:
            own = super().scaled(
                [parameters[at] for at in here], [states[at] for at in here], [factors[at] for at in here]
            )
            tensors.update(zip((parameters[at] for at in here), own))
        arrived = []
        for shelf, members in self._by_shelf(parameters):
            memory = torch.empty_like(shelf.memory, device=members[0].device)
            views = self._views(memory, shelf.starts)
            each = [(views[parameter], shelf.views[parameter]) for parameter in members]
            whole = self.config.packed_swap and len(members) == len(shelf.views)
            arrived.append(self.transfers.load(shelf.number, [(memory, shelf.memory)] if whole else each))
            tensors.update((parameter, views[parameter]) for parameter in members)
        for event in arrived:
            if event is not None:
                event.wait()
        moved = [at for at, each in enumerate(parameters) if each in self.shelves]
        if moved:
            own, numbers = [tensors[parameters[at]] for at in moved], [factors[at] for at in moved]
            if own[0].dtype.itemsize < 4:  # on CPU a product in place rounds otherwise
                torch._foreach_copy_(own, torch._foreach_mul(own, numbers))
            else:
                torch._foreach_mul_(own, numbers)
        return [tensors[each] for each in parameters]

    def store(self, parameters: Sequence[torch.Tensor], states: Sequence[Any], momenta: list[torch.Tensor]) -> None:
        """Begin to copy momenta to the host; see `Momenta.store`."""
        new = dict(zip(parameters, momenta))
        here = [at for at, each in enumerate(parameters) if each not in self.shelves]
        if here:
            super().store([parameters[at] for at in here], [states[at] for at in here], [momenta[at] for at in here])
        for shelf, members in self._by_shelf(parameters):
            pairs = [(shelf.views[parameter], new[parameter]) for parameter in members]
            if self.config.packed_swap and len(members) == len(shelf.views):
                storage = new[members[0]].untyped_storage()  # that of `scaled`: all momenta of the slice are in it
                memory = torch.empty(0, dtype=torch.uint8, device=members[0].device)
                pairs = [(shelf.memory, memory.set_(storage))]  # type: ignore[call-overload]
            self.transfers.store(shelf.number, pairs, let_go=True)

    def _by_shelf(self, parameters: Sequence[torch.Tensor]) -> list[tuple[_Shelf, list[torch.Tensor]]]:
        sorted_: dict[int, tuple[_Shelf, list[torch.Tensor]]] = {}
        for parameter in parameters:
            shelf = self.shelves.get(parameter)
            if shelf is not None:
                sorted_.setdefault(shelf.number, (shelf, []))[1].append(parameter)
        return list(sorted_.values())


def _fits(view: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (view.shape, view.dtype) == (parameter.shape, parameter.dtype)
