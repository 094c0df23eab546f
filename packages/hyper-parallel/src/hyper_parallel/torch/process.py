"""Process of a rank on torch: its settings, how the loss of another rank shows, and memory that ran out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from hp_platform import LostRankError, get_platform
from hp_platform.extend import Place, divide_threads
from hyper_parallel.supervision.run_end import Spot, Storage

# How the loss of a peer shows: it ended, and its end is what has to be reported.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
)


def prepare(place: Place) -> None:
    """Choose the device and the number of threads."""
    torch.set_num_threads(divide_threads(place.local_world_size))
    get_platform().devices.set_device(place.local_rank)


def peer_lost(error: Exception) -> bool:
    return isinstance(error, LostRankError) or any(sign in str(error) for sign in _PEER_LOST)


_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def ran_out(error: BaseException) -> bool:
    """Return True if the error says that there is no memory left, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CPU)


def place(error: BaseException, model: Any) -> Spot:
    """Return where in a step an error was raised.

    Args:
        error: with its traceback.
        model: under training.
    """
    names = {id(module): name for name, module in _modules(model)}
    phase, module = "forward", ""
    for frame in _frames(error):
        owner, function = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            module = names[id(owner)]
        if function == "_engine_run_backward" or (isinstance(owner, torch.Tensor) and function == "backward"):
            phase, module = "backward", ""
        elif isinstance(owner, torch.optim.Optimizer) or type(owner).__module__.startswith("hp_optim."):
            phase, module = "the optimizer's step", ""
        elif function == "clip_gradients":
            phase, module = "the norm of the gradients", ""
        elif function == "take":
            phase = "reading the batch"
    return Spot(phase, module)


def storages(error: BaseException, model: Any, optimizer: Any, *, count: int = 10) -> list[Storage]:
    """Return the largest storages that are in use.

    Python knows parameters, gradients, states and the tensors of functions that run; those that autograd alone holds
    are found from the tensors of the error's functions.

    Args:
        error: with its traceback.
        model: under training.
        optimizer: its.
        count: how many.
    """
    found: dict[int, Storage] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some objects warn when they are looked at.
        for what, tensor in _tensors(error, model, optimizer):
            local = getattr(tensor, "_local_tensor", tensor)
            try:
                storage = local.untyped_storage()
                size, key = storage.nbytes(), storage.data_ptr()
            except (RuntimeError, NotImplementedError, AttributeError):  # A tensor without memory of its own.
                continue
            if size and key and key not in found:
                described = tuple(local.shape), str(local.dtype).removeprefix("torch."), str(local.device)
                found[key] = Storage(size, what, *described)
    return sorted(found.values(), key=lambda each: -each.size)[:count]


def _tensors(error: BaseException, model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield name, parameter
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    for parameter, states in getattr(optimizer, "state", {}).items():
        for key, state in states.items() if isinstance(states, dict) else ():
            if isinstance(state, torch.Tensor):
                yield f"{key} of {names.get(id(parameter), 'a parameter')}", state
    yield from _saved(error)
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            yield "tensor", each


def _saved(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    """List what autograd has saved for the tensors of the functions that the error passed through."""
    values = (value for frame in _frames(error) for value in list(frame.f_locals.values()))
    waiting = [value.grad_fn for value in values if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    value = getattr(node, name)
                except RuntimeError:  # It was freed, or changed in place.
                    continue
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(each, torch.Tensor):
                        yield f"saved by {node.name().removesuffix('Backward0')}", each
        waiting += [following for following, _ in node.next_functions]


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    stages = getattr(model, "stages", None)
    for each in [model] if isinstance(model, nn.Module) else list((stages or {}).values()):
        yield from each.named_modules()
