"""explain: what the groups of a model hold, and do in a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hp_fsdp.explainer import BucketBytes, Groups, explained, outermost
from hp_fsdp.explaining import Explanation, Overlap, check_path
from hp_fsdp.sharded_class import groups_in
from hp_fsdp.torch.activations import Activations
from hp_fsdp.torch.bucket import Bucket
from hp_fsdp.torch.fake_forward import predict_activations
from hp_fsdp.torch.memory import memory_rows

__all__ = ["explain"]


def explain(
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    activations: Activations | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Tells which groups a model has, what each does when in a step, and what memory that takes, by kind.

    Nothing is communicated. The order is that of the last step, or of the modules before the first one; gathers stand
    where they start, ahead of time, as in every step but the first. Times are those of the last forward and backward,
    by the host's clock; see `hp_fsdp.timeline`.

    Example:
        >>> with watch_activations(model) as activations:
        ...     loss_of(model(x)).backward()
        >>> print(explain(model, optimizer=optimizer, inputs=(x,), activations=activations, path="step.png"))

    Args:
        model: a sharded module, with all its sharded modules inside.
        optimizer: to count its states.
        inputs: what one rank gives the model's forward: positional arguments as a tuple, or keyword arguments by name.
            Predicts the activations by a forward without kernels, see `hp_fsdp.torch.fake_forward`. Default: they are
            not predicted.
        activations: what `watch_activations` gave. Default: they are not measured.
        path: where to write the step: a chrome trace (.json), or a picture of the time line (.png, .svg, .pdf).
            Default: nowhere.

    Raises:
        ValueError: ``model`` is not sharded itself, or ``path`` has another suffix.
        TypeError: ``inputs`` is neither a tuple nor a dict.
        NotImplementedError: activations of this model cannot be predicted: it has tensor parallel parameters, compiled
            modules, or communicates in forward; or groups of several modules.
        RuntimeError: its forward depends on values; or a picture is wanted before the first step.
        ImportError: a picture is wanted and matplotlib isn't installed.
    """
    root = outermost(model)
    if path is not None:
        check_path(path)
    predicted = None if inputs is None else predict_activations(model, inputs)
    groups = groups_in(model.modules())
    for group in groups:
        if len(group.members) > 1:
            raise NotImplementedError(
                f"explain: {group.class_name} are one group, and when it is gathered and freed depends on the order of"
                " their calls, which is not predicted. Measure memory with watch_activations"
            )
    model_groups = Groups(
        root=root,
        all=groups,
        names={id(module): name for name, module in model.named_modules()},
        inside=lambda module: module.modules(),
        bytes_of=_bytes_of,
        keeps=lambda group: not group.reshard_after_backward,
        overlap=Overlap(),
    )
    made = explained(
        model_groups, lambda events, held: memory_rows(groups, events, held, optimizer, predicted, activations)
    )
    if path is not None:
        made.write(path)
    return made


def _bytes_of(bucket: Bucket) -> BucketBytes:
    layout, axes = bucket.layout, bucket.axes
    alone = axes.shard_size * axes.replicate_size == 1
    trains = any(parameter.trains for parameter in bucket.parameters)
    return BucketBytes(
        shard=layout.piece * bucket.dtype.itemsize,
        gathered=0 if _computes_with_shard(bucket) else layout.total * bucket.compute_dtype.itemsize,
        gradients=layout.total * bucket.reduce_dtype.itemsize if trains and not alone else 0,
    )


def _computes_with_shard(bucket: Bucket) -> bool:
    if bucket.prepared:
        return bucket.aliased
    return bucket.axes.shard_size == 1 and bucket.compute_dtype is bucket.dtype and bucket.offload is None
