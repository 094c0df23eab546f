"""A function that runs without keeping what its backward needs, and runs again when backward needs it.

Note [Regions]
    While a region runs, hooks put a `_Slot` in the graph for each tensor that an operation saves. The first slot that
    backward loads runs the function again, from its saved arguments, and the tensors that are saved in this second run
    go into the slots, in the same order. The second run ends at the last slot that still is in the graph (a slot whose
    node has run is gone). Arguments are saved by a node of the graph, so that a region around this one, or a swap,
    treats them as it treats anything that is saved; that makes regions nest without more.

    A slot gives its tensor away when it is loaded. A graph that is retained loads again, and the function runs again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from hp_offload.torch.functions import Filling
from hp_offload.torch.packed import Kept, Packed, changed, plain_torch, unpack
from hp_offload.torch.scope import Scope, running
from hp_offload.torch.surroundings import Surroundings

__all__ = ["Passes", "run_region"]

T = torch.Tensor


class Passes(Protocol):
    """Contexts of the runs of one region, and what its saved tensors become."""

    def first(self) -> AbstractContextManager[Any]:
        """Return the context of the forward."""
        ...

    def again(self, filling: Filling) -> AbstractContextManager[Any]:
        """Return the context of a run in backward; there may be several."""
        ...

    def pack(self, index: int, tensor: T) -> Packed | None:
        """Return what stands for the tensor that is saved as number `index`; None computes it again."""
        ...


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    passes: Passes | None = None,
    early_stop: bool = True,
    saving: AbstractContextManager[Any] | None = None,
) -> Any:
    """Run a function whose backward runs it again.

    Args:
        function: computes the same from the same arguments, whenever it is called.
        args: its arguments; tensors in lists, tuples and dicts among them are saved as an operation saves its inputs.
        kwargs: its keyword arguments, likewise.
        name: of the module or function, for errors.
        passes: contexts and exceptions; default none.
        early_stop: end the second run where nothing more is needed.
        saving: hooks for the arguments; default those around the call.

    Returns:
        What the function returned.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with saving or contextlib.nullcontext():
        region = _Region(function, args, kwargs, name, passes, early_stop)
    with saved_tensors_hooks(region.pack, unpack), running(region.scope):
        with contextlib.nullcontext() if passes is None else passes.first():
            result = function(*args, **kwargs)
    region.finished = True
    return result


class _Stop(BaseException):
    """Ends a second run; no handler of the function's own catches it."""


class _Arguments(torch.autograd.Function):
    """Saves tensors for whoever asks the node."""

    @staticmethod
    def forward(ctx: Any, anchor: T, *tensors: T) -> T:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        raise AssertionError("no gradient flows into what only saves")


class _Slot:
    """Stands for a tensor that a region's operation saved."""

    __slots__ = ("__weakref__", "region", "tensor", "version")

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.tensor: T | None = None
        self.version = 0

    def load(self) -> T:
        """Return the tensor; the first slot of a region that is asked fills all."""
        if self.tensor is None:
            self.region.run_again()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        if tensor._version != self.version:
            what = f"In the recomputation of {self.region.name}, a tensor of shape {tuple(tensor.shape)}"
            raise changed(what, tensor._version - self.version)
        return tensor


_Facts = tuple[torch.Size, torch.dtype, str, int]
_ANY = "any"
_native = torch._C._disabled_torch_dispatch_impl


def _facts(tensor: T, arguments: AbstractSet[int]) -> _Facts:
    """Return the shape, the dtype, which operation computed it ("": none), and how often a leaf was written to.

    Arguments are compared when they are loaded; the node that saves them, or who packed them, counts writes.

    What wraps a module for backward (views, Functions) may do so in the forward alone: its name compares with any.
    """
    node = tensor.grad_fn
    origin = "" if node is None else _ANY if isinstance(node, BackwardCFunction) else type(node).__name__
    base = tensor if tensor._base is None else tensor._base
    counted = base.grad_fn is None and _address(base) not in arguments
    version = tensor._version if counted else -1
    return tensor.shape, tensor.dtype, _ANY if origin in ("ViewBackward0", "AliasBackward0") else origin, version


def _address(tensor: T) -> int:
    plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is _native  # type: ignore[attr-defined]
    return tensor.untyped_storage().data_ptr() if plain and tensor.device.type != "meta" else 0


def _show(shape: torch.Size, dtype: torch.dtype, origin: str) -> str:
    return f"a {dtype} tensor of shape {tuple(shape)}{' from ' + origin if origin not in ('', _ANY) else ''}"


