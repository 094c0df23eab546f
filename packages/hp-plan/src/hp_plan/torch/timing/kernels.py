"""Seconds of kernels, each called alone on this machine's device, by the keys of a trace."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from hp_platform import get_platform

T = torch.Tensor
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\|([\d,]*)\]")
_WORD = re.compile(r"[^,\]]*")
_ROUNDS = 5
_ROUND = 5e-4  # seconds that a round takes at least, unless it has _CALLS
_CALLS = 20
_COLD = 32 << 20  # bytes of a kernel's tensors, in several sets, between two calls with the same ones
_SETS = 64
_PLAIN = {"None": None, "True": True, "False": False}


def time_kernels(keys: Collection[str], threads: int) -> dict[str, float]:
    """Time kernels of the current device.

    Each is called on tensors of the shapes, strides and dtypes of its key, and takes what its fastest round of five
    took, until the device is ready: seconds by the clock, or those of one thread that had its core to itself. The calls
    go round several sets of tensors, as a step's do, whose tensors have mostly left the caches when they are needed.

    Args:
        keys: of kernels, as a trace lists them.
        threads: by which the CPU computes.

    Returns:
        The seconds of a call by key. A kernel that can't be called alone is left out.
    """
    device = get_platform().devices.current_device()
    torch.set_num_threads(threads)
    seconds = {}
    for key in keys:
        try:
            seconds[key] = _time(key, device)
        except Exception:  # whatever an operator says of values that are not a program's own
            continue
    return seconds


def _time(key: str, device: torch.device) -> float:
    func, args, kwargs = call_of(key, device)
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    synchronize = get_platform().devices.synchronize
    func(*args, **kwargs)
    sets = cold_sets(args, kwargs)
    in_turn = itertools.cycle(sets)
    best = float("inf")
    for _ in range(_ROUNDS):
        synchronize()
        begin, calls = clock(), 0
        while calls < max(_CALLS, len(sets)) and (calls == 0 or not on_cpu or clock() - begin < _ROUND):
            args, kwargs = next(in_turn)
            func(*args, **kwargs)
            calls += 1
        synchronize()
        best = min(best, (clock() - begin) / calls)
    return best


def cold_sets(args: list[Any], kwargs: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return a call's arguments, and copies of them until they have more bytes than caches hold.

    Args:
        args: by place.
        kwargs: by name.
    """
    nbytes = sum(each.untyped_storage().nbytes() for each in tree_iter((args, kwargs)) if isinstance(each, T))
    count = min(_SETS, 1 + _COLD // nbytes) if nbytes else 1
    return [(args, kwargs), *(tree_map_only(T, _copied, (args, kwargs)) for _ in range(count - 1))]


def _copied(tensor: T) -> T:
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def call_of(key: str, device: torch.device) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Make the call that a key describes: the operator, and arguments with tensors of its shapes.

    Floating point numbers are between 0.1 and 1, and integers zero, so that they are legal indices; the offsets of a
    grouped product, and counts of repeats, share out the rows evenly.

    >>> call_of("aten.mm.default(float32[2,3|3,1], float32[3,4|4,1])", torch.device("cpu"))[0]
    <OpOverload(op='aten.mm', overload='default')>

    Args:
        key: as `hp_plan.torch.dry.ledger.kernel_key` writes it.
        device: of the tensors.

    Raises:
        AttributeError: there is no such operator.
    """
    name, _, rest = key.partition("(")
    namespace, operator, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word, value in _Arguments(rest.removesuffix(")"), device):
        if word:
            kwargs[word] = value
        else:
            args.append(value)
    if any(each.name == "device" for each in func._schema.arguments):
        kwargs["device"] = device
    if operator == "_grouped_mm":
        rows, offsets = args[0], next(each for each in (*args[2:], *kwargs.values()) if isinstance(each, T))
        groups = len(offsets)
        total = rows.shape[0] if len(rows.shape) == 2 and len(args[1].shape) == 3 else rows.shape[-1]
        offsets.copy_(torch.arange(1, groups + 1, device=device) * total // groups)
    if operator == "repeat_interleave" and kwargs.get("output_size"):
        places = torch.arange(len(args[0]) + 1, device=device) * kwargs["output_size"] // len(args[0])
        args[0].copy_(places.diff())
    return func, args, kwargs


class _Arguments:
    """Reads the text of a call's arguments."""

    def __init__(self, text: str, device: torch.device) -> None:
        self._text, self._at, self._device = text, 0, device

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Return each argument's name, "" of one by place, and its value."""
        while self._at < len(self._text):
            named = re.compile(r"(\w+)=").match(self._text, self._at)
            if named:
                self._at = named.end()
            yield (named[1] if named else ""), self._value()
            self._skip()

    def _skip(self) -> None:
        if self._text.startswith(", ", self._at):
            self._at += 2

    def _value(self) -> Any:
        if self._text.startswith("[", self._at):
            self._at += 1
            values = []
            while not self._text.startswith("]", self._at):
                values.append(self._value())
                self._skip()
            self._at += 1
            return values
        tensor = _TENSOR.match(self._text, self._at)
        if tensor:
            self._at = tensor.end()
            return _filled(*tensor.groups(), device=self._device)
        word = _WORD.match(self._text, self._at)
        assert word is not None, "it matches nothing, too"
        self._at = word.end()
        return _scalar(word[0])


def _filled(dtype: str, shape: str, strides: str, *, device: torch.device) -> T:
    sizes, steps = ([int(each) for each in text.split(",") if each] for text in (shape, strides))
    kind = getattr(torch, dtype)
    tensor = torch.empty_strided(sizes, steps, dtype=kind, device=device)
    overlapping = any(step == 0 and size > 1 for size, step in zip(sizes, steps, strict=True))
    base = tensor.as_strided([size if step else 1 for size, step in zip(sizes, steps, strict=True)], steps)
    if kind.is_floating_point and (not overlapping or base.numel()):
        base.uniform_(0.1, 1)
    else:
        base.zero_()
    return tensor


def _scalar(text: str) -> Any:
    if text in _PLAIN:
        return _PLAIN[text]
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
