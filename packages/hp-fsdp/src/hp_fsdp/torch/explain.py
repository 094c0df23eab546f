"""explain: what the groups of a model hold, and do in a step."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hp_dtensor.torch.dtensor import local_view
from hp_fsdp.explaining import Event, Explanation, GroupFacts, MemoryRow, simulate
from hp_fsdp.torch.group import ParameterGroup
from hp_fsdp.torch.module import group_of
from hp_platform import get_platform

__all__ = ["explain"]


def explain(
    model: nn.Module, *, optimizer: Optimizer | None = None, path: str | os.PathLike[str] | None = None
) -> Explanation:
    """Tells which groups a model has, when each is gathered, and what memory that takes; nothing is communicated.

    The order is that of the last step, or of the modules before the first one. Gathers are shown where they start,
    ahead of time, as in every step but the first.

    Example:
        >>> print(explain(model, optimizer=optimizer, path="step.json"))

    Args:
        model: a sharded module, with all its sharded modules inside.
        optimizer: to count its states, after its first step.
        path: where to write the step as a chrome trace. Default: nowhere.

    Raises:
        ValueError: ``model`` is not sharded itself.
    """
    root = group_of(model)
    if root is None:
        raise ValueError(
            f"explain: fully_shard was not called on this {type(model).__name__}, call explain on the root"
        )
    groups = [group for module in model.modules() if (group := group_of(module)) is not None]
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
    made = Explanation(tuple(facts.values()), recorded, events, tuple(_memory(groups, events, optimizer)))
    if path is not None:
        made.chrome_trace(path)
    return made


def _facts(group: ParameterGroup, name: str, is_root: bool) -> GroupFacts:
    gathered = [0 if b.axes.shard_size == 1 else b.layout.total * b.compute_dtype.itemsize for b in group.buckets]
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


def _memory(groups: list[ParameterGroup], events: tuple[Event, ...], optimizer: Optimizer | None) -> list[MemoryRow]:
    buckets = [bucket for group in groups for bucket in group.buckets]
    training = [b for b in buckets if any(p.trains for p in b.parameters)]
    sharded = [parameter.sharded for bucket in buckets for parameter in bucket.parameters]
    gradients = [_bytes(parameter.grad) for parameter in sharded if parameter.grad is not None]
    states = None
    if optimizer is not None and optimizer.state:
        states = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    rows = [
        MemoryRow("parameters", sum(b.layout.piece * b.dtype.itemsize for b in buckets), sum(map(_bytes, sharded))),
        MemoryRow("gradients", sum(b.layout.piece * b.dtype.itemsize for b in training), sum(gradients) or None),
        MemoryRow("optimizer", _states(optimizer), states),
        MemoryRow("unsharded parameters", max((e.unsharded for e in events), default=0), None),
        MemoryRow("unsharded gradients", max((e.gradients for e in events), default=0), None),
    ]
    devices = get_platform().devices
    if buckets and buckets[0].shard.device.type not in ("cpu", "meta"):
        rows.append(MemoryRow("device peak, activations included", None, devices.peak_memory()))
    return rows


def _states(optimizer: Optimizer | None) -> int | None:
    """Bytes of the states that torch's Adam, AdamW and SGD make; None for others."""
    total = 0
    for group in optimizer.param_groups if optimizer is not None else ():
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            each = 3 if group["amsgrad"] else 2
        elif isinstance(optimizer, torch.optim.SGD):
            each = 1 if group["momentum"] else 0
        else:
            return None
        total += each * sum(_bytes(parameter) for parameter in group["params"] if parameter.requires_grad)
    return None if optimizer is None else total


def _bytes(tensor: Any) -> int:
    return local_view(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
