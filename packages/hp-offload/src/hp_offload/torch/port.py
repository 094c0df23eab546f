"""Recomputation and saved tensors of PyTorch, and copies to the host, on side streams where the device has them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from hp_offload.manager import GroupRun, name_of_group
from hp_offload.port import ALIGNMENT
from hp_offload.torch.around import Around
from hp_offload.torch.homes import find_parts, place
from hp_offload.torch.planned import apply
from hp_offload.torch.regions.functions import Filling, Walk
from hp_offload.torch.regions.region import Passes, Scope, run_excluded, run_region, running, tag
from hp_offload.torch.regions.selection import Selection
from hp_offload.torch.regions.sites import module_of
from hp_offload.torch.swapping import Packed, SwapRun, address_of_storage, swapping, unpack
from hp_offload.torch.tracing import trace
from hp_platform import get_platform
from hp_platform.torch.devices import empty_on_host
from hp_platform.torch.heavy import mark

__all__ = [
    "apply",
    "before_first_step",
    "checkpoint",
    "find_parts",
    "is_module",
    "is_tensor",
    "module_names",
    "place",
    "run_excluded",
    "saving",
    "swap",
    "swap_tensor",
    "trace",
    "wrap",
]

T = torch.Tensor
Function = Callable[..., Any]
_selections: weakref.WeakKeyDictionary[Any, dict[Any, Selection]] = weakref.WeakKeyDictionary()


class _Contexts:
    """Passes of a `context_fn` of the user's."""

    def __init__(self, contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def first(self, walk: Walk) -> AbstractContextManager[Any]:
        return self._contexts[0]

    @contextmanager
    def again(self, filling: Filling) -> Iterator[None]:
        with self._contexts[1]:
            yield

    def pack(self, index: int, tensor: T) -> None:
        return None


def check_checkpoint(policy_fn: Any, swap_inputs: bool) -> None:
    """Do nothing: torch has means for all options of checkpoint."""


def checkpoint(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy_fn: Function | None,
    context_fn: Callable[[], Any] | None,
    swap_inputs: bool,
    group_swap: bool,
    early_stop: bool,
) -> Any:
    if torch.compiler.is_compiling():  # the compiler knows torch's own, and cuts its graph by it
        if policy_fn is not None or context_fn is not None or swap_inputs:
            untraced: Any = torch.compiler.disable(_refuse)  # else Dynamo would run what raises once more, eagerly
            untraced(
                "checkpoint inside of torch.compile recomputes in full: without policy_fn, context_fn and swap_inputs."
                " Compile the blocks and checkpoint around them, or let the compiler choose"
                " (torch._functorch.config.activation_memory_budget)."
            )
        return _torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    name = name_of_group(function, module_of(function))
    passes: Passes | None = None
    if policy_fn is not None and torch.is_grad_enabled():
        passes = _selection(function, policy_fn, name, group_swap).passes()
    elif context_fn is not None and torch.is_grad_enabled():
        passes = _Contexts(context_fn())
    held = functools.partial(_leaves, args, kwargs)
    saving = swapping(SwapRun(f"inputs of {name}", group_swap, held)) if swap_inputs else nullcontext()
    return run_region(function, args, kwargs, name=name, passes=passes, early_stop=early_stop, saving=saving)


def _refuse(text: str) -> None:
    raise NotImplementedError(text)


def _selection(function: Function, policy_fn: Function, name: str, fused: bool) -> Selection:
    module = module_of(function)
    group = lambda: SwapRun(name, fused)  # noqa: E731
    if module is None:
        return _of(function).setdefault(policy_fn, Selection(policy_fn, name, group))
    known = _of(module)
    if policy_fn not in known:
        mark(module)
        known[policy_fn] = Selection(policy_fn, name, group)
    return known[policy_fn]


def _leaves(*arguments: Any) -> list[T]:
    """Return the tensors that nothing computed: the caller holds them."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, T) and leaf.grad_fn is None]


def _of(owner: Any) -> dict[Any, Selection]:
    try:
        return _selections.setdefault(owner, {})
    except TypeError:  # an object that cannot be weakly referred to: asked anew each time
        return {}


def swap(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy_fn: Function | None,
    group: str,
    group_swap: bool,
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        untraced: Any = torch.compiler.disable(_refuse)
        untraced("swap inside of torch.compile is not supported: compile the blocks, and swap around them.")
    module = module_of(function)

    def stays() -> list[T]:
        own = [] if module is None else [*module.parameters(), *module.buffers()]
        return [*own, *_leaves(args, kwargs)]

    run = SwapRun(group or name_of_group(function, module), group_swap, stays, policy_fn)
    scope = Scope(recomputed=False)

    def pack(tensor: T) -> Packed:
        return (None if policy_fn is None else scope.swapped(tensor)) or run.pack(tensor)

    with saved_tensors_hooks(pack, unpack), running(scope):
        result = function(*args, **kwargs)
    run.finish()
    return result


def saving(run: GroupRun, module: Any) -> AbstractContextManager[None]:
    own = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    return swapping(SwapRun(run.name, run.fused, lambda: own, run=run))


def swap_tensor(tensor: T, group: str, group_swap: bool) -> T:
    tag(tensor, SwapRun(group, group_swap))
    return tensor


def before_first_step(model: nn.Module, action: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Call an action before the model's first call with gradients.

    A hook would run inside of that call, where what shards the model has gathered its parameters already.
    """
    own: Any = type(model)
    begun = False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if torch.is_grad_enabled() and not begun:
            begun = True
            if type(self) is waiting:
                self.__class__ = own
            action(args, kwargs)
            return self(*args, **kwargs)
        return own.__call__(self, *args, **kwargs)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    waiting = type(own.__name__, (own,), {"__call__": call, **names})
    model.__class__ = waiting


def is_module(value: Any) -> bool:
    """Tell a module from everything else."""
    return isinstance(value, nn.Module)


def is_tensor(value: Any) -> bool:
    """Tell a tensor from everything else."""
    return isinstance(value, T)


def wrap(module: nn.Module, around: Function) -> nn.Module:
    mark(module)  # while its forward is its own
    module.forward = Around(around, module.forward)
    return module


def module_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules()]


