"""Modules built without memory and initialized by local tensors; the module of a program that communicates.

Note [Modules by sequence number]
Autograd numbers its nodes in order of creation. Hooks before and after each forward record the next number, so that the
number of a node in backward tells in which module's forward it was created. Nothing is added to the graph, and it works
in autograd's own threads. (Full backward hooks would add nodes around each module.)
The hook after forward must be the module's last one, because other hooks may communicate as well. Therefore it is
registered anew each time the module's forward begins.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hp_dtensor.debugging.debug import Names, running
from hp_dtensor.functions import implicit_replication
from hp_dtensor.torch.dtensor import _OWN as OWN
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap
from hp_platform.extend import attributed_modules
from hp_platform.torch.internals import (
    backward_id,
    current_node,
    next_node_number,
    swap_tensors,
    without_torch_function,
)


@contextlib.contextmanager
def init_on_device(device: torch.device | str) -> Iterator[None]:
    """Create the parameters and buffers of modules built inside on ``device``."""
    with torch.device(device):
        yield


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build modules on meta, without memory. Shard them, then call ``init_parameters``.

    Example:
        >>> with init_empty_weights():
        ...     model = Model()
        >>> parallelize_module(model, mesh, plan)
        >>> init_parameters(model)
    """
    with init_on_device("meta"):
        yield


def init_parameters(module: torch.nn.Module, *, device: torch.device | str | None = None) -> torch.nn.Module:
    """Give a module that was built on meta memory for its local tensors, and its initial values.

    The values are those of the undistributed module, built with the same seed: every submodule's ``reset_parameters``
    runs in the order of construction (inner modules first), then a ``transformers`` model's own ``init_weights``;
    random numbers are drawn for the global tensor, see Note [One stream for all layouts].

    A parameter that several modules share gets the values of the first.

    Args:
        module: the module; parameters that have memory already are initialized again with the rest.
        device: the device of plain meta parameters; default the device type of the DTensors, otherwise the accelerator
            or CPU.

    Raises:
        RuntimeError: a submodule has parameters on meta but no ``reset_parameters``, and no parent initializes it.
    """
    _check_initializers(module)
    materialize(module, torch.device(device) if device is not None else _device_of(module))
    for child in module.modules():
        if hasattr(child, "_is_hf_initialized"):
            child._is_hf_initialized = False  # type: ignore[assignment]
    ties = _untie(module)
    with implicit_replication():  # what they compute beside is whole, and the same on all ranks
        for child in _inner_first(module):
            for initialize in _initializers(child):
                initialize()
    for store, name, tensor in ties:
        store[name] = tensor
    return module


def materialize(module: torch.nn.Module, target: torch.device) -> None:
    """Give a module that was built on meta memory for its local tensors, whose values are not set.

    Args:
        module: the module; what has memory already keeps it. Parameters stay the same objects, buffers don't.
        target: the device.
    """
    for child in module.modules():
        own = getattr(child, "_materialize", None)
        if callable(own):
            own(target)
    replaced: dict[int, tuple[torch.Tensor, Any]] = {}  # by identity; holds the old ones, so that ids stay theirs
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if store is child._parameters:
                        give_memory(tensor, torch.empty_like(local_view(tensor), device=target))
                        continue
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = tensor, _empty(tensor, target)
                    store[name] = replaced[id(tensor)][1]


