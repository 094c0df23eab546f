"""explain: what the groups of a model hold, and do in a step."""

from __future__ import annotations

import os
from typing import Any

from mindspore import nn

from hp_fsdp.explainer import BucketBytes, Groups, explained, outermost
from hp_fsdp.explaining import Explanation, Overlap, check_path
from hp_fsdp.mindspore.bucket import Bucket
from hp_fsdp.mindspore.group import ParameterGroup
from hp_fsdp.mindspore.memory import memory_rows
from hp_fsdp.mindspore.parameter import itemsize
from hp_fsdp.sharded_class import groups_in

__all__ = ["explain"]


def explain(
    model: nn.Cell,
    *,
    optimizer: nn.Cell | None = None,
    inputs: Any = None,
    activations: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Tells which groups a model has, what each does when in a step, and what memory that takes, by kind.

    Nothing is communicated. The order is that of the last step, or of the Cells before the first one. Times are those
    of the last forward and backward, by the host's clock; see `hp_fsdp.timeline`.

    Example:
        >>> loss, gradients = step(x)
        >>> print(explain(model, optimizer=optimizer, path="step.png"))

    Args:
        model: a sharded Cell, with all its sharded Cells inside.
        optimizer: to count its states.
        inputs: PyTorch's.
        activations: PyTorch's.
        path: where to write the step: a chrome trace (.json), or a picture of the time line (.png, .svg, .pdf).
            Default: nowhere.

    Raises:
        ValueError: ``model`` is not sharded itself, or ``path`` has another suffix.
        NotImplementedError: ``inputs`` or ``activations``: MindSpore has no tensors without values and no hooks for
            what its autograd saves.
        RuntimeError: a picture is wanted before the first step.
        ImportError: a picture is wanted and matplotlib isn't installed.
    """
    root = outermost(model)
    if path is not None:
        check_path(path)
    if inputs is not None or activations is not None:
        raise NotImplementedError(
            "explain: inputs= and activations= are not supported on MindSpore, which has no tensors without values and"
            " no hooks for what its autograd saves; leave them out. mindspore.runtime.max_memory_allocated() tells the"
            " peak of a device, of all kinds together"
        )
    groups = groups_in(cell for _, cell in model.cells_and_names())
    model_groups = Groups(
        root=root,
        all=groups,
        names={id(cell): name for name, cell in model.cells_and_names()},
        inside=lambda cell: (each for _, each in cell.cells_and_names()),
        bytes_of=_bytes_of,
        keeps=_keeps,
        overlap=Overlap(gathers=root.overlaps, reductions=False),
    )
    made = explained(model_groups, lambda events, held: memory_rows(groups, events, held, optimizer))
    if path is not None:
        made.write(path)
    return made


def _keeps(group: ParameterGroup) -> bool:
    """Parameters have no version that tells of an optimizer's step, so only micro-batches without one keep them."""
    return not (group.reshard_after_backward or group.reduces)


def _bytes_of(bucket: Bucket) -> BucketBytes:
    total = bucket.layout.total
    return BucketBytes(
        shard=bucket.layout.piece * itemsize(bucket.dtype),
        gathered=total * itemsize(bucket.compute_dtype),
        gradients=total * itemsize(bucket.reduce_dtype) if bucket.trains else 0,
    )
