"""State that a function depends on beside its arguments' tensors, for a second run to find the same.

Note [State]
    A forward may write to buffers (running statistics, counters, codebooks), draw from generators of its own, and grow
    a cache of keys and values. The second run starts from what the first started from, and leaves everything as it
    finds it, so a step counts once. A buffer is copied before the first run if an earlier call wrote to it; the first
    call of a module, in training and in evaluation, copies all of its buffers to find out. The running statistics of a
    normalisation that trains do not enter what it computes: they are copied before the second run alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack as _function_modes

from hp_platform import get_platform
from hp_platform.frames import Frame, current_frame, frame
from hp_platform.torch.internals import set_deterministic, set_versions, without_torch_function

T = torch.Tensor
set_versions: Callable[[tuple[T, ...], tuple[int, ...]], None]
_written: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()
"""Names of the buffers that a module's forward writes to, in training and in evaluation."""
_generators: weakref.WeakKeyDictionary[nn.Module, list[torch.Generator]] = weakref.WeakKeyDictionary()


class State:
    """The buffers and generators of one region.

    Args:
        function: of the region. Its modules are those that it is, is bound to, or names itself.
        leaves: its arguments.
    """

    def __init__(self, function: Callable[..., Any], leaves: Iterable[Any]) -> None:
        self._buffers: list[_Buffer] = []
        self._generators: list[tuple[torch.Generator, T]] = []
        modules, generators = _held(function, leaves)
        for each in generators:
            self._generators.append((each, each.get_state()))
        known: set[nn.Module | None] = {None}
        while modules:
            module = modules.pop()
            if module not in known:
                known.add(module)
                modules += module._modules.values()
                if module._buffers:
                    self._buffers += _buffers(module)

    def finish(self) -> None:
        """Note what the first run wrote to, and let the rest go."""
        for each in self._buffers:
            each.finish()
        self._buffers = [each for each in self._buffers if each.changed]

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run what is inside from the state before the first run; afterwards all is as it was.

        Args:
            name: of the region, for errors.
        """
        with ExitStack() as stack:
            for each in self._buffers:
                each.restore(name, stack)
            for generator, state in self._generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            yield


class _Buffer:
    """A buffer as the first run finds it.

    Args:
        holder: its module.
        name: of it there.
        tensor: itself.
        known: an earlier call wrote to it, or not; None where none was made.
        statistic: of a normalisation that trains.
    """

    def __init__(self, holder: nn.Module, name: str, tensor: T, known: bool | None, statistic: bool) -> None:
        self._holder, self._name, self._tensor = holder, name, tensor
        self._known, self._statistic = known, statistic
        self._version = tensor._version
        self._value = tensor.detach().clone() if known is not False and not statistic else None
        self.changed = statistic

    def finish(self) -> None:
        """Tell if the first run wrote to it."""
        if self._statistic:
            return
        written = self._tensor._version != self._version
        self.changed = written or self._holder._buffers.get(self._name) is not self._tensor
        if self._known is None and not self.changed and not self._tensor.is_meta:
            assert self._value is not None
            self.changed = not torch.equal(self._value, self._tensor)  # kernels write without counting
        if self.changed and self._known is False and not written:
            self._value = self._tensor  # another took its place
        known = _written.setdefault(self._holder, {}).setdefault(self._holder.training, set())
        if self.changed:
            known.add(self._name)

    def restore(self, name: str, stack: ExitStack) -> None:
        """Put what it was in its place, until the stack closes."""
        buffers = self._holder._buffers
        current = buffers.get(self._name)
        value = current if self._statistic else self._value
        if value is None:
            raise RuntimeError(
                f"The forward of {name} wrote to the buffer {self._name!r} of {type(self._holder).__name__}. It did not"
                " in its first call, so no copy was made before: run this step again."
            )
        with torch.no_grad(), without_torch_function():
            value = value.detach().clone()
            set_versions((value,), (self._version,))
        buffers[self._name] = value
        stack.callback(buffers.__setitem__, self._name, current)


def _buffers(holder: nn.Module) -> list[_Buffer]:
    known = _written.get(holder, {}).get(holder.training)
    statistics = isinstance(holder, _NormBase) and holder.training
    with torch.no_grad():
        return [
            _Buffer(holder, name, tensor, None if known is None else name in known, statistics)
            for name, tensor in holder._buffers.items()
            if tensor is not None
        ]


def _generators_of(root: nn.Module) -> list[torch.Generator]:
    """Return the generators that modules have as attributes, as in the first call."""
    if root not in _generators:
        values = (value for module in root.modules() for value in vars(module).values())
        _generators[root] = [value for value in values if isinstance(value, torch.Generator)]
    return _generators[root]


def _held(function: Callable[..., Any], leaves: Iterable[Any]) -> tuple[list[Any], list[torch.Generator]]:
    """Return the modules, and the generators, that a function is, is bound to, names or is given."""
    found = [*leaves]
    while isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    owner = getattr(function, "__self__", function)
    found.append(owner)
    code = getattr(function, "__code__", None)
    if code is not None and not isinstance(owner, nn.Module):
        found += [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
        names = getattr(function, "__globals__", {})
        found += [names.get(name) for name in code.co_names]
    modules = [each for each in found if isinstance(each, nn.Module)]
    generators = [each for each in found if isinstance(each, torch.Generator)]
    for each in modules:
        generators += _generators_of(each)
    return modules, [*dict.fromkeys(generators)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def snapshot(value: Any) -> Any:
    """Return a copy of a transformers' cache that holds the same tensors; anything else as it is.

    A layer that appends its keys to its cache would find them there when it runs again.
    """
    if isinstance(value, (list, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        copied = [(key, snapshot(each)) for key, each in pairs]
        return dict(copied) if isinstance(value, dict) else [each for _, each in copied]
    if not _is_cache(type(value)):
        return value
    new = copy.copy(value)
    new.__dict__.update({name: snapshot(each) for name, each in vars(value).items()})
    return new


@functools.cache
def _is_cache(kind: type) -> bool:
    return any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


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
    set_deterministic(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        set_deterministic(outer[0], warn_only=outer[1])
