"""explain: what the groups of a model hold, and do in a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hp_fsdp.explaining import Explanation, GroupFacts, check_path, simulate
from hp_fsdp.held import Held, replay
from hp_fsdp.timeline import Moment, Timeline, timeline_of
from hp_fsdp.torch.activations import Activations, groups_of
from hp_fsdp.torch.bucket import Bucket
from hp_fsdp.torch.fake_forward import predict_activations
from hp_fsdp.torch.group import ParameterGroup
from hp_fsdp.torch.memory import memory_rows
from hp_fsdp.torch.module import group_of

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
            modules, or communicates in forward.
        RuntimeError: its forward depends on values; or a picture is wanted before the first step.
        ImportError: a picture is wanted and matplotlib isn't installed.
    """
    root = group_of(model)
    if root is None:
        raise ValueError(
            f"explain: fully_shard was not called on this {type(model).__name__}, call explain on the root"
        )
    if path is not None:
        check_path(path)
    predicted = None if inputs is None else predict_activations(model, inputs)
    groups = groups_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    named = {id(group): names[id(group.module)] or type(model).__name__ for group in groups}
    facts = {id(group): _facts(group, named[id(group)], group is root) for group in groups}
    context = root.context
    forward = list(root.order.now or root.order.last)
    backward = list(context.backward_order.now or context.backward_order.last) if context is not None else []
    recorded = bool(forward)
    forward = forward or groups
    backward = backward or [root, *reversed([group for group in forward if group is not root])]
    inner = {facts[id(group)].name: {id(module) for module in group.module.modules()} for group in groups}
    modules = {facts[id(group)].name: id(group.module) for group in groups}
    events = tuple(
        simulate(
            [facts[id(group)] for group in forward],
            [facts[id(group)] for group in backward],
            lambda one, other: one is not other and modules[one.name] in inner[other.name],
        )
    )
    timeline, held = _last_step(root, groups, named, facts)
    rows = memory_rows(groups, events, held, optimizer, predicted, activations)
    made = Explanation(tuple(facts.values()), recorded, events, tuple(rows), timeline, held)
    if path is not None:
        made.write(path)
    return made


def _last_step(
    root: ParameterGroup, groups: list[ParameterGroup], named: dict[int, str], facts: dict[int, GroupFacts]
) -> tuple[Timeline | None, tuple[Held, ...]]:
    """Times and unsharded bytes of the last step; None and nothing before it."""
    context = root.context
    moments: list[Moment] = [
        (kind, None if group is None else named.get(id(group)), when)
        for kind, group, when in (context.last_moments if context is not None else ())
    ]
    if not moments:
        return None, ()
    accumulating = {named[id(group)] for group in groups if not group.reduces}
    return timeline_of(moments), replay(moments, list(facts.values()), accumulating=accumulating)


def _facts(group: ParameterGroup, name: str, is_root: bool) -> GroupFacts:
    gathered = [0 if _computes_with_shard(b) else b.layout.total * b.compute_dtype.itemsize for b in group.buckets]
    training = [b for b in group.buckets if any(p.trains for p in b.parameters)]
    alone = group.axes.shard_size * group.axes.replicate_size == 1
    frees = group.reshard_after_forward or (group.reshard_after_forward is None and not is_root)
    ranks = group.near[1] if group.near is not None else 0
    return GroupFacts(
        name=name,
        parameters=len(group.parameters),
        shard_bytes=sum(b.layout.piece * b.dtype.itemsize for b in group.buckets),
        gathered_bytes=sum(gathered),
        gradient_bytes=0 if alone else sum(b.layout.total * b.reduce_dtype.itemsize for b in training),
        after_forward=(sum(gathered) // ranks if ranks else 0) if frees else sum(gathered),
        after_backward=0 if group.reshard_after_backward else sum(gathered),
    )


def _computes_with_shard(bucket: Bucket) -> bool:
    if bucket.prepared:
        return bucket.aliased
    return bucket.axes.shard_size == 1 and bucket.compute_dtype is bucket.dtype and bucket.offload is None
