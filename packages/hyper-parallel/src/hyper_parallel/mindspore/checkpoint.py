"""Saving the trained model, for transformers as for MindSpore: the names are the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspore import nn

from hp_fsdp import full_state_dict
from hp_plan import ParallelPlan
from hp_plan.mindspore.extend import named_parameters
from hp_platform import get_platform


def save_checkpoint(plan: ParallelPlan, model: nn.Cell, folder: Path) -> None:
    """Gather the full model and write it on rank 0: model.safetensors. Every rank calls it.

    Parameters that are one tensor are written once, under the first of their names, as transformers does.

    Args:
        plan: the plan of the model.
        model: after `hp_plan.apply`.
        folder: an existing folder.
    """
    from safetensors.numpy import save_file

    state: Any = full_state_dict(model, rank0_only=True, cpu=True)
    if get_platform().groups.rank() != 0:
        return
    once = {id(parameter): name for name, parameter in reversed(list(named_parameters(model)))}
    arrays = {name: state[name].asnumpy() for name in reversed(once.values())}
    save_file(arrays, folder / "model.safetensors")


def write_sample(plan: ParallelPlan, folder: Path) -> None:
    """Nothing: a function's model says of no way to generate."""
