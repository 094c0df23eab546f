"""swap_optimizer: states on the host, which visit the device in slices during the step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hp_optim.chained import ChainedOptimizer
from hp_optim.port import port
from hp_platform import get_platform
from hp_platform.extend import CopyLink

Optimizer = Any
Stream = Any
T = TypeVar("T")


@dataclass(frozen=True)
class SwapOptimizerConfig:
    """Which states are on the host, and in how many slices a step copies them.

    Args:
        swap_times: number of slices, of about equal bytes; a parameter is in one. Three slices at most have memory of
            the device at a time.
        state_keys: the states that are moved, such as ``("exp_avg_sq",)``. Default: all but the step counter.
        min_numel: states of parameters with fewer elements on this rank stay on the device.
        packed_swap: copy a slice as one piece; else each state of each parameter by itself.

    Raises:
        ValueError: ``swap_times`` less than 1, ``min_numel`` less than 0, no ``state_keys``.
        TypeError: an option of another type.
    """

    swap_times: int = 16
    state_keys: Sequence[str] | None = None
    min_numel: int = 1024
    packed_swap: bool = True

    def __post_init__(self) -> None:
        for name, low in (("swap_times", 1), ("min_numel", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SwapOptimizerConfig: {name} must be an integer, got {value!r}")
            if value < low:
                raise ValueError(f"SwapOptimizerConfig: {name} must be at least {low}, got {value}")
        if not isinstance(self.packed_swap, bool):
            raise TypeError(f"SwapOptimizerConfig: packed_swap must be True or False, got {self.packed_swap!r}")
        if self.state_keys is None:
            return
        if isinstance(self.state_keys, str) or not all(isinstance(key, str) for key in self.state_keys):
            raise TypeError(
                f"SwapOptimizerConfig: state_keys must be a sequence of names such as ('exp_avg',), got"
                f" {self.state_keys!r}"
            )
        if not self.state_keys:
            raise ValueError("SwapOptimizerConfig: state_keys is empty; name the states, or leave it out to move all")
        object.__setattr__(self, "state_keys", tuple(self.state_keys))


_DEFAULT = SwapOptimizerConfig()


class OwnLink:
    """Streams for states alone."""

    def __init__(self) -> None:
        self._streams: tuple[Stream | None, Stream | None] | None = None

    @property
    def streams(self) -> tuple[Stream | None, Stream | None]:
        """Get the streams; they are made when they are first used."""
        if self._streams is None:
            devices = get_platform().devices
            aside = devices.capabilities.streams and devices.kind != "cpu"
            self._streams = (devices.stream(), devices.stream()) if aside else (None, None)
        return self._streams

    def note(self, what: str, name: str) -> None:
        """Take note of nothing."""


def swap_optimizer(
    optimizer: Optimizer, config: SwapOptimizerConfig = _DEFAULT, *, link: CopyLink | None = None
) -> Optimizer:
    """Move an optimizer's states to the host; its steps bring them to the device slice by slice.

    While a slice is updated, the next one arrives and the one before it leaves, on streams of their own and between
    buffers that are allocated once. Weights and states have the bits of the optimizer as it was. ``state`` and
    ``state_dict()`` have tensors of the host; ``state_dict()`` waits for the copies, so read states by it.
    On CPU the same program runs, with copies that are done at once.

    Muon needs all momenta at once in its step: they are on the device during the step and on the host between steps.

    Example:
        >>> optimizer = swap_optimizer(AdamW(model.parameters()), SwapOptimizerConfig(swap_times=8))

    Args:
        optimizer: an AdamW, a Muon, or a ChainedOptimizer of these.
        config: which states, and how many slices. Default: 16 slices, all states.
        link: the streams of the copies. Default: its own; pass ``hp_offload.SwapManager()`` to share those of swapped
            activations.

    Returns:
        The same optimizer.

    Raises:
        TypeError: another kind of optimizer, a config of another type.
        ValueError: ``state_keys`` that no optimizer has, parameters on the host (their states are there, too).
        RuntimeError: the optimizer is swapped already.
        NotImplementedError: on MindSpore.
    """
    if not isinstance(config, SwapOptimizerConfig):
        raise TypeError(f"swap_optimizer: config must be a SwapOptimizerConfig, got {config!r}")
    chosen = list(optimizer.optimizers.values()) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    port().swap(chosen, config, OwnLink() if link is None else link)
    return optimizer


def check_state_keys(keys: Sequence[str] | None, present: Iterable[str]) -> None:
    """Raise for a state that no optimizer has.

    Args:
        keys: of a `SwapOptimizerConfig`.
        present: the states of the optimizers.

    Raises:
        ValueError: with near misses.
    """
    names = sorted(set(present))
    for key in keys or ():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"swap_optimizer: state_keys has {key!r}; the states are {', '.join(names)}{hint}")


def cut_in_slices(items: Sequence[T], nbytes: Callable[[T], int], target: float) -> list[list[T]]:
    """Cut a sequence into slices of about ``target`` bytes, each of one item at least.

    Example:
        >>> cut_in_slices([4, 4, 1, 1, 9], lambda item: item, 6)
        [[4, 4], [1, 1, 9]]

    Args:
        items: in order.
        nbytes: of an item.
        target: a slice is full when it has so many.
    """
    slices: list[list[T]] = []
    size: float = target
    for item in items:
        if size >= target:
            slices.append([])
            size = 0
        slices[-1].append(item)
        size += nbytes(item)
    return slices