Storage = torch.UntypedStorage
Stream = Any
Event = Any


def streams() -> tuple[Stream | None, Stream | None]:
    """Make the streams of copies to the host and to the device; None on CPU, where a copy is done at once."""
    devices = get_platform().devices
    if not devices.capabilities.streams:
        return None, None
    return devices.stream(), devices.stream()


def storage(tensor: torch.Tensor | Storage) -> Storage:
    return tensor if isinstance(tensor, Storage) else tensor.untyped_storage()


def address(storage: Storage) -> int:
    """Get what tells memory from other memory; 0 where there is none."""
    return address_of_storage(storage)


def nbytes(storage: Storage) -> int:
    """Count a storage's bytes."""
    return storage.nbytes()


def on_host(storage: Storage) -> bool:
    return storage.device.type == "cpu"


def host(nbytes: int, from_host: bool) -> torch.Tensor:
    return empty_on_host(nbytes, torch.uint8, from_host=from_host)


def copy_out(storages: list[Storage], buffer: torch.Tensor, stream: Stream | None, after: Event) -> Event:
    with _disable_current_modes(), torch.no_grad():
        if stream is None or storages[0].device.type == "cpu":
            _copy_out(storages, buffer)
            return None
        stream.wait_stream(torch.get_device_module(storages[0].device.type).current_stream(storages[0].device))
        if after is not None:
            stream.wait_event(after)
        with stream:
            _copy_out(storages, buffer)
        return stream.record_event()


def _copy_out(storages: list[Storage], buffer: torch.Tensor) -> None:
    if len(storages) == 1:
        buffer.copy_(_bytes(storages[0]), non_blocking=True)
        return
    flat = torch.empty(buffer.numel(), dtype=torch.uint8, device=storages[0].device)
    offset = 0
    for each in storages:
        flat[offset : offset + each.nbytes()].copy_(_bytes(each))
        offset += -(-each.nbytes() // ALIGNMENT) * ALIGNMENT
    buffer.copy_(flat, non_blocking=True)


def copy_back(buffer: torch.Tensor, nbytes: int, like: Storage, stream: Stream | None) -> tuple[Storage, Event]:
    with torch.no_grad():
        new = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    return new.untyped_storage(), _copy_back(new, buffer[:nbytes], stream)


def empty_like(storage: Storage) -> Storage:
    return torch.UntypedStorage(0, device=storage.device)


def free(storage: Storage) -> None:
    storage.resize_(0)


def fill(storage: Storage, buffer: torch.Tensor, nbytes: int, stream: Stream | None) -> Event:
    storage.resize_(nbytes)
    return _copy_back(_bytes(storage), buffer[:nbytes], stream)


def _copy_back(new: torch.Tensor, buffer: torch.Tensor, stream: Stream | None) -> Event:
    with _disable_current_modes(), torch.no_grad():
        if stream is None or new.device.type == "cpu":
            new.copy_(buffer)
            return None
        # The memory is that of the current stream, where what was in it before may still be used.
        stream.wait_stream(torch.get_device_module(new.device.type).current_stream(new.device))
        with stream:
            new.copy_(buffer, non_blocking=True)
        return stream.record_event()


def wait(event: Event) -> None:
    if event is not None:
        event.wait()


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
