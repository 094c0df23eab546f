"""What a function's result depends on beside its arguments, taken in forward and restored when it runs again."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes

from hp_platform import get_platform
from hp_platform.frames import Frame, current_frame, frame

_deterministic = torch.are_deterministic_algorithms_enabled


@functools.cache
def _kind() -> str:
    return get_platform().devices.kind


class Surroundings:
    """Random generators, autocast, determinism, function modes, the frame of heavy operations, context variables."""

    def __init__(self) -> None:
        kind = _kind()
        self._random = random_state()
        self._autocast = {each: _autocast(each) for each in dict.fromkeys(("cpu", kind))}
        self._deterministic = _deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()
        self._modes = _function_modes()
        self._frame = current_frame()
        self._variables = contextvars.copy_context()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run what is inside as in forward, with gradients on; afterwards everything is as it was before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_random_numbers(self._random))
            for kind, (enabled, dtype) in self._autocast.items():
                if _autocast(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            if (_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()) != self._deterministic:
                stack.enter_context(_determinism(*self._deterministic))
            current = _function_modes()
            for mode in self._modes:
                if all(mode is not each for each in current):
                    stack.enter_context(mode)
            if self._frame is not current_frame():
                stack.enter_context(frame(like=self._frame or Frame()))
            for variable, value in self._variables.items():
                if variable.get(None) is not value:
                    stack.callback(variable.reset, variable.set(value))
            stack.enter_context(torch.enable_grad())
            yield


def random_state() -> tuple[torch.Tensor, ...]:
    """Return the states of the generators: the host's, and the current device's once it is in use."""
    kind = _kind()
    if kind == "cpu":
        return (torch.get_rng_state(),)
    module = torch.get_device_module(kind)
    return (torch.get_rng_state(), module.get_rng_state()) if module.is_initialized() else (torch.get_rng_state(),)


def set_random_state(state: tuple[torch.Tensor, ...]) -> None:
    """Set the states that `random_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(_kind()).set_rng_state(state[1])


@contextlib.contextmanager
def _random_numbers(state: tuple[torch.Tensor, ...]) -> Iterator[None]:
    outer = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(outer)


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextlib.contextmanager
def _determinism(enabled: bool, warn_only: bool) -> Iterator[None]:
    outer = _deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()
    # torch.use_deterministic_algorithms also imports the compiler, for seconds.
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(outer[0], warn_only=outer[1])
