"""Heavy functions that modules call themselves, and the operations that computed what a region saves.

Note [Functions as sites]
    No module's forward stands for a function that is called by name, so a function mode looks for these calls. It costs
    about a microsecond a call of torch, and is on only where a region's table keeps a function's output.

    A function keeps torch's own node in the graph. What the node saved of its arguments is computed again, as anything
    in a region. The rest (the output, an attention's logarithms of sums) stays, or waits on the host. So the second run
    needs no arithmetic at such a function: its arguments fill their slots, and its output is handed back. A function
    that saves copies of its arguments (`einsum` where it has to reorder them) is no site: to keep the copies would cost
    the memory that a region is there to save.

Note [Histories]
    A second run that takes another branch may save tensors of the same shapes and dtypes. The operations that computed
    them tell. So after a run the graph of each saved tensor is walked, from the tensor back to what was walked before
    or was there before the region; a node is visited once. The operation that saves a tensor last is not reached, and
    need not be: backward runs the node of the forward, with the tensor that it is handed, and whose graph was walked.

    Passed over, since one run may have them and the other not: what wraps modules in the forward alone (Functions and
    views), casts (autocast keeps those of weights), and what heavy functions and excluded modules consist of, whose
    outputs may be handed back. Of an operation's own numbers, those count that its node keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hp_offload.torch.swapping import Kept, address_of, unpack
from hp_platform import get_platform
from hp_platform.frames import current_frame
from hp_platform.torch.internals import is_native

T = torch.Tensor

_PASSED = {"ViewBackward0", "AliasBackward0", "ToCopyBackward0", "AccumulateGrad"}
_SIZES = ("size", "stride", "numel", "shape", "layout", "options", "generator")
"""Parts of the names of what a node keeps that its tensors tell already, or that is no number."""
_kinds: dict[type, Callable[[Any], Any]] = {}
"""Of a node's class: what returns its numbers, `_none` where it has none, `_passed` where it is passed over."""


def _none(node: Any) -> None: ...


def _passed(node: Any) -> None: ...


class Walk:
    """One run's walk through the graph of a region.

    Args:
        outer: nodes that were there before the region.
        since: autograd's number of the region's first node; None where `outer` names all that the walk meets.

    Attributes:
        outer: the same, and those that the walk met.
        operations: those that computed what was saved, in the order of the walk; known when it is finished.
        until: how many of them computed what was saved up to number n.
    """

    def __init__(self, outer: Iterable[Any], since: int | None = None) -> None:
        self.outer = {*outer}
        self.operations: list[Any] = []
        self.until: list[int] = []
        self._since = since
        self._roots: list[Any] = []
        self._packs: list[int] = []
        self._inside = False

    def save(self, node: Any) -> None:
        """Note that the next tensor is saved.

        Args:
            node: that computed it; None if nothing did, or if it is none of the region's.
        """
        if not self._inside:
            self._roots.append(node)
        self._packs.append(len(self._roots))

    @contextmanager
    def opaque(self, given: Iterable[Any]) -> Iterator[None]:
        """Pass over what is saved while inside.

        Args:
            given: what the tensors inside are computed from; what is no tensor is left out.
        """
        outer = self._inside
        if not outer:
            self._roots += [each.grad_fn for each in given if isinstance(each, T)]
        self._inside = True
        try:
            yield
        finally:
            self._inside = outer

    def computed(self, results: Iterable[Any]) -> None:
        """Take the results of what is opaque as walked."""
        self._roots += [_Opaque(each.grad_fn) for each in results if isinstance(each, T) and each.grad_fn is not None]

    def finish(self) -> None:
        """Walk, and let go of the nodes: they hold what they saved."""
        seen, found, ends = set(self.outer), self.operations, [0]
        for root in self._roots:
            if type(root) is _Opaque:
                seen.add(root.node)
            elif root is not None and root not in seen:
                self._visit([(root, 0)], seen)
            ends.append(len(found))
        self.until = [ends[each] for each in self._packs]
        self._roots, self._packs = [], []

    def so_far(self) -> Walk:
        """Return what is known before the run's end."""
        walk = Walk(self.outer, self._since)
        walk._roots, walk._packs = [*self._roots], [*self._packs]
        walk.finish()
        return walk

    def _visit(self, todo: list[Any], seen: set[Any]) -> None:
        since, found = self._since, self.operations
        while todo:
            node, number = todo.pop()
            if node is None or node in seen:
                continue
            if since is not None and node._sequence_nr() < since:  # a leaf's number is the largest
                self.outer.add(node)
                seen.add(node)
                continue
            kind = type(node)
            numbers = _kinds.get(kind) or _numbers(kind)
            edges = node.next_functions
            if numbers is not _passed:
                found.append(kind)
                if numbers is not _none:
                    found.append(numbers(node))
            elif len(edges) > 1 and len(edges) == len(node._input_metadata):  # an output for each input: a wrapper
                if (node, number) not in seen:
                    seen.add((node, number))
                    todo.append(edges[number])
                continue
            seen.add(node)
            todo += edges


