"""Saved tensors: what stands for one in the graph, and those that go to the host, by storage, once, and no parameter.

Note [What stays]
    Parameters, buffers, leaves that the caller holds, and all views of them: to copy them frees nothing. What has no
    memory of its own (fake, meta, sparse and nested tensors), or is seen through a conjugation, stays as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hp_offload.manager import Entry, GroupRun, SwapManager
from hp_offload.saved import CheckpointPolicy, checked_swap_answer
from hp_platform import get_platform
from hp_platform.torch.internals import is_native, without_torch_function

T = torch.Tensor


class Packed(Protocol):
    """Stands for a saved tensor."""

    def load(self) -> T:
        """Return the tensor, at its use in backward."""
        ...


def unpack(packed: Packed) -> T:
    """Return the tensor that `packed` stands for: the second hook of `saved_tensors_hooks`."""
    return packed.load()


def address_of(tensor: T) -> int:
    """Return what tells a tensor's storage from others; 0 where it has none."""
    return 0 if tensor.layout is not torch.strided else address_of_storage(tensor.untyped_storage())


def address_of_storage(storage: torch.UntypedStorage) -> int:
    """Return where a storage begins, or the number of one whose memory has no address; 0 where there is no memory."""
    if storage.device.type != "meta":
        return storage.data_ptr()
    return storage._cdata if storage.nbytes() and get_platform().devices.has_memory(storage) else 0


def version_of(tensor: T) -> T:
    """Return an empty tensor that counts the writes to `tensor`, and to all that shares its memory, without holding it.

    Note [Versions without memory]
        Autograd sees a write to what it saved by a counter that a tensor shares with its views. With hooks it no longer
        looks. The counter lives on in a detached tensor whose memory is replaced.
    """
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def changed(
    what: str, writes: int, advice: str = "Write to a copy (`x = x + y` in place of `x += y`)."
) -> RuntimeError:
    """Return the error for a saved tensor that was written to in place.

    Args:
        what: names the tensor.
        writes: how often.
        advice: what to do instead.
    """
    return RuntimeError(
        f"{what} was modified in place {writes} {'time' if writes == 1 else 'times'} after an operation saved it for"
        f" backward: its gradient would be wrong. {advice}"
    )


residents: dict[int, Callable[[T], Packed]] = {}
"""What stands in the graph for a tensor on the memory of a parameter that visits the device, by its address."""


def is_placed(tensor: T) -> bool:
    """Tell whether a tensor is on the memory of a parameter that visits the device."""
    return bool(residents) and type(tensor) is T and address_of(tensor) in residents


def kept(tensor: T) -> Packed:
    """Return what stands for a tensor that stays, or whose home brings it back."""
    return residents[address_of(tensor)](tensor) if is_placed(tensor) else Kept(tensor)


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: T) -> None:
        # The hook is given the tensor itself: with its graph, which may hold this object, memory would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version

    def load(self) -> T:
        """Return the tensor, unless it was written to."""
        if self.tensor._version != self.version:
            shape = tuple(self.tensor.shape)
            raise changed(f"A tensor of shape {shape}", self.tensor._version - self.version)
        return self.tensor


class _Swapped:
    """Stands for a tensor whose storage may be on the host."""

    __slots__ = ("counter", "dtype", "entry", "offset", "size", "stride", "version")

    def __init__(self, tensor: T, entry: Entry) -> None:
        self.entry, self.dtype = entry, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.counter, self.version = version_of(tensor), tensor._version

    def load(self) -> T:
        """Return the tensor, unless it was written to."""
        if self.counter._version != self.version:
            what = f"A swapped tensor of shape {tuple(self.size)} (group {self.entry.run.name!r})"
            raise changed(what, self.counter._version - self.version)
        storage, offset = self.entry.bring()
        new = torch.empty(0, dtype=self.dtype, device=storage.device)
        return new.set_(storage, offset // self.dtype.itemsize + self.offset, self.size, self.stride)


class _KeptIn(Kept):
    """A tensor that stays, of a group others of which may be on the host."""

    __slots__ = ("run",)

    def __init__(self, tensor: T, run: GroupRun) -> None:
        super().__init__(tensor)
        self.run = run

    def load(self) -> T:
        """Return the tensor, unless it was written to."""
        self.run.begin_backward()
        return super().load()


class _Wrapped:
    """Stands for a tensor of a class that wraps others, such as torch's DTensor."""

    def __init__(self, tensor: Any, inner: dict[str, Packed], context: Any) -> None:
        self._type, self._inner, self._context = type(tensor), inner, context
        self._size, self._stride = tensor.size(), tensor.stride()

    def load(self) -> T:
        inner = {name: packed.load() for name, packed in self._inner.items()}
        return self._type.__tensor_unflatten__(inner, self._context, self._size, self._stride)


class _Once:
    """What a hook puts in the graph: refuses a second derivative."""

    __slots__ = ("packed",)

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def load(self) -> T:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "This second derivative (create_graph=True) passes through a tensor that swap moved to the host, which"
                " backward of backward would not find: run this forward without swap, or answer MUST_SAVE for it."
            )
        return self.packed.load()


