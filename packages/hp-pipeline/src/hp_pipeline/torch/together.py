"""What a forward and a backward need to run together in two threads: see `hp_pipeline.running.overlap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hp_platform.frames import current_frame, frame


def surroundings() -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what another thread enters to compute as this one does; None where modes of this thread forbid it."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
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
    """Pass a nest on; call a function when the gradients of its tensors are all there, before they go further."""
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
