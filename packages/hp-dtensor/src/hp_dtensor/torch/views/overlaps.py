"""Writes to memory that the same operation reads elsewhere, or that has duplicates: refused on all ranks or none.

Note [What overlaps]
torch refuses a write by the memory of its operands: ``x[1:].add_(x[:-1])``, ``x.expand(3, 4).add_(1)``. With DTensors,
a rank with one row of ``x``, or none, would decide differently from the others. So the decision uses only what all
ranks know. Views that share memory shard the same dim of it, so they overlap if they do at one index of the sharded
dims. Views that had to be redistributed are followed to their sources.

If every rank has at least two indices of each sharded dim (``TensorSpec.thin`` is False), torch decides alike on all
ranks, and writes of tensors in one layout are not checked here. Neither are those of ``RaggedShard``, which no view
keeps that has only a part of its source, or another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.dispatching.calls import writes_first
from hp_dtensor.torch.views.strides import strides_of
from hp_platform.extend import list_leaves
from hp_platform.torch.internals import plainly, same_memory

T = torch.Tensor
_NOTES = frozenset(("_link", "_strides"))
"""Attributes of views that moved, and of tensors with recorded strides that are not contiguous."""


def refuse_overlaps_of_call(func: Any, args: Any, kwargs: Any) -> None:
    """Call ``refuse_overlaps`` for a call that writes, by the function's name or to ``out=``.

    Args:
        func: the torch function; a function of lists writes the tensors of the first list, and reads those of others.
        args: its positional arguments, beginning with the one that is written.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: as ``refuse_overlaps``.
    """
    name = getattr(func, "__name__", "")
    if kwargs and kwargs.get("out") is not None:
        out = kwargs["out"]
        for written in out if isinstance(out, (list, tuple)) else (out,):
            refuse_overlaps(name, written, _tensors((args, {**kwargs, "out": None})))
    elif args and writes_first(func):
        rest = (*args[1:], *(kwargs or {}).values())
        if not isinstance(args[0], (list, tuple)):
            refuse_overlaps(name, args[0], _tensors(rest))
            return
        lists = [value for value in rest if isinstance(value, (list, tuple)) and len(value) == len(args[0])]
        linked = False
        for operands in zip(args[0], *lists, strict=True):
            written, *read = operands
            if not apart(written, read):
                linked |= any("_link" in vars(x) for x in operands if isinstance(x, DTensor))
                refuse_overlaps(name, written, tuple(read))
        if linked:
            _refuse_crossing(name, args[0], lists)


def apart(written: Any, read: Sequence[Any]) -> bool:
    """Return True if there is certainly nothing to refuse; it is quick.

    Args:
        written: the tensor that an operation writes, a thin DTensor.
        read: the other tensors that it reads.
    """
    if type(written) is not DTensor or not written._spec.thin or not _NOTES.isdisjoint(vars(written)):
        return False
    for x in read:
        if isinstance(x, DTensor) and ("_link" in vars(x) or same_memory(written, x)):
            return False
    return True


def refuse_overlaps(name: str, written: Any, read: tuple[Any, ...]) -> None:
    """Refuse a write that torch leaves undefined, or refuses on a single device.

    Args:
        name: the operation's name.
        written: the tensor that it writes.
        read: the other tensors that it reads; only DTensors matter.

    Raises:
        RuntimeError: ``written`` has an element of memory several times, or shares some elements with ``read``, or
            all in another order; the same on all ranks, before any communication.
    """
    read = tuple(other for other in read if isinstance(other, DTensor))
    if not isinstance(written, DTensor) or not any(map(_may_share, (written, *read))):
        return
    if "_link" not in vars(written):
        strides = strides_of(written)
        if any(size > 1 and not stride for size, stride in zip(written._spec.shape, strides, strict=True)):
            raise RuntimeError(
                f"unsupported operation: {name} writes to a DTensor of shape {tuple(written._spec.shape)} that has"
                " several elements at one memory location; clone() it first"
            )
    for other in read:
        if other._spec.shape and other is not written and _overlap(written, other):
            raise RuntimeError(
                f"unsupported operation: {name} writes to a DTensor of shape {tuple(written._spec.shape)} and reads one"
                f" of shape {tuple(other._spec.shape)} that partly overlaps it in memory; clone() it first"
            )


def _refuse_crossing(name: str, written: Any, lists: list[Any]) -> None:
    """Refuse lists whose elements overlap: they are written in turn, and a view that moved would show old values."""
    for index, x in enumerate(written):
        for others in (written, *lists):
            for position, other in enumerate(others):
                if position == index or other is x or not (isinstance(x, DTensor) and isinstance(other, DTensor)):
                    continue
                if ("_link" in vars(x) or "_link" in vars(other)) and _overlap_in_source(x, other, alike=True):
                    raise RuntimeError(
                        f"unsupported operation: {name} writes to element {index}, a DTensor of shape"
                        f" {tuple(x._spec.shape)} that overlaps element {position} of its lists, and one of them is a"
                        " view that had to be redistributed; call the function of one tensor for each"
                    )


def _tensors(values: Any) -> tuple[Any, ...]:
    return tuple(each for each in list_leaves(values) if isinstance(each, T))


def _may_share(x: Any) -> bool:
    """Tell whether ``x`` may share memory with another tensor: a view does, an inference tensor might."""
    return plainly(T._is_view, (), (x,)) or plainly(T.is_inference, (), (x,)) or "_link" in vars(x)


def _memory(x: Any) -> int:
    return plainly(T.untyped_storage, (), (x,))._cdata


def _overlap(a: Any, b: Any) -> bool:
    """Tell whether two DTensors share memory, but not all elements in the same order."""
    if _memory(a) != _memory(b):
        moved = "_link" in vars(a) or "_link" in vars(b)
        return moved and _overlap_in_source(a, b)
    if _geometry(a) == _geometry(b):
        return False
    return bool(torch.isin(_at_first_index(a), _at_first_index(b)).any())


def _geometry(x: Any) -> tuple[Any, ...]:
    return x._spec.shape, x._spec.placements, plainly(T.stride, (), (x,)), plainly(T.storage_offset, (), (x,))


def _at_first_index(x: Any) -> torch.Tensor:
    """Return the memory positions of the elements of ``x`` with index 0 in each sharded dim."""
    spec = x._spec
    sharded = {dim for p in spec.placements for dim in (getattr(p, "dims", None) or (getattr(p, "dim", None),))}
    positions = torch.tensor([plainly(T.storage_offset, (), (x,))])
    for dim, (size, stride) in enumerate(zip(spec.shape, plainly(T.stride, (), (x,)), strict=False)):
        steps = torch.arange(1 if dim in sharded else size) * stride
        positions = (positions[:, None] + steps).reshape(-1)
    return positions


def _overlap_in_source(a: Any, b: Any, alike: bool = False) -> bool:
    """Tell the same of views that moved; ``alike``: also if they share all elements in one order."""
    source, other = _source(a), _source(b)
    if _memory(source) != _memory(other):
        return False
    elements, others = _places(a), _places(b)
    if _geometry(source) != _geometry(other) or elements is None or others is None:
        return True  # they share memory, but their positions in it are not known
    if torch.equal(elements, others):
        return alike
    return bool(torch.isin(elements.reshape(-1), others.reshape(-1)).any())


def _source(x: Any) -> Any:
    """Return the tensor of which ``x`` is ultimately a view."""
    while "_link" in vars(x):
        x = vars(x)["_link"].source
    return x


def _places(x: Any) -> torch.Tensor | None:
    """Return the indices of the elements of its source that ``x`` shows; None if they are not known."""
    link = vars(x).get("_link")
    if link is None:
        return torch.arange(math.prod(x._spec.shape)).view(x._spec.shape)
    elements = _places(link.source)
    if elements is None or link.shows is None:
        return elements
    try:
        shown = link.shows(elements)
    except (RuntimeError, TypeError, ValueError):  # some arguments are DTensors
        return None
    return shown if type(shown) is torch.Tensor else None
