"""PyTorch's part of hp-pipeline: see `hp_pipeline.port`.

Note [What arrives]
    A received tensor is the result of one node at the root of a stage's graph, not a leaf: a stage may write to it in
    place as it may on one device, its hooks belong to this message alone, and the node is where backward leaves the
    gradients that go back to the sender.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hp_platform import get_platform
from hp_platform.frames import current_frame, frame
from hp_platform.torch.heavy import DeferredGradients, backward_in, mark, run_backward
from hp_platform.torch.internals import torch_dispatches_above, torch_functions_above

T = torch.Tensor
_LEAF = pytree.tree_flatten(0)[1]


def is_module(value: Any) -> bool:
    """Tell a module from other callables."""
    return isinstance(value, nn.Module)


def refuse_stage(module: Any) -> str | None:
    return None if callable(module) else f"must be callable, got {type(module).__name__}"


def call_of(module: Any) -> Callable[..., Any]:
    return module.forward if isinstance(module, nn.Module) else module


def is_recording() -> bool:
    return torch.is_grad_enabled()


def device_of(module: Any) -> Any:
    if isinstance(module, nn.Module):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return get_platform().devices.current_device()


def is_tensor(value: Any) -> bool:
    """Tell a tensor from other values."""
    return isinstance(value, T)


def refuse(tensor: T, device: Any) -> str | None:
    if type(tensor) is not T and is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}; return the plain tensors in it, and wrap them in the next stage"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; only dense tensors are sent"
    if tensor.device != device:
        own = torch.device(device)
        if tensor.device.type != own.type or None not in (own.index, tensor.device.index):
            return f"a tensor on {tensor.device}, but its messages are on {device}: move it, or PipelineStage(device=)"
    return None


def sends_distributed() -> bool:
    return True


def flatten(tree: Any) -> tuple[list[Any], Any]:
    if type(tree) is T:  # what most stages pass on; pytree takes 3 us to see that it is no nest
        return [tree], _LEAF
    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the nest."""
    if structure is _LEAF:
        return leaves[0]
    return pytree.tree_unflatten(leaves, structure)


def describe(tensor: T) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def empty(description: tuple[tuple[int, ...], torch.dtype], device: Any) -> T:
    """Return an empty tensor of a description."""
    return torch.empty(description[0], dtype=description[1], device=device)


def of_one_element(device: Any) -> T:
    return torch.empty(1, device=device)


def sendable(tensor: T) -> T:
    return tensor.detach().contiguous()


def version(tensor: T) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return 0


def equal(one: T, other: T) -> bool:
    return torch.equal(one, other)


def memory(tensor: T) -> tuple[int, int]:
    if not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def needs_gradient(tensor: T) -> bool:
    """Tell whether backward goes on from here."""
    return tensor.requires_grad


class _Arrive(torch.autograd.Function):
    """The root of a stage's graph: Note [What arrives]."""

    @staticmethod
    def forward(ctx: Any, begin: T, gradients: list[T | None], places: list[int], tensors: list[T]) -> tuple[T, ...]:
        ctx.gradients = gradients  # not what holds the tensors too: they lead to this node, and all would be a cycle
        ctx.places = places
        ctx.set_materialize_grads(False)
        return tuple([tensors[place] for place in places])

    @staticmethod
    def backward(ctx: Any, *gradients: T | None) -> tuple[None, None, None, None]:
        for place, gradient in zip(ctx.places, gradients, strict=True):
            own = ctx.gradients[place]
            if gradient is not None:
                ctx.gradients[place] = gradient if own is None else own + gradient
        return None, None, None, None


_arrive: Any = super(torch.autograd.Function, _Arrive).apply  # type: ignore[misc]  # 4 us are for functorch


@functools.cache
def _begin() -> T:
    return torch.zeros((), requires_grad=True)


class Arrival:
    """Tensors from another stage, and their gradients."""

    def __init__(self, tensors: Sequence[T], needed: Sequence[bool]) -> None:
        self.tensors = list(tensors)
        self._gradients: list[T | None] = [None] * len(self.tensors)
        places = [place for place, need in enumerate(needed) if need]
        if places and torch.is_grad_enabled():
            rooted = _arrive(_begin(), self._gradients, places, self.tensors)
            for place, tensor in zip(places, rooted, strict=True):
                self.tensors[place] = tensor

    def gradients(self) -> list[T | None]:
        """Take the gradients, one for each tensor."""
        taken = self._gradients[:]
        self._gradients[:] = [None] * len(taken)
        return taken


def arrive(tensors: Sequence[T], needed: Sequence[bool]) -> Arrival:
    return Arrival(tensors, needed)


def prepare_split(module: nn.Module) -> None:
    mark(module)


def deferring(module: nn.Module) -> tuple[DeferredGradients, AbstractContextManager[Any]]:
    deferred = DeferredGradients()
    return deferred, frame(weights=deferred)


_SHARDED = ("unshard", "reshard", "set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward")


def sharded_modules(module: Any) -> list[Any]:
    if not isinstance(module, nn.Module):
        return []
    return [each for each in module.modules() if all(callable(getattr(each, name, None)) for name in _SHARDED)]


