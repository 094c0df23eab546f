"""Activations: bytes of the tensors that autograd saves in a model's forward for its backward.

Note [What counts as an activation]
    Each storage that autograd saved in the model's own forward counts once, in full, while a saved tensor uses it;
    parameters and buffers of the model don't, because they exist anyway. For a block under torch.utils.checkpoint these
    are its inputs; tensors recomputed in backward are not counted, nor those that a loss outside the model saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hp_fsdp.groups.managed_params import groups_in
from hp_fsdp.torch.groups.bucket import Bucket
from hp_platform.torch.internals import saved_hooks_above, without_torch_function


class Activations:
    """Bytes that autograd saved, see Note [What counts as an activation].

    Attributes:
        bytes: saved now.
        peak: the most saved at once.
        uncounted: number of saved tensors without a storage to count (sparse ones).
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self.uncounted = 0

    def __repr__(self) -> str:
        return f"Activations(bytes={self.bytes}, peak={self.peak}, uncounted={self.uncounted})"


class SavedBytes:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks` that count what lives between the two.

    Args:
        counted: the counts to update.
        ignore: tells, by its address, if a storage exists anyway.
    """

    def __init__(self, counted: Activations, ignore: Callable[[int], bool]) -> None:
        self.counted = counted
        self.ignore = ignore
        self.users: dict[int, int] = {}
        # Nodes of several devices are freed in several threads, also while this thread holds the lock.
        self.lock = threading.RLock()

    def hooks(self) -> Any:
        """Return the context manager inside which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        with without_torch_function():
            tensor = tensor.detach()  # the tensor itself would keep its node alive, which keeps the result of this
            try:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
            except (NotImplementedError, RuntimeError):
                self.counted.uncounted += 1
                return tensor
        if key not in self.users and self.ignore(key):
            return tensor
        return _Saved(self, tensor, key, size)

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    def add(self, key: int, size: int) -> None:
        """Count one more saved tensor in a storage."""
        with self.lock:
            self.users[key] = self.users.get(key, 0) + 1
            if self.users[key] == 1:
                self.counted.bytes += size
                self.counted.peak = max(self.counted.peak, self.counted.bytes)

    def remove(self, key: int, size: int) -> None:
        """Count one less."""
        with self.lock:
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]
                self.counted.bytes -= size


class _Saved:
    """A saved tensor; it lives as long as autograd keeps it."""

    __slots__ = ("key", "owner", "size", "tensor")

    def __init__(self, owner: SavedBytes, tensor: torch.Tensor, key: int, size: int) -> None:
        self.owner, self.tensor, self.key, self.size = owner, tensor, key, size
        owner.add(key, size)

    def __del__(self) -> None:
        self.owner.remove(self.key, self.size)


@contextmanager
def watch_activations(model: nn.Module) -> Iterator[Activations]:
    """Count the bytes that autograd saves in the model's forwards inside the block, for `explain`.

    Example:
        >>> with watch_activations(model) as activations:
        ...     loss_of(model(x)).backward()
        >>> print(explain(model, activations=activations))

    Args:
        model: a sharded module, or any other. It runs as usual, a little slower.

    Yields:
        The counts, which stay readable afterwards; see Note [What counts as an activation].

    Raises:
        RuntimeError: by a forward of the model inside other `saved_tensors_hooks` (activation offloading, or a
            checkpoint around the whole model), which see nothing while these watch.
    """
    activations = Activations()
    there = _storages(model)
    buckets = [bucket for group in groups_in(model.modules()) for bucket in group.buckets]
    saved = SavedBytes(activations, lambda key: key in there or _is_gathered(buckets, key))
    open_: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        if saved_hooks_above(False) is not None:
            raise RuntimeError(
                f"watch_activations: the forward of {type(module).__name__} ran inside other saved_tensors_hooks, such"
                " as activation offloading or a checkpoint around it, which would not see the tensors it saves. Call it"
                " outside of them, or watch a module around them"
            )
        there.update(_storages(module))
        open_.append(saved.hooks())
        open_[-1].__enter__()

    def leave(*_: Any) -> None:
        if open_:
            open_.pop().__exit__(None, None, None)

    handles = [
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield activations
    finally:
        for handle in handles:
            handle.remove()


def storages_of(tensors: Sequence[Any]) -> set[int]:
    """Return the addresses of the storages of tensors; those without one are left out."""
    addresses = set()
    with without_torch_function():
        for tensor in tensors:
            try:
                addresses.add(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                continue
    return addresses


def _storages(model: nn.Module) -> set[int]:
    registered = [
        each for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values())
    ]
    return storages_of([each for each in registered if each is not None])


def _is_gathered(buckets: Sequence[Bucket], key: int) -> bool:
    return any(bucket.prepared and bucket.full_storage._cdata == key for bucket in buckets)