def give_memory(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Give a parameter, which stays the same object, memory on another kind of device than it had (meta).

    Args:
        parameter: a leaf, plain or a DTensor.
        local: a tensor of its local shape and dtype, whose memory the parameter takes.
    """
    trains = parameter.requires_grad
    with without_torch_function():
        hooks, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        swap_tensors(parameter, local.detach().requires_grad_(trains))
        # the swap exchanged them, too
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, accumulated
    for name in OWN - {"_spec", "_meets_plain", "_outside_graphs"} | {"_is_hf_initialized"}:
        vars(parameter).pop(name, None)


def _untie(module: torch.nn.Module) -> list[tuple[Any, str, torch.Tensor]]:
    """Give all but the first holder of a parameter one of its own, to be drawn and dropped as constructors do."""
    ties, seen = [], set()
    for child in module.modules():
        for name, tensor in child._parameters.items():
            if tensor is not None and id(tensor) in seen:
                ties.append((child._parameters, name, tensor))
                child._parameters[name] = _empty(tensor, tensor.device)
            seen.add(id(tensor))
    return ties


def _initializers(module: torch.nn.Module) -> list[Any]:
    """Return what initializes a module as its constructor does; transformers models call ``init_weights`` in theirs."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    own = getattr(module, "init_weights", None)
    return [one for one in (reset, own) if callable(one)]


def _check_initializers(module: torch.nn.Module) -> None:
    filled = {id(inner) for child in module.modules() if _initializers(child) for inner in child.modules()}
    for name, child in module.named_modules():
        tensors = {**child._parameters, **child._buffers}
        empty = [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]
        if empty and id(child) not in filled:
            raise RuntimeError(
                f"init_parameters: {type(child).__name__} ({name or 'the module itself'}) holds {empty} on meta and"
                " has no reset_parameters() to give them values; add one, or build the module outside"
                " init_empty_weights()"
            )


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _device_of(module: torch.nn.Module) -> torch.device:
    for _, tensor in _named(module):
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
        if not tensor.is_meta:
            return tensor.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _empty(tensor: torch.Tensor, device: torch.device) -> Any:
    local = torch.empty_like(local_view(tensor), device=device)
    empty = wrap(local, tensor._spec) if isinstance(tensor, DTensor) else local
    if isinstance(tensor, torch.nn.Parameter):
        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(empty).update(
            {k: v for k, v in tensor.__dict__.items() if k not in ("_spec", "_moved_from", "_is_hf_initialized")}
        )
    return empty


def _inner_first(module: torch.nn.Module, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


_NEVER = 2**64


@dataclass
class _Calls:
    """The forwards of a thread: names, first and last node numbers, enclosing calls, and the backwards they ran in."""

    names: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    around: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    stack: list[tuple[int, torch.nn.Module]] = field(default_factory=list)

    def begin(self, module: torch.nn.Module, name: str) -> None:
        """Record that a forward begins."""
        self.around.append(self.stack[-1][0] if self.stack else -1)
        self.stack.append((len(self.names), module))
        self.names.append(name)
        self.starts.append(next_node_number())
        self.stops.append(_NEVER)
        self.tasks.append(backward_id())

    def end(self, module: torch.nn.Module) -> None:
        """Record that a forward has ended, and with it all that it called."""
        if any(each is module for _, each in self.stack):
            ended = None
            while ended is not module:
                index, ended = self.stack.pop()
                self.stops[index] = next_node_number()

    def of(self, number: int) -> str | None:
        """Return the innermost module in whose forward the node of this number was created."""
        index = bisect_right(self.starts, number) - 1
        while index >= 0 and self.stops[index] <= number:
            index = self.around[index]
        return self.names[index] if index >= 0 else None


class Modules:
    """The running modules: Note [Modules by sequence number]."""

    def __init__(self) -> None:
        self._names = Names(lambda root: dict(root.named_modules()))
        self._calls: dict[int, _Calls] = {}
        self._hooks: dict[torch.nn.Module, Any] = {}
        self._global: Any = None

    def start(self) -> None:
        """Watch the modules that run."""
        self._global = register_module_forward_pre_hook(self._begin)

    def stop(self) -> None:
        """Remove all hooks, and end the forwards that still run."""
        self._global.remove()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for calls in self._calls.values():
            while calls.stack:
                calls.end(calls.stack[-1][1])

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        calls = self._calls.setdefault(threading.get_ident(), _Calls())
        if all(each is not module for _, each in calls.stack):  # a module that calls itself keeps its hook
            if module in self._hooks:
                self._hooks[module].remove()
            self._hooks[module] = module.register_forward_hook(self._end, always_call=True)
        calls.begin(module, self._names.of([module, *(each for _, each in reversed(calls.stack))]))

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        calls = self._calls.get(threading.get_ident())
        if calls is not None:
            calls.end(module)

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Return phase and module of the program at this frame."""
        task, attributed = backward_id(), attributed_modules()
        if attributed:
            return "forward" if task == -1 else "backward", self._names.of(attributed)
        if task == -1:
            return "forward", self._names.of(running(frame, torch.nn.Module))
        calls = self._calls.get(threading.get_ident())
        if calls is not None and calls.stack:
            top = calls.stack[-1][0]
            if calls.tasks[top] == task:  # a forward that is recomputed for this backward
                return "backward", calls.names[top]
        node = current_node()
        names = [each.of(node._sequence_nr()) for each in self._calls.values()] if node is not None else []
        modules = {name for name in names if name is not None}
        return "backward", modules.pop() if len(modules) == 1 else ""  # each thread numbers for itself
