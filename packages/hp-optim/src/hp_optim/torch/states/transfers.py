"""Copies of states between the device and the host, on a link's streams where the device has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hp_optim.swapping import CopyLink, OwnLink
from hp_platform import get_platform

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
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=get_platform().devices.capabilities.pinned_memory)

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