class _Opaque:
    """The last node of what is passed over."""

    def __init__(self, node: Any) -> None:
        self.node = node


def _numbers(kind: type) -> Callable[[Any], Any]:
    names = {*dir(kind)}
    saved = (name for name in sorted(names) if name.startswith("_saved_") and "_raw" + name not in names)
    kept = [name for name in saved if not any(part in name for part in _SIZES)]
    passed = issubclass(kind, BackwardCFunction) or kind.__name__ in _PASSED
    return _kinds.setdefault(kind, _passed if passed else attrgetter(*kept) if kept else _none)


def differing(first: Walk, again: Walk) -> str:
    """Return how a second run, or the part of it that ran, differs from the first; "" where it does not."""
    until = first.until[len(again.until) - 1] if again.until else 0
    if again.operations == first.operations[:until]:
        return ""
    for place, (before, now) in enumerate(zip(first.operations[:until], again.operations)):
        if repr(before) != repr(now):  # what is not a number is not equal to itself
            return f"computed {_shown(again, place)} where its forward computed {_shown(first, place)}"
    counts = [sum(isinstance(each, type) for each in found) for found in (again.operations, first.operations[:until])]
    if counts[0] == counts[1]:
        return ""
    return f"saved what {counts[0]} operations computed where its forward saved what {counts[1]} did"


def _shown(walk: Walk, place: int) -> str:
    """Return an operation as text, "GeluBackward0('tanh')"."""
    found = walk.operations[place]
    if isinstance(found, type):
        return found.__name__
    return f"{walk.operations[place - 1].__name__} with {found!r}"


_NAMES = {
    F: "scaled_dot_product_attention linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    " embedding grouped_mm scaled_grouped_mm",
    torch: "matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    " _grouped_mm",
    T: "matmul mm bmm addmm baddbmm",
}
_SITES = {
    getattr(namespace, name): f"{name.removeprefix('_')}()"
    for namespace, names in _NAMES.items()
    for name in names.split()
    if hasattr(namespace, name)
}
_KEEP_THEIR_DTYPE = {"embedding()", "grouped_mm()", "scaled_grouped_mm()"}
"""Functions whose arguments autocast leaves as they are."""


_KERNELS = (
    "mm addmm bmm baddbmm linear embedding convolution _scaled_dot_product _flash_attention _efficient_attention"
    " _fused_attention npu_fusion_attention _grouped_mm _scaled_grouped_mm"
).split()


def is_heavy(operation: Any) -> bool:
    """Tell an operation that heavy operations run from all others."""
    name = str(operation).partition(".")[2].partition(".")[0]
    return name in _KERNELS or name.startswith("_scaled_dot_product")


def is_function(site: str | None) -> bool:
    """Tell the site of a function from a module's."""
    return site is not None and site.endswith("()")


class Site:
    """One call of a heavy function.

    Attributes:
        name: of the site.
        tensors: its arguments that are tensors, in order.
        random: it may draw random numbers.
    """

    def __init__(self, func: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self._func = _SITES[func], func
        leaves, self._structure = tree_flatten((args, kwargs))
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, T)]
        self._rest = [None if isinstance(leaf, T) else leaf for leaf in leaves]
        self.tensors: list[T] = [leaves[place] for place in self._places]
        kind = self.tensors[0].device.type
        if self.name not in _KEEP_THEIR_DTYPE and torch.is_autocast_enabled(kind):
            # What the function casts is no argument of its own; cast before, it can be computed again.
            dtype = torch.get_autocast_dtype(kind)
            cast = lambda each: each.is_floating_point() and each.dtype is not torch.float64  # noqa: E731
            self.tensors = [each.to(dtype) if cast(each) else each for each in self.tensors]
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        self.random = self.name == "scaled_dot_product_attention()" and dropout > 0

    def compute(self, *tensors: T) -> T:
        """Call the function with tensors in place of its own."""
        leaves = list(self._rest)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._func(*args, **kwargs)

    def run(self) -> T:
        """Call the function."""
        return self.compute(*self.tensors)


class Asked(Protocol):
    """What a frame's outputs are to be asked about functions."""

    def call(self, site: Site) -> T:
        """Return the output of a function."""
        ...


