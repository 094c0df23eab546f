"""Results of planned calls on thin DTensors, the same on all ranks: Note [Thin shards] in `layout.strides`."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.layout.sharding import contiguous
from hp_dtensor.torch.views.moved_view import linked
from hp_dtensor.torch.views.strides import local_strides, on_one_device, same_memory

_impl: Any = torch._C._disabled_torch_function_impl
T = torch.Tensor


class Settle:
    """Decision whether a planned call on a thin DTensor returns a view or a copy, the same on all ranks.

    It also records the result's strides. The decision depends only on the operand's strides, and is cached by them.

    Args:
        func: a function that returns views, or may; its layouts and other arguments are those of one plan.
        may_copy: the function returns a copy if strides don't allow a view.
    """

    __slots__ = ("_func", "_known", "_may_copy")

    def __init__(self, func: Any, may_copy: bool) -> None:
        self._func, self._may_copy = func, may_copy
        self._known: dict[Any, tuple[list[torch.Tensor], bool, Any]] = {}

    def __call__(self, out: Any, args: Any, kwargs: Any) -> Any:
        source = args[0] if args else kwargs["input"]
        strides = source.__dict__.get("_strides") if source._spec.thin else local_strides(source)
        answer = self._known.get(strides)
        if answer is None:
            answer = self._known[strides] = self._ask(out, source, args, kwargs)
        metas, is_view, noted = answer
        if self._may_copy and is_view is not same_memory(out, source):
            if is_view:
                return linked(out, source, self._func, args, kwargs, metas)
            spec, out = out._spec, _impl(T.clone, (), (out,), {"memory_format": torch.contiguous_format})
            out.__class__, out._spec = source.__class__, spec
        if noted is not None:
            for x, strides in zip(out if isinstance(out, (list, tuple)) else (out,), noted, strict=True):
                if x is not source:  # `contiguous` may return its operand
                    x._strides = strides
        return out

    def _ask(self, out: Any, source: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool, Any]:
        """Return one device's result, whether it is a view, and the strides to note, None if there are none."""
        metas, is_view = on_one_device(self._func, source, args, kwargs)
        specs = [x._spec for x in (out if isinstance(out, (list, tuple)) else (out,))]
        noted = [
            meta.stride() if spec.thin and meta.stride() != contiguous(spec.shape) else None
            for spec, meta in zip(specs, metas, strict=True)
        ]
        return metas, is_view, noted if any(noted) else None
