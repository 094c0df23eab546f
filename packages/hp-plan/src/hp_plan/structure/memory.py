"""A rank's memory: the bytes that training takes beside its activations, and the budget that a plan has for both."""

from __future__ import annotations

from math import prod

from hp_offload.extend import parse_size, size
from hp_optim.extend import is_hidden_matrix
from hp_plan.features.experts import replicas
from hp_plan.features.homes import cache_elements, elements_at_home, in_groups
from hp_plan.features.loss import has_copy
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.outline import ModelOutline, matched_by
from hp_platform import get_platform

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def training_bytes(plan: ParallelPlan, model: ModelOutline) -> int:
    """Estimate the bytes of a rank's shard of weights, gradients and optimizer states.

    A second copy of the model, which an objective compares with, counts; a model of another folder does not.

    Args:
        plan: says the dtype, the mesh and the optimizer.
        model: the number of elements of its parameters.
    """
    if plan.fsdp.offload:  # but for what is gathered
        return _waiting(plan, model) * BYTES[plan.run.dtype]
    if plan.memory.homes:
        visiting = cache_elements(plan, model) * BYTES[plan.run.dtype]
        return _trained_bytes(plan, model) - host_bytes(plan, model) + visiting
    return _trained_bytes(plan, model)


def host_bytes(plan: ParallelPlan, model: ModelOutline) -> int:
    """Estimate the bytes of the same that are on the host."""
    own = _trained_bytes(plan, model) - _waiting(plan, model) * BYTES[plan.run.dtype]
    if plan.memory.homes:
        return int(own * elements_at_home(plan, model) / max(1, model.elements))
    return own if plan.fsdp.offload else 0


def _trained_bytes(plan: ParallelPlan, model: ModelOutline) -> int:
    states: float
    if plan.optimizer.name == "adamw":
        states = 2
    elif plan.optimizer.name == "adamw8bit":
        states = 2.03 / BYTES[plan.run.dtype]
    elif plan.optimizer.name == "muon":
        states = 2 - _hidden_part(plan, model)
    else:
        states = 1 if plan.optimizer.momentum else 0
    if plan.optimizer.swap_slices:  # three slices are on the device at a time
        states *= min(1.0, 3 / plan.optimizer.swap_slices)
    uneven = _uneven_experts(plan, model)
    copies = 2 if has_copy(plan) else 1
    shared = (model.elements + uneven) * copies + (model.trained + uneven) * (1 + states)
    shards = plan.mesh.world_size // plan.mesh.dp_replicate
    return (int(shared) // shards + _waiting(plan, model) + replicas(plan, model)) * BYTES[plan.run.dtype]


def _waiting(plan: ParallelPlan, model: ModelOutline) -> int:
    """Return the elements of gradients that wait, unsharded, for the last micro-batch of a step."""
    at_home = plan.memory.homes and not plan.run.deterministic  # gradients go home with each micro-batch
    if plan.run.accumulate == 1 or not in_groups(plan) or at_home:
        return 0
    experts = sum(sum(map(prod, module.shapes.values())) for module in model.modules.values() if module.experts)
    on_a_rank = (model.trained - min(experts, model.trained)) // plan.mesh.tp + experts // plan.mesh.ep
    # In deterministic mode those of each micro-batch.
    return on_a_rank * (plan.run.accumulate if plan.run.deterministic else 1)


def _uneven_experts(plan: ParallelPlan, model: ModelOutline) -> int:
    """Return the elements that experts would have more if all ranks of `ep` had as many as the one with the most."""
    more = 0
    for module in model.modules.values():
        if module.experts is not None:
            one = sum(map(prod, module.shapes.values())) // max(1, module.experts.count)
            more += -module.experts.count % plan.mesh.ep * one
    return more


def _hidden_part(plan: ParallelPlan, model: ModelOutline) -> float:
    """Return the part of the elements that Muon trains, with one state each."""
    sizes = {
        f"{name}.{key}" if name else key: (len(shape), prod(shape))
        for name, module in model.modules.items()
        for key, shape in module.shapes.items()
    }
    listed = matched_by(plan.optimizer.muon, sizes)
    hidden = [n for name, (dims, n) in sizes.items() if (name in listed if listed else is_hidden_matrix(name, dims))]
    return sum(hidden) / max(1, model.elements)


def check_states(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the optimizer's states can be on the host, or have eight bits, as the plan says."""
    section, diagnostics = plan.optimizer, []
    kind = "states on the host" if section.swap_slices else "adamw8bit"
    key = "optimizer.swap_slices" if section.swap_slices else "optimizer.name"
    if (section.swap_slices or section.name == "adamw8bit") and get_platform().name != "torch":
        message = f"got {kind}, which this version does not support on MindSpore"
        diagnostics.append(Diagnostic(key, message, "shard the states, by mesh.dp_shard"))
    if section.swap_slices and plan.fsdp.offload:
        message = f"got {section.swap_slices}, but fsdp.offload has states on the host, where the optimizer steps"
        diagnostics.append(Diagnostic("optimizer.swap_slices", message, "leave it out, or fsdp.offload"))
    if section.swap_slices and section.name in ("sgd", "adamw8bit"):
        message = f"the states of {section.name} can't be on the host"
        diagnostics.append(Diagnostic(key, message, "leave it out, or write name = 'adamw' or 'muon'"))
    return diagnostics


def check_memory(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the budget is a number of bytes, and that the framework in use can keep to one."""
    if plan.memory.budget is None:
        return []
    try:
        parse_size(plan.memory.budget)
    except ValueError as error:
        return [Diagnostic("memory.budget", str(error), 'write for example budget = "20GiB"')]
    if get_platform().name != "torch":
        message = "got a budget, which this version does not support on MindSpore"
        return [Diagnostic("memory.budget", message, "leave [memory] out; hp_offload.checkpoint_wrapper saves memory")]
    return []


def check_budget(plan: ParallelPlan, outline: ModelOutline) -> list[Diagnostic]:
    """Check that the budget leaves bytes for what backward needs; one that can't be read is `check_memory`'s."""
    if plan.memory.budget is None or check_memory(plan):
        return []
    try:
        memory_left(plan, outline)
    except PlanError as error:
        return list(error.diagnostics)
    return []


def memory_left(plan: ParallelPlan, outline: ModelOutline) -> int:
    """Return the bytes of the budget that weights, gradients and optimizer states leave on a rank.

    Raises:
        PlanError: they leave nothing.
    """
    budget, own = parse_size(str(plan.memory.budget)), training_bytes(plan, outline)
    if own < budget:
        return budget - own
    message = (
        f"got {plan.memory.budget}, and weights, gradients and optimizer states take {size(own)} of it on each rank"
    )
    fix = "raise the budget, or mesh.dp_shard or mesh.tp, or give blocks memory.homes in its place"
    raise PlanError([Diagnostic("memory.budget", message, fix)])
