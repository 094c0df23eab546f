"""A world of ranks of which this process plays one, on its own device.

Note [A played world]
As in a dry world the process groups have torch's "fake" backend, and host numbers are what a `Peers` says. But tensors
have memory and operators compute, and a message is played by a copy on the device. The others are taken to hold what
this rank holds: an all-gather repeats its shard, a sum is a multiple of its part, and an exchange brings what it keeps
for itself. What only another rank has (a message of another stage, a broadcast) is small numbers. So whatever a
collective leaves is finite, has the right size, and means nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hp_platform.devices import devices
from hp_platform.port import Handle
from hp_platform.torch import collectives, port
from hp_platform.torch.dry.memoryless import Alike, Peers, alone_in_world, spoken_collectives
from hp_platform.torch.internals import without_torch_dispatch

T = torch.Tensor
_DRAWN, _SCALE = 4096, 0.02  # numbers that stand for another rank's, of the size that weights are drawn with
_HOST = "_of_host"  # marks a tensor of host numbers


class Copies:
    """What the copies that stand for messages took.

    On an accelerator those count that its main stream made: others run beside the computation, as messages do.
    """

    def __init__(self) -> None:
        self._seconds = self._cpu = 0.0
        self._events: list[tuple[Any, Any]] = []

    def take(self) -> tuple[float, float]:
        """Return the seconds since the last call, and those of the CPU; nothing is queued on the device."""
        seconds, cpu = self._seconds, self._cpu
        seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._seconds = self._cpu = 0.0
        self._events.clear()
        return seconds, cpu

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count what runs inside, which neither autograd nor dispatch modes see.

        Args:
            device: that copies.
        """
        with without_torch_dispatch(), torch.no_grad():
            if device.type == "cpu":
                begin, cpu = time.perf_counter(), time.process_time()
                yield
                self._seconds += time.perf_counter() - begin
                self._cpu += time.process_time() - cpu
                return
            module = torch.get_device_module(device)
            if module.current_stream() != module.default_stream():
                yield
                return
            begins, ends = module.Event(enable_timing=True), module.Event(enable_timing=True)
            begins.record()
            yield
            ends.record()
            self._events.append((begins, ends))


@contextlib.contextmanager
def played_world(size: int, rank: int, *, peers: Peers | None = None) -> Iterator[Copies]:
    """Be one rank of a world without the others, on this process's device: Note [A played world].

    Example:
        >>> with played_world(64, 0) as copies:
        ...     step()
        ...     seconds, _ = copies.take()  # of the step, which messages do not take

    Args:
        size: number of ranks of the world.
        rank: this process's.
        peers: what other ranks say as host numbers; None is the same as this one.

    Yields:
        What the copies took that stand for messages.

    Raises:
        RuntimeError: there is a world of processes already.
    """
    copies, backend = Copies(), dist.get_default_backend_for_device(devices.kind)
    spoken = spoken_collectives(Alike() if peers is None else peers, backend)
    with alone_in_world(size, rank, _collectives(spoken, copies), port.devices):
        yield copies


def _collectives(spoken: Any, copies: Copies) -> Any:
    """Make the port's collectives: of host numbers those that peers answer, of other tensors copies."""

    def played(copy: Callable[..., None]) -> Callable[..., Handle | None]:
        name = copy.__name__.removeprefix("_")

        def run(tensor: T, *args: Any) -> Handle | None:
            if _HOST in vars(tensor):
                return getattr(spoken, name)(tensor, *args)
            *others, async_op = args
            with copies.timed(tensor.device):
                copy(tensor, *others)
                return _Queued(tensor.device) if async_op else None

        return run

    copied = (_all_reduce, _all_gather, _broadcast, _reduce_scatter, _all_to_all, _send, _recv)
    own = vars(spoken) | {each.__name__.removeprefix("_"): played(each) for each in copied}
    own["from_bytes"] = lambda data, group: _of_host(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    own["from_numbers"] = lambda numbers, group: _of_host(collectives.from_numbers(numbers, group).cpu())
    return types.SimpleNamespace(**own)


def _of_host(tensor: T) -> T:
    vars(tensor)[_HOST] = True
    return tensor


class _Queued:
    """A copy that is made, or queued on the current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._event = None if self._module is None else self._module.current_stream().record_event()

    def wait(self) -> None:
        """Let the current stream wait for it."""
        if self._module is not None:
            self._module.current_stream().wait_event(self._event)


# ---- what is copied; `.data` keeps it from autograd's count of changes, which a backend's writes are not in ----
def _all_reduce(tensor: T, op: str, group: Any) -> None:
    _multiply(tensor.data, op, group.size())


def _all_gather(output: T, tensor: T, group: Any) -> None:
    size = group.size()
    output.data.view(size, -1).copy_(tensor.data.view(1, -1).expand(size, -1))  # `tensor` may be a part of `output`


def _reduce_scatter(output: T, tensor: T, op: str, group: Any) -> None:
    output.data.view(-1).copy_(tensor.data.view(group.size(), -1)[group.rank()])
    _multiply(output.data, op, group.size())


def _all_to_all(output: T, tensor: T, received: list[int], sent: list[int], group: Any) -> None:
    """Take what this rank keeps for itself; where that is nothing what it sends there, else zeros."""
    size = group.size()
    pieces = tensor.data.split(sent or [len(tensor) // size] * size)
    own = pieces[group.rank()]
    for piece, there in zip(output.data.split(received or [len(output) // size] * size), pieces, strict=True):
        source = own if len(own) else there
        if not len(source):
            piece.zero_()
            continue
        for part in piece.split(len(source)):
            part.copy_(source[: len(part)])


def _broadcast(tensor: T, group_src: int, group: Any) -> None:
    if group.rank() != group_src:
        _fill(tensor.data)


def _send(tensor: T, dst: int, group: Any, tag: int) -> None:
    pass


def _recv(tensor: T, src: int, group: Any, tag: int) -> None:
    _fill(tensor.data)


def _multiply(tensor: T, op: str, size: int) -> None:
    """Reduce a tensor with others of the same values."""
    if op == "sum":
        tensor.mul_(size)
    elif op == "product":
        tensor.pow_(size)


def _fill(tensor: T) -> None:
    """Write small numbers; zeros where they are integers."""
    if not tensor.dtype.is_floating_point:
        tensor.zero_()
        return
    flat, source, written = tensor.view(-1), _small(tensor.device, tensor.dtype), 0
    while written < len(flat):
        part = flat[written : written + len(source)]
        part.copy_(source[: len(part)])
        written += len(part)
        source = flat[:written]  # as much again as there is


@functools.cache
def _small(device: torch.device, dtype: torch.dtype) -> T:
    drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0), device="cpu")
    return (drawn * _SCALE).to(device, dtype)
