"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hp_fsdp.torch.groups.bucket import watching_gathers
from hp_fsdp.torch.steps.context import RootContext, RootGroup, drop_reductions
from hp_platform.torch.internals import without_torch_function

__all__ = ["all_gathered", "drop_reductions", "watching_gathers"]


@contextlib.contextmanager
def all_gathered(model: Any) -> Iterator[None]:
    """Gather all groups of a sharded model; inside, gradients are off, and forwards are as fast as a plain model's.

    All ranks enter it. Inside, they exchange nothing: forwards neither gather, free, nor look for writes. A write to a
    parameter raises at the end. The parameters stay gathered where `reshard_after_forward` is False.

    Args:
        model: the outermost sharded module.
    """
    root: RootGroup = model._hsdp_group
    context = root.context or RootContext.of(root)
    context.begin_forward(root)
    groups = context.groups
    try:
        for group in groups:
            group.start_unshard()
        for group in groups:
            group.finish_unshard()
        mode = model.training
        compared = [mode in group.compared_modes for group in groups]
        before = [_state_of(group, known) for group, known in zip(groups, compared)]
        kept = [data for group in groups for data in _data_of(group)]  # else their addresses might come again
        for group in groups:
            group.straight = True
        with torch.no_grad():
            yield
        for group, known, state in zip(groups, compared, before):
            if _state_of(group, known) != state:
                raise RuntimeError(group.written())
            group.compared_modes.add(mode)
            group.reshard() if group.reshard_after_forward is not False else group.keep()
        del kept
        context.end_forward()
    except BaseException:
        context.abandon()
        raise
    finally:
        for group in groups:
            group.straight = False


def _data_of(group: RootGroup) -> list[torch.Tensor]:
    with without_torch_function():
        return [each.unsharded.detach() for bucket in group.buckets for each in bucket.parameters]


def _state_of(group: RootGroup, known: bool) -> tuple[list[int], list[Any] | None]:
    return group.versions(), None if known else group.contents()
