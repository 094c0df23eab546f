"""How much memory the training of a plan takes on each rank, at the least."""

from __future__ import annotations

from hp_plan.outline import ModelOutline
from hp_plan.plan import ParallelPlan
from hp_platform import get_platform

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def least_memory(plan: ParallelPlan, model: ModelOutline) -> int:
    """Bytes that a rank needs for weights, gradients and the optimizer's states alone; activations come on top.

    The larger of the two moments that no plan avoids: every rank builds the whole model before it is cut, and a step
    needs a rank's part of the weights, of their gradients and of the optimizer's states.

    Args:
        plan: says the dtype, the mesh and the optimizer.
        model: how many numbers its parameters have.
    """
    if plan.optimizer.name == "adamw":
        states = 2
    else:
        states = 1 if plan.optimizer.momentum else 0
    cut = (model.elements + model.trained * (1 + states)) // (plan.mesh.world_size // plan.mesh.dp_replicate)
    return max(model.elements, cut) * _BYTES[plan.run.dtype]


def memory_shortage(plan: ParallelPlan, model: ModelOutline, ranks: int) -> str | None:
    """A sentence with the numbers where `ranks` of this machine's ranks can't hold the plan; None where they may.

    Args:
        plan: the plan.
        model: its model.
        ranks: how many ranks of the plan run on this machine. They share its memory on CPU; each has a device else.
    """
    devices = get_platform().devices
    have = devices.total_memory()
    if have is None:
        return None
    rank, shared = least_memory(plan, model), devices.kind == "cpu"
    if (rank * ranks if shared else rank) <= have:
        return None
    device = f"this machine has {_size(have)} for {ranks}" if shared else f"its {devices.kind} device has {_size(have)}"
    needs = f"at least {_size(rank)} of memory for weights, gradients and {plan.optimizer.name}'s states"
    return f"{model.elements:,} parameters in {plan.run.dtype} take a rank {needs}, and {device}"


def _size(number: int) -> str:
    """Bytes as people read them.

    >>> _size(131_072_000_000)
    '131.1 GB'
    """
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