class SwapRun:
    """Takes the tensors of one run of a function.

    Args:
        name: of the group.
        fused: copy the group as one.
        stays: tensors that are not moved, beside those of Note [What stays].
        policy_fn: says `MUST_SAVE` or `MUST_SWAP` of a tensor; default swaps all.
        run: the group to put them in; default one that leaves and comes back in the order of all groups.
    """

    def __init__(
        self,
        name: str,
        fused: bool = False,
        stays: Callable[[], Iterable[T]] = tuple,
        policy_fn: Callable[[T], Any] | None = None,
        run: GroupRun | None = None,
    ) -> None:
        self._name, self._fused, self._stays, self._policy_fn = name, fused, stays, policy_fn
        self._run = run
        if run is not None:
            run.protected.update(_addresses(stays()))

    def out(self, tensor: T) -> Packed:
        """Return what stands for a tensor that goes to the host."""
        with without_torch_function():
            if not is_native(tensor) and is_traceable_wrapper_subclass(tensor):
                names, context = tensor.__tensor_flatten__()
                return _Wrapped(tensor, {name: self.out(getattr(tensor, name)) for name in names}, context)
            if stays(tensor):
                return kept(tensor)
            entry = self.open().add(tensor.untyped_storage())
            return Kept(tensor) if entry is None else _Swapped(tensor, entry)

    def open(self) -> GroupRun:
        """Begin the group, if it has not begun."""
        if self._run is None:
            self._run = SwapManager().begin(self._name, self._fused)
            self._run.protected.update(_addresses(self._stays()))
        return self._run

    def kept(self, tensor: T) -> Packed:
        """Return what stands for a tensor that stays; its use in backward begins the group's."""
        if is_placed(tensor):
            return kept(tensor)
        return Kept(tensor) if self._run is None else _KeptIn(tensor, self._run)

    def begin_backward(self) -> None:
        """Begin the group's backward, if there is a group."""
        if self._run is not None:
            self._run.begin_backward()

    def finish(self) -> None:
        """End the run of the function."""
        if self._run is not None:
            SwapManager().end(self._run)

    def pack(self, tensor: T) -> Packed:
        """Put a tensor that is saved where the policy says."""
        if self._policy_fn is not None and not stays(tensor):
            with without_torch_function():
                answer = self._policy_fn(tensor.detach())
                asked = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            if checked_swap_answer(answer, asked) is CheckpointPolicy.MUST_SAVE:
                return Kept(tensor)
        packed = self.out(tensor)
        return packed if isinstance(packed, Kept) or is_placed(tensor) else _Once(packed)


def stays(tensor: T) -> bool:
    """Tell a parameter, another leaf or a view of one, and what has no memory of its own, from what can be moved."""
    base = tensor._base if tensor._base is not None else tensor
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad) or is_placed(tensor):
        return True
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return True
    if not is_native(tensor):
        return not is_traceable_wrapper_subclass(tensor)
    return not get_platform().devices.has_memory(tensor)


def _addresses(tensors: Iterable[T]) -> set[int]:
    return {address_of(each) for each in tensors if is_native(each)}


@contextlib.contextmanager
def swapping(run: SwapRun) -> Iterator[None]:
    """Let saved tensors go to the host."""
    with saved_tensors_hooks(run.pack, unpack):
        yield
    run.finish()
