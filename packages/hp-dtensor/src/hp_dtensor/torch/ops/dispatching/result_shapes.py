"""Shapes of results that are known without asking torch, whose meta functions take longer than all the rest of a plan.

None is the answer where the arguments don't fit: torch is asked then, and says so in its own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.rules.library import dims_argument

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


Shape = tuple[int, ...]


def broadcast(call: Call) -> list[Shape] | None:
    """Return the shape to which all operands broadcast."""
    sizes: list[int] = []
    for spec in call.specs:
        shape = spec.shape
        sizes[:0] = [1] * (len(shape) - len(sizes))
        start = len(sizes) - len(shape)
        for index, size in enumerate(shape, start):
            if sizes[index] != size:
                if 1 not in (sizes[index], size):
                    return None
                sizes[index] = size if sizes[index] == 1 else sizes[index]
    return [tuple(sizes)]


def reduced(call: Call) -> list[Shape] | None:
    """Return the operand's shape without the dims ``dim``, or with size one there."""
    shape, dim, keepdim = call.specs[0].shape, call.bound["dim"], call.bound["keepdim"]
    if type(keepdim) is not bool or not (dim is None or type(dim) is int or type(dim) in (tuple, list)):
        return None
    try:
        dims = dims_argument(dim, len(shape))
    except (IndexError, TypeError):
        return None
    if len(set(dims)) != len(dims):
        return None
    if keepdim:
        return [tuple(1 if d in dims else size for d, size in enumerate(shape))]
    return [tuple(size for d, size in enumerate(shape) if d not in dims)]


def linear(call: Call) -> list[Shape] | None:
    """Return the input's shape with one feature per row of the weight."""
    shape, weight, *bias = (spec.shape for spec in call.specs)
    if not shape or len(weight) != 2 or shape[-1] != weight[1] or any(each != weight[:1] for each in bias):
        return None
    return [(*shape[:-1], weight[0])]
