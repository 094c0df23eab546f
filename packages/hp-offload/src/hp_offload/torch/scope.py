"""The checkpoint or swap that the program is in, for what stands inside of it: excluded modules and tagged tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hp_offload.torch.regions.functions import Walk
from hp_offload.torch.regions.sites import Computed
from hp_offload.torch.regions.state import random_state, set_random_state
from hp_offload.torch.swapping import Kept, Packed, SwapRun, unpack
from hp_platform.frames import frame

T = torch.Tensor


class _Local(threading.local):
    scope: Scope | None = None


_local = _Local()


class Scope:
    """One run of a function in a checkpoint or a swap.

    Args:
        recomputed: it is a checkpoint.
    """

    def __init__(self, *, recomputed: bool) -> None:
        self.recomputed = recomputed
        self.results: list[Any] = []
        """The results of excluded modules, in their order."""
        self.position: int | None = None
        """None in the forward; else how many of them the recomputation reached."""
        self.walk: Walk | None = None
        """Of the run that is under way, in a checkpoint."""
        self.tagged: dict[int, tuple[Any, SwapRun]] = {}
        """Storages that are swapped, by address, and with what."""

    def swapped(self, tensor: T) -> Packed | None:
        """Return what stands for a tensor if its storage is tagged."""
        if not self.tagged or tensor.device.type == "meta":
            return None
        tagged = self.tagged.get(tensor.untyped_storage().data_ptr())
        return None if tagged is None or tagged[0].expired() else tagged[1].pack(tensor)


@contextlib.contextmanager
def running(scope: Scope | None, *, again: bool = False) -> Iterator[None]:
    """Run a function in a scope; None while an excluded module runs."""
    outer, _local.scope = _local.scope, scope
    if scope is not None:
        position, scope.position = scope.position, 0 if again else None
    try:
        yield
    finally:
        _local.scope = outer
        if scope is not None:
            scope.position = position


def tag(tensor: T, run: SwapRun) -> None:
    """Swap what the current scope saves of a tensor.

    Raises:
        RuntimeError: there is no scope.
    """
    scope = _local.scope
    if scope is None:
        raise RuntimeError(
            "swap_tensor_wrapper outside of checkpoint and swap: nothing here decides what becomes of a saved tensor."
            " Call it inside of a function that runs under checkpoint(...) or swap(...)."
        )
    if scope.position is None:
        storage = tensor.untyped_storage()
        scope.tagged[storage.data_ptr()] = StorageWeakRef(storage), run


def run_excluded(forward: Callable[..., Any], args: Any, kwargs: Any, *, save_output: bool) -> Any:
    """Run a module's forward; in a recomputation return what it gave in the forward, if that was saved.

    Args:
        forward: of the module.
        args: its arguments.
        kwargs: its keyword arguments.
        save_output: keep the output; else the module runs again, and only what it saves is kept.
    """
    scope = _local.scope
    if scope is None or not scope.recomputed or scope.walk is None:
        return forward(*args, **kwargs)
    with scope.walk.opaque(tree_leaves((args, kwargs))):
        result = _excluded(scope, forward, args, kwargs, save_output)
    scope.walk.computed(tree_leaves(result))
    return result


def _excluded(scope: Scope, forward: Callable[..., Any], args: Any, kwargs: Any, save_output: bool) -> Any:
    if scope.position is not None and save_output:
        result, random = scope.results[scope.position]
        scope.position += 1
        if random is not None:
            set_random_state(random)
        with _disable_current_modes():  # a policy in torch's modes never saw the module
            return tree_map_only(_Result, _Result.again, result)
    before = random_state()
    with running(None), _disable_current_modes(), saved_tensors_hooks(Kept, unpack), frame(outputs=Computed()):
        result = forward(*args, **kwargs)
    if scope.position is None and save_output:
        after = random_state()
        moved = any(not torch.equal(old, new) for old, new in zip(before, after))
        kept = tree_map_only(T, _Result, result)
        scope.results.append((kept, after if moved else None))
    return result


class _Result:
    """A tensor of an excluded module's result."""

    def __init__(self, tensor: T) -> None:
        self._kept, self._requires_grad = Kept(tensor), tensor.requires_grad

    def again(self) -> T:
        """Return it as the start of a graph: a recomputation needs what is saved after it, and no gradient of it."""
        tensor = self._kept.load().detach()
        return tensor.requires_grad_().view_as(tensor) if self._requires_grad else tensor  # a leaf allows no writes