class Calls(TorchFunctionMode):
    """Asks the outputs of a frame about the functions that are called directly in that frame.

    Args:
        outputs: of the frame.
    """

    def __init__(self, outputs: Asked) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SITES and not torch.compiler.is_compiling():
            current = current_frame()
            if current is not None and current.outputs is self._outputs and _plain(args, kwargs):
                return self._outputs.call(Site(func, args, kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return True for tensors of torch's own on a device, without `out` and other options that write."""
    if kwargs and (kwargs.get("out") is not None or kwargs.get("max_norm") is not None):
        return False
    if len(args) > 3 and isinstance(args[3], float):  # max_norm of an embedding
        return False
    has_memory = get_platform().devices.has_memory
    tensors = [each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, T)]
    return bool(tensors) and all(
        is_native(each) and each.layout is torch.strided and has_memory(each) for each in tensors
    )


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_Layout = tuple[Any, ...]
"""Sizes, strides and offset."""
Role = tuple[int, int, "_Layout | None"]
"""A saved tensor's number in its region; which argument it is, -1 for none; as what view of it, None for itself."""


class Watched:
    """Sorts what a function saves: its arguments, views of them, and the rest.

    Attributes:
        roles: of each tensor that it saved.
        rest: bytes of the storages that are not its arguments', by address.
    """

    def __init__(self, site: Site) -> None:
        self._arguments = [(address_of(each), each) for each in site.tensors]
        self.roles: list[Role] = []
        self.rest: dict[int, int] = {}

    def note(self, index: int, tensor: T) -> bool:
        """Note a tensor that is saved; return True if it is an argument, which is computed again."""
        address = address_of(tensor)
        views = [number for number, (own, _) in enumerate(self._arguments) if own == address != 0]
        if not views:
            self.roles.append((index, -1, None))
            self.rest[address] = tensor.untyped_storage().nbytes() if address else 0
            return False
        for number in views:
            if layout_of(self._arguments[number][1]) == layout_of(tensor):
                self.roles.append((index, number, None))
                return True
        size, stride, offset = layout_of(tensor)
        offset -= self._arguments[views[0]][1].storage_offset()
        self.roles.append((index, views[0], (size, stride, offset)))
        return True

    def copies(self, out: T) -> bool:
        """Return True if more is saved beside arguments and output than an attention's sums: copies of arguments."""
        rest = sum(size for address, size in self.rest.items() if address != address_of(out))
        return 2 * rest > out.untyped_storage().nbytes()


def layout_of(tensor: T) -> _Layout:
    """Return a tensor's sizes, strides and offset."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


class Filling(Protocol):
    """The second run of a region.

    Attributes:
        walk: through its graph.
    """

    walk: Walk

    def put(self, index: int, tensor: T | None) -> None:
        """Fill the slot of a saved tensor with what it is now; None where it was kept."""
        ...


def hand_back(site: Site, out: T, roles: Iterable[Role], filling: Filling) -> T:
    """Return a function's output without calling it, and fill the slots of what it saved.

    Args:
        site: the call in the second run.
        out: what the first call computed.
        roles: of what the first call saved.
        filling: the second run.
    """
    for index, number, layout in roles:
        tensor = None if number < 0 else site.tensors[number]
        if tensor is not None and layout is not None:
            tensor = tensor.detach().as_strided(layout[0], layout[1], tensor.storage_offset() + layout[2])
        filling.put(index, tensor)
    return _HandedBack.apply(out, site, *site.tensors)


class _HandedBack(torch.autograd.Function):
    """An output that was kept. Only a backward inside of the region asks for its gradient, which calls the function."""

    @staticmethod
    def forward(ctx: Any, out: T, site: Site, *tensors: T) -> T:
        ctx.site, ctx.tensors = site, tensors
        ctx.versions = [each._version for each in tensors]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> tuple[T | None, ...]:
        if ctx.site.random or torch.is_grad_enabled() or [each._version for each in ctx.tensors] != ctx.versions:
            raise NotImplementedError(
                f"A backward inside of a checkpoint passes through {ctx.site.name}, whose output its policy_fn keeps,"
                " with dropout, for a second derivative or after a write to its arguments: answer MUST_RECOMPUTE."
            )
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad(), saved_tensors_hooks(Kept, unpack):  # the region has no slots for these
            tensors = [each.detach().requires_grad_(need) for each, need in zip(ctx.tensors, needed)]
            out = ctx.site.compute(*tensors)
        wanted = [each for each, need in zip(tensors, needed) if need]
        results = iter(torch.autograd.grad(out, wanted, gradients[0]))
        return None, None, *(next(results) if need else None for need in needed)
