"""Views of DTensors, which MindSpore's are tensors on the same memory: writes that would be lost are refused.

Where a view's dim is cut, its elements are sent, so that it is a copy. A write into the view would not reach its
source, and one into the source would not be seen in the view. On the CPU most writes into a view are lost without
DTensors, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from hp_dtensor.mindspore.backward.autograd import local_only

VIEWS = frozenset(
    """__getitem__ BroadcastTo BroadcastToView Chunk ChunkView ExpandAs ExpandDims ExpandDimsView Flatten
    FlattenExt Narrow NarrowView Reshape SelectExt SelectExtView Slice Split SplitTensor SplitTensorView
    SplitWithSize SplitWithSizeView Squeeze Transpose TransposeExtView TransposeView DeprecatedTranspose
    Unstack UnstackExt UnstackExtView View""".split()
)
"""Kernels whose results are views."""


def note_view(source: Any, views: Sequence[Any], name: str, *, copied: bool) -> None:
    """Remember that ``views`` are those of ``source``.

    Args:
        source: what the kernel was called on.
        views: its results.
        name: the kernel's name.
        copied: the elements were sent, so that the views have memory of their own.
    """
    for view in views:
        view._view_by = name
    if copied:
        references = source.__dict__.get("_copied_views", ())
        source._copied_views = [ref for ref in references if ref() is not None] + [weakref.ref(view) for view in views]


def before_write(x: Any, name: str) -> None:
    """Refuse a write into a view, or into what has views that would not see it.

    Args:
        x: the DTensor that is to be written to.
        name: what writes.

    Raises:
        RuntimeError: the write would be lost.
    """
    kept = x.__dict__
    if local_only():
        return
    kernel = kept.get("_view_by")
    if kernel is not None:
        raise RuntimeError(
            f"{name}: the DTensor of shape {x._spec.shape} placed {x._spec.placements} is a view made by {kernel},"
            " through which writes don't reach its source. Write source[index] = value, or write into"
            " a copy: view.copy()"
        )
    if any(ref() is not None for ref in kept.get("_copied_views", ())):
        raise RuntimeError(
            f"{name}: the DTensor of shape {x._spec.shape} placed {x._spec.placements} has a view that was gathered"
            " from its shards and would not see the write. Drop the view first (del), or make it of a"
            " copy: source.copy()"
        )