def outermost(modules: Sequence[Any]) -> list[Any]:
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inside]


def reduce_gradients(module: Any, fill: bool) -> None:
    """Start to reduce what backwards without a reduction have left.

    torch's own schedules call the same function of FSDP2, which has no public one.
    """
    if hasattr(module, "reduce_gradients"):
        module.reduce_gradients()
        return
    state = module._get_fsdp_state()
    if fill:  # FSDP2 reduces a group on those ranks alone that have a gradient of it
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        state._lazy_init()  # no forward may have run, which makes the modules inside known
    state._root_post_backward_final_callback()


def without_gradients() -> AbstractContextManager[Any]:
    return torch.no_grad()


def recording() -> AbstractContextManager[Any]:
    return torch.enable_grad()


def backward(
    module: Any,
    arrivals: Sequence[Arrival],
    outputs: Sequence[T],
    gradients: Sequence[T],
    deferred: DeferredGradients | None,
) -> None:
    if deferred is None:
        run_backward(outputs, gradients)
        return
    with frame(weights=deferred) as current:  # for checkpoints, which compute layers again
        backward_in(current, outputs, gradients)


def named_parameters(module: Any) -> dict[str, T]:
    return dict(module.named_parameters(remove_duplicate=False)) if isinstance(module, nn.Module) else {}


def describe_parameter(parameter: T) -> str:
    text = f"{parameter.dtype} of shape {tuple(parameter.shape)}"
    if not get_platform().devices.has_memory(parameter):
        raise NotImplementedError("a parameter on the meta device: initialise it before the first run")
    if not parameter.requires_grad:
        text += ", frozen"
    sharded: Any = parameter
    mesh = getattr(sharded, "device_mesh", None)
    if mesh is None:
        return text
    part = tuple(local(parameter).shape)
    return f"{text}, {sharded.placements} on a mesh of shape {tuple(mesh.shape)} at {mesh.get_coordinate()}: {part}"


@torch.no_grad()
def local(tensor: Any) -> T:
    return tensor.to_local() if hasattr(tensor, "placements") else tensor.detach()


def device_of_tensor(tensor: T) -> torch.device:
    """Return the device of a tensor."""
    return tensor.device


@torch.no_grad()
def fill(parameter: T, value: T) -> None:
    local(parameter).copy_(value)


def gradient(parameter: T) -> T | None:
    return parameter.grad


def set_gradient(parameter: T, gradient: T | None) -> None:
    """Set a parameter's ``grad``."""
    parameter.grad = gradient


@torch.no_grad()
def gradient_of(parameter: T, value: T) -> T:
    if not hasattr(parameter, "placements"):
        return value
    result = torch.zeros_like(parameter, requires_grad=False)
    local(result).copy_(value)
    return result


@torch.no_grad()
def added(gradient: T, other: T) -> T:
    local(gradient).add_(local(other))
    return gradient


def take_gradient(parameter: T) -> T | None:
    gradient, parameter.grad = parameter.grad, None
    return gradient


def scaled(loss: T, factor: float) -> T:
    return torch.full_like(loss, factor)


def copied(tensor: T) -> T:
    return tensor.detach().clone()


def detach(tensor: T) -> T:
    """Return the value without its graph."""
    return tensor.detach()


def cut(tensor: T, dim: int, parts: int) -> list[T]:
    return list(tensor.chunk(parts, dim))


def concatenate(tensors: Sequence[T], dim: int) -> T:
    """Join along a dim."""
    return torch.cat(list(tensors), dim)


def shape(tensor: T) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(tensor.shape)


def surroundings() -> Callable[[], AbstractContextManager[Any]] | None:
    if torch_dispatches_above() or torch_functions_above():
        return None
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    stream = None
    if accelerator is not None:
        kinds.append(accelerator.type)
        stream = torch.accelerator.current_stream()
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    outer = current_frame()
    cached, recording = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            stack.enter_context(torch.set_grad_enabled(recording))
            if outer is not None:
                stack.enter_context(frame(like=outer))
            if stream is not None:
                torch.accelerator.set_stream(stream)
            yield

    return entered


class _Hooked(torch.autograd.Function):
    """Passes tensors on, and calls a function before their gradients go further."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        # Not the inputs themselves, to which a model could not write in place; a subclass may wait when it is detached.
        return tuple(tensor.detach() if type(tensor) is torch.Tensor else tensor for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.hook()
        return None, *gradients


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def hooked(tree: Any, backward: Callable[[], None]) -> Any:
    if not torch.is_grad_enabled():
        return tree
    # A container without such tensors stays the same object: a function may write to it.
    leaves, structure = pytree.tree_flatten(
        tree, is_leaf=lambda node: not any(map(_has_graph, pytree.tree_leaves(node)))
    )
    places = [place for place, leaf in enumerate(leaves) if _has_graph(leaf)]
    if not places:
        return tree
    for place, tensor in zip(places, _Hooked.apply(backward, *(leaves[place] for place in places)), strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, structure)
