"""Writes to memory that is read elsewhere in the same operation, or shown twice: refused, on all ranks or on none.

Note [What overlaps]
torch refuses a write by the memory of the tensors at hand: ``x[1:].add_(x[:-1])``, ``x.expand(3, 4).add_(1)``. Of a
DTensor, a rank with one row of ``x``, or with none, would decide otherwise than its neighbours. So the decision is made
on what all ranks know. Views that share memory cut the same dim of it, so they overlap where they do at one index of
the cut dims. Views that had to be moved are followed to what they are views of.

Where every rank has two indices of each cut dim or more (``TensorSpec.thin`` is False), torch decides alike on all of
them, and writes of tensors in one layout go unchecked; so do those of ``RaggedShard``, which no view keeps that shows a
part of its source, or another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.missing import writes_first
from hp_dtensor.torch.views.strides import same_memory, strides_of

__all__ = ["apart", "refuse_overlaps", "refuse_overlaps_of_call"]

_impl: Any = torch._C._disabled_torch_function_impl
T = torch.Tensor
_NOTES = frozenset(("_link", "_strides"))
"""A view that moved has the one; strides that are not those of a contiguous tensor are the other."""


def refuse_overlaps_of_call(func: Any, args: Any, kwargs: Any) -> None:
    """``refuse_overlaps`` of a call, where the function writes by its name or has ``out=``.

    Args:
        func: the torch function; one of lists of tensors writes each of the first list, and reads those of the others.
        args: its positional arguments, what is written the first.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: as ``refuse_overlaps``.
    """
    name = getattr(func, "__name__", "")
    if kwargs and kwargs.get("out") is not None:
        out = kwargs["out"]
        for written in out if isinstance(out, (list, tuple)) else (out,):
            refuse_overlaps(name, written, tuple(_tensors((args, {**kwargs, "out": None}))))
    elif args and writes_first(func):
        rest = (*args[1:], *(kwargs or {}).values())
        if not isinstance(args[0], (list, tuple)):
            refuse_overlaps(name, args[0], tuple(_tensors(rest)))
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
    """Tell quickly that there is nothing to refuse; False where that has to be looked into.

    Args:
        written: what an operation writes, a thin DTensor.
        read: what it reads besides.
    """
    if type(written) is not DTensor or not written._spec.thin or not _NOTES.isdisjoint(vars(written)):
        return False
    for x in read:
        if isinstance(x, DTensor) and ("_link" in vars(x) or same_memory(written, x)):
            return False
    return True


def refuse_overlaps(name: str, written: Any, read: tuple[Any, ...]) -> None:
    """Refuses a write that torch leaves undefined, or refuses on one device.

    Args:
        name: the operation's.
        written: what it writes.
        read: what it reads besides; only DTensors matter.

    Raises:
        RuntimeError: ``written`` shows an element of memory several times, or a part of what ``read`` shows, or in
            another order; the same on all ranks, before anything is sent.
    """
    read = tuple(other for other in read if isinstance(other, DTensor))
    if not isinstance(written, DTensor) or not any(map(_may_share, (written, *read))):
        return
    if "_link" not in vars(written):
        strides = strides_of(written)
        if any(size > 1 and not stride for size, stride in zip(written._spec.shape, strides, strict=True)):
            raise RuntimeError(
                f"unsupported operation: {name} writes to a DTensor of shape {tuple(written._spec.shape)} that shows an"
                " element of memory several times; clone() it first"
            )
    for other in read:
        if other._spec.shape and other is not written and _overlap(written, other):
            raise RuntimeError(
                f"unsupported operation: {name} writes to a DTensor of shape {tuple(written._spec.shape)} and reads one"
                f" of shape {tuple(other._spec.shape)} that shows some of the same elements, not each at its own place;"
                " clone() it first"
            )


def _refuse_crossing(name: str, written: Any, lists: list[Any]) -> None:
    """Elements of lists that are written one after the other: a view that moved would show the next one what was."""
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


def _tensors(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, T):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)


def _may_share(x: Any) -> bool:
    """Whether ``x`` may show memory of another tensor: a view does, and of an inference tensor nobody knows."""
    return _impl(T._is_view, (), (x,)) or _impl(T.is_inference, (), (x,)) or "_link" in vars(x)


def _memory(x: Any) -> int:
    return _impl(T.untyped_storage, (), (x,))._cdata


def _overlap(a: Any, b: Any) -> bool:
    """Whether two DTensors share elements of memory, and not all of them in the same order."""
    if _memory(a) != _memory(b):
        moved = "_link" in vars(a) or "_link" in vars(b)
        return moved and _overlap_in_source(a, b)
    if _geometry(a) == _geometry(b):
        return False
    return bool(torch.isin(_at_one_cut(a), _at_one_cut(b)).any())


def _geometry(x: Any) -> tuple[Any, ...]:
    return x._spec.shape, x._spec.placements, _impl(T.stride, (), (x,)), _impl(T.storage_offset, (), (x,))


def _at_one_cut(x: Any) -> torch.Tensor:
    """Places in memory of the elements of ``x`` whose index is 0 in each dim that is cut."""
    spec = x._spec
    sharded = {dim for p in spec.placements for dim in (getattr(p, "dims", None) or (getattr(p, "dim", None),))}
    positions = torch.tensor([_impl(T.storage_offset, (), (x,))])
    for dim, (size, stride) in enumerate(zip(spec.shape, _impl(T.stride, (), (x,)), strict=False)):
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
        return True  # views of one memory, of which it is not followed further where they lie in each other
    if torch.equal(elements, others):
        return alike
    return bool(torch.isin(elements.reshape(-1), others.reshape(-1)).any())


def _source(x: Any) -> Any:
    """Return the tensor of which ``x`` is ultimately a view."""
    while "_link" in vars(x):
        x = vars(x)["_link"].source
    return x


def _places(x: Any) -> torch.Tensor | None:
    """Which elements of its source ``x`` shows; None where that can't be told."""
    link = vars(x).get("_link")
    if link is None:
        return torch.arange(math.prod(x._spec.shape)).view(x._spec.shape)
    elements = _places(link.source)
    if elements is None or link.shows is None:
        return elements
    try:
        shown = link.shows(elements)
    except (RuntimeError, TypeError, ValueError):  # of arguments that are DTensors
        return None
    return shown if type(shown) is torch.Tensor else None