class _Region:
    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        passes: Passes | None,
        early_stop: bool,
    ) -> None:
        self.name = name
        self._function, self._passes, self._early_stop = function, passes, early_stop
        leaves, self._structure = tree_flatten((args, kwargs))
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, T)]
        anchor = torch.empty(0, requires_grad=True)
        saving = _Arguments.apply(anchor, *[leaves[place] for place in self._places])
        self._node: Any = saving.grad_fn  # type: ignore[union-attr]
        with plain_torch():
            self._arguments = {_address(leaves[place]) for place in self._places} - {0}
        self._rest = [None if isinstance(leaf, T) else leaf for leaf in leaves]
        self._surroundings = Surroundings()
        self.scope = Scope(recomputed=True)
        self.finished = False
        # One entry a saved tensor: its slot (None: it is kept elsewhere), and what its second run is compared by.
        self._slots: list[weakref.ref[_Slot] | None] = []
        self._facts: list[_Facts] = []

    def pack(self, tensor: T) -> Packed:
        """Put a slot in the graph: the first hook of the forward."""
        with plain_torch():
            index = len(self._slots)
            self._facts.append(_facts(tensor, self._arguments))
            packed = None if self._passes is None else self._passes.pack(index, tensor)
            packed = self.scope.swapped(tensor) or packed
        if packed is not None:
            self._slots.append(None)
            return packed
        slot = _Slot(self)
        self._slots.append(weakref.ref(slot))
        return slot

    def run_again(self) -> None:
        """Fill the slots that are still in the graph."""
        live = [index for index, slot in enumerate(self._slots) if slot is not None and slot() is not None]
        early_stop = self._early_stop or not self.finished  # the forward itself may run a backward
        filling = _Filling(self, live[-1] + 1 if early_stop else -1)
        try:
            tensors = self._node.saved_tensors
        except RuntimeError as error:
            error.add_note(f"This is an argument of {self.name}, which is recomputed from its arguments.")
            raise
        leaves = list(self._rest)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        try:
            with self._surroundings.restored(), saved_tensors_hooks(filling.pack, unpack), self._again(filling):
                self._function(*args, **kwargs)
        except _Stop as stop:
            if stop.args[0] is not filling:
                raise
        if filling.count <= live[-1] or (not early_stop and filling.count != len(self._slots)):
            raise self.differs(f"saved {filling.count} tensors where its forward saved {len(self._slots)}")

    @contextlib.contextmanager
    def _again(self, filling: Filling) -> Iterator[None]:
        passes = contextlib.nullcontext() if self._passes is None else self._passes.again(filling)
        with running(self.scope, again=True), passes:
            yield

    def differs(self, how: str) -> RuntimeError:
        """Return the error for a second run that is another than the first."""
        return RuntimeError(
            f"The recomputation of {self.name} {how}: it took another path. What it computes may depend on its"
            " arguments, its parameters and torch's random numbers alone, and on nothing that changes before backward."
        )

    def fill(self, index: int, tensor: T, origin: str | None = None) -> None:
        """Put what the second run saved as number `index` into its slot.

        Args:
            index: of the saved tensor.
            tensor: the same in the second run.
            origin: what computed it; default by its node.

        Raises:
            RuntimeError: the forward saved something else, or a parameter or an input was changed since.
        """
        if index >= len(self._slots):
            raise self.differs(f"saved more than the {len(self._slots)} tensors that its forward saved")
        shape, dtype, before, version = self._facts[index]
        again = _facts(tensor, frozenset())  # arguments may be elsewhere now; their versions were not noted
        origin = origin or again[2]
        if again[:2] != (shape, dtype) or (origin != before and _ANY not in (origin, before)):
            raise self.differs(
                f"saved {_show(*again[:2], origin)} as number {index} where its forward saved"
                f" {_show(shape, dtype, before)}"
            )
        if version >= 0 and again[3] != version:
            what = f"Between the forward of {self.name} and its recomputation, a tensor of shape {tuple(shape)}"
            raise changed(what + " that it uses", again[3] - version)
        reference = self._slots[index]
        slot = None if reference is None else reference()
        if slot is not None:
            slot.tensor, slot.version = tensor.detach(), tensor._version


class _Filling:
    """One second run of a region."""

    def __init__(self, region: _Region, stop: int) -> None:
        self._region, self._stop = region, stop
        self.count = 0

    def pack(self, tensor: T) -> Packed:
        """Fill a slot of the graph, and keep the tensor in the graph of this run: the function may run a backward."""
        with plain_torch():
            self._region.fill(self.count, tensor)
            self._next()
            return Kept(tensor)

    def put(self, index: int, tensor: T | None) -> None:
        """Fill a slot without an operation that saves; None passes over what is kept elsewhere."""
        if index != self.count:
            raise self._region.differs(f"saved {self.count} tensors where its forward had saved {index}")
        with plain_torch():
            if tensor is not None:
                self._region.fill(index, tensor, _ANY)
            self._next()

    def _next(self) -> None:
        self.count += 1
        if self.count == self._stop:
            raise _Stop(self)
