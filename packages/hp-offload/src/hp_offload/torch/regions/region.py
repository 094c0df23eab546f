"""A function that runs again when backward needs what it did not keep, and the scope that says what is inside of it.

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
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hp_offload.torch.regions.functions import Filling, Walk, differing
from hp_offload.torch.regions.sites import Computed
from hp_offload.torch.regions.state import State, Surroundings, random_state, set_random_state, snapshot
from hp_offload.torch.swapping import Kept, Packed, SwapRun, address_of, changed, unpack
from hp_platform.frames import frame
from hp_platform.torch.internals import is_native, without_torch_function


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
        tagged = self.tagged.get(address_of(tensor)) if self.tagged else None
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
        scope.tagged[address_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), run


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


T = torch.Tensor


class Passes(Protocol):
    """Contexts of the runs of one region, and what its saved tensors become."""

    def first(self, walk: Walk) -> AbstractContextManager[Any]:
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
    try:
        with saved_tensors_hooks(region.pack, unpack), running(region.scope):
            with contextlib.nullcontext() if passes is None else passes.first(region.walk):
                result = function(*args, **kwargs)
    finally:
        region.finish()
    return result


class _Stop(BaseException):
    """Ends a second run; no handler of exceptions catches it, and one that catches all changes nothing more."""


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


_Facts = tuple[torch.Size, torch.dtype, Any, int]
_ANY = "any"


def _facts(tensor: T, node: Any, arguments: AbstractSet[int]) -> _Facts:
    """Return the shape, the dtype, what computed it (None: nothing), and how often a leaf was written to.

    Arguments are compared when they are loaded; the node that saves them, or who packed them, counts writes.

    What wraps a module for backward (views, Functions) may do so in the forward alone: its name compares with any.
    What a Function computed may be a view of memory that nobody else knows: only a parameter is a leaf behind a node.
    """
    base = tensor._base
    leaf = tensor if base is None else base
    if node is not None:
        origin = type(node)
        known = base is not None and base.requires_grad and base.grad_fn is None
        version = leaf._version if known and id(leaf) not in arguments else -1
        return tensor.shape, tensor.dtype, _origins.get(origin) or _origin(origin), version
    version = -1
    if base is None or base.grad_fn is None:
        given = id(leaf) in arguments or (not leaf.requires_grad and _address(leaf) in arguments)
        version = -1 if given else leaf._version
    return tensor.shape, tensor.dtype, None, version


_origins: dict[type, Any] = {}


def _origin(kind: type) -> Any:
    wraps = kind.__name__ in _WRAPPERS or issubclass(kind, BackwardCFunction)
    return _origins.setdefault(kind, _ANY if wraps else kind)


_WRAPPERS = ("ViewBackward0", "AliasBackward0")


def _address(tensor: T) -> int:
    return address_of(tensor) if is_native(tensor) else 0


def _show(shape: torch.Size, dtype: torch.dtype, origin: Any) -> str:
    source = "" if origin in (None, _ANY) else f" from {origin.__name__}"
    return f"a {dtype} tensor of shape {tuple(shape)}{source}"


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
        self._node: Any = saving.grad_fn
        with without_torch_function():
            given = [leaves[place] for place in self._places]
            self._given = [each if each._base is None else each._base for each in given]
            self._arguments = {*map(id, self._given), *map(_address, given)} - {0}
        self._rest = [None if isinstance(leaf, T) else snapshot(leaf) for leaf in leaves]
        self._surroundings = Surroundings()
        self._state = State(function, self._rest)
        outer = (leaves[place].grad_fn for place in self._places)
        self.walk = Walk((node for node in outer if node is not None), torch.autograd._get_sequence_nr())
        self.scope = Scope(recomputed=True)
        self.scope.walk = self.walk
        self.finished = False
        # One entry a saved tensor: its slot (None: it is kept elsewhere), and what its second run is compared by.
        self._slots: list[weakref.ref[_Slot] | None] = []
        self._facts: list[_Facts] = []

    def finish(self) -> None:
        """End the forward."""
        self.finished = True
        self._given.clear()
        self.walk.finish()
        self._state.finish()

    def pack(self, tensor: T) -> Packed:
        """Put a slot in the graph: the first hook of the forward."""
        with without_torch_function():
            index = len(self._slots)
            node = tensor.grad_fn
            self._facts.append(_facts(tensor, node, self._arguments))
            self.walk.save(node)
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
        first = self.walk if self.finished else self.walk.so_far()
        filling = _Filling(self, live[-1] + 1 if early_stop else -1, first.outer)
        try:
            tensors = self._node.saved_tensors
        except RuntimeError as error:
            error.add_note(f"This is an argument of {self.name}, which is recomputed from its arguments.")
            raise
        leaves = [snapshot(leaf) for leaf in self._rest]
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        outer, self.scope.walk = self.scope.walk, filling.walk
        try:
            with self._surroundings.restored(), saved_tensors_hooks(filling.pack, unpack), self._again(filling):
                self._function(*args, **kwargs)
        except BaseException as error:
            if not filling.stopped(error):
                raise
        finally:
            self.scope.walk = outer
            filling.walk.finish()
        if filling.count <= live[-1] or (not early_stop and filling.count != len(self._slots)):
            raise self.differs(f"saved {filling.count} tensors where its forward saved {len(self._slots)}")
        how = differing(first, filling.walk)
        if how:
            raise self.differs(how)

    @contextlib.contextmanager
    def _again(self, filling: Filling) -> Iterator[None]:
        passes = contextlib.nullcontext() if self._passes is None else self._passes.again(filling)
        with self._state.restored(self.name), running(self.scope, again=True), passes:
            yield

    def differs(self, how: str) -> RuntimeError:
        """Return the error for a second run that is another than the first."""
        return RuntimeError(
            f"The recomputation of {self.name} {how}: it took another path. What it computes may depend on its"
            " arguments, its parameters and torch's random numbers alone, and on nothing that changes before backward."
        )

    def fill(self, index: int, tensor: T, node: Any, origin: Any = None) -> None:
        """Put what the second run saved as number `index` into its slot.

        Args:
            index: of the saved tensor.
            tensor: the same in the second run.
            node: that computed it.
            origin: what computed it; default by its node.

        Raises:
            RuntimeError: the forward saved something else, or a parameter or an input was changed since.
        """
        if index >= len(self._slots):
            raise self.differs(f"saved more than the {len(self._slots)} tensors that its forward saved")
        shape, dtype, before, version = self._facts[index]
        again = _facts(tensor, node, frozenset())  # arguments may be elsewhere now; their versions were not noted
        origin = origin or again[2]
        alike = origin is before or origin is _ANY or before is _ANY
        if not alike or again[0] != shape or again[1] is not dtype:
            raise self.differs(
                f"saved {_show(*again[:2], origin)} as number {index} where its forward saved"
                f" {_show(shape, dtype, before)}"
            )
        if again[3] != version >= 0 <= again[3]:
            what = f"Between the forward of {self.name} and its recomputation, a tensor of shape {tuple(shape)}"
            # A copy in its place would be what the second run uses, and nothing would tell it from the first.
            advice = "Change it after backward, or pass it to the function as an argument and write to a copy."
            raise changed(what + " that it uses", abs(again[3] - version), advice)
        reference = self._slots[index]
        slot = None if reference is None else reference()
        if slot is not None:
            slot.tensor, slot.version = tensor.detach(), tensor._version


class _Filling:
    """One second run of a region."""

    def __init__(self, region: _Region, stop: int, outer: AbstractSet[Any]) -> None:
        self._region, self._last = region, stop
        self.count = 0
        self.walk = Walk(outer)
        self._over = False

    def pack(self, tensor: T) -> Packed:
        """Fill a slot of the graph, and keep the tensor in the graph of this run: the function may run a backward."""
        with without_torch_function():
            if not self._over:
                node = tensor.grad_fn
                self._region.fill(self.count, tensor, node)
                self.walk.save(node)
                self._next()
            return Kept(tensor)

    def put(self, index: int, tensor: T | None) -> None:
        """Fill a slot without an operation that saves; None passes over what is kept elsewhere."""
        if self._over:
            return
        if index != self.count:
            raise self._region.differs(f"saved {self.count} tensors where its forward had saved {index}")
        with without_torch_function():
            if tensor is not None:
                self._region.fill(index, tensor, tensor.grad_fn, _ANY)
            self.walk.save(None)
            self._next()

    def stopped(self, error: BaseException) -> bool:
        """Return True for the end of this run, and for what a handler of the function's own made of it."""
        links: list[BaseException | None] = [error]
        while links:
            link = links.pop()
            if link is not None:
                if isinstance(link, _Stop) and link.args[0] is self:
                    return True
                links += [link.__cause__, link.__context__]
        return False

    def _next(self) -> None:
        self.count += 1
        if self.count == self._last:
            self._over = True
            raise _Stop(self)
