"""Muon's momenta on the host between steps, and the copies of states between host and device.

Note [Momenta on the host]
    Matrices are exchanged all at once, so all momenta are on the device in a step: they arrive there slice by slice, in
    new memory that is let go when they are on the host again. Between visits the optimizer's ``state`` has views of the
    host's memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_optim.swapping import OwnLink, SwapOptimizerConfig, cut_in_slices
from hp_optim.torch.states.blocks import view_like, wrapped_like
from hp_platform.extend import CopyLink
from hp_platform.torch.devices import empty_on_host
from hp_platform.torch.internals import without_torch_function

Event = Any
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_ALIGNMENT = 64
"""Bytes, at multiples of which states begin in a piece of memory."""


class Transfers:
    """Copies of an optimizer's slices; on CPU they are done at once.

    Args:
        link: the streams, and a log.
        name: of the optimizer, for the log.
    """

    def __init__(self, link: CopyLink, name: str) -> None:
        self.link, self.name = link, name
        self.last: list[Event] = [None, None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Transfers, (OwnLink(), self.name)  # a copy has streams of its own

    def note(self, what: str, number: int) -> None:
        """Take note of an event."""
        self.link.note(what, f"{self.name}[{number}]")

    def host(self, nbytes: int) -> torch.Tensor:
        """Allocate memory of the host, pinned where the device copies from it aside."""
        return empty_on_host(nbytes, torch.uint8)

    def load(self, number: int, pairs: Pairs, after: Event = None) -> Event:
        """Copy a slice to the device; return when it is there.

        Args:
            number: of the slice.
            pairs: memory of the device, and of the host.
            after: the copy waits for this event. Default: for all that is issued so far.
        """
        self.note("load", number)
        return self._copy(1, pairs, pairs[0][0].device, after)

    def store(self, number: int, pairs: Pairs, *, let_go: bool = False) -> Event:
        """Copy a slice to the host, after all that is issued so far; return when it is there.

        Args:
            number: of the slice.
            pairs: memory of the host, and of the device.
            let_go: the latter is let go at once.
        """
        self.note("store", number)
        done, stream = self._copy(0, pairs, pairs[0][1].device, None), self.link.streams[0]
        if done is not None and stream is not None and let_go:
            for _, source in pairs:
                source.record_stream(stream)
        return done

    def _copy(self, direction: int, pairs: Pairs, device: torch.device, after: Event) -> Event:
        stream = self.link.streams[direction]
        if stream is None or device.type == "cpu":
            for target, source in pairs:
                target.copy_(source)
            return None
        if after is None:
            stream.wait_stream(torch.get_device_module(device.type).current_stream(device))
        else:
            stream.wait_event(after)
        if after is None and direction == 1 and self.last[0] is not None:
            stream.wait_event(self.last[0])  # it may write what is read here
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self.last[direction] = stream.record_event()
        return self.last[direction]

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        for event in self.last:
            if event is not None:
                event.synchronize()


def aligned(nbytes: int) -> int:
    """Return how far it is to where the next state begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def part(memory: torch.Tensor, start: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of a piece of memory.

    Args:
        memory: bytes.
        start: in bytes, aligned.
        elements: how many.
        dtype: of them.
    """
    return memory[start : start + elements * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Held:
    """A state that is loaded, which torch would copy to the device."""

    value: torch.Tensor


def held(state_dict: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a state that is to be loaded, of which torch moves and converts nothing that has these keys."""
    states = {
        number: {k: Held(v) if k in keys and isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def release(state: dict[str, Any]) -> None:
    """Put the tensors of a loaded state in place of what held them."""
    state.update({key: value.value for key, value in state.items() if isinstance(value, Held)})


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
        with torch.no_grad(), without_torch_function():
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
                pairs = [(shelf.memory, memory.set_(storage))]
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
