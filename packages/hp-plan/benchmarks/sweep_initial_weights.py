"""Which families draw the same weights shard by shard as in their constructors, and which folders are read by shards.

python packages/hp-plan/benchmarks/sweep_initial_weights.py [FAMILY ...]

Fails where `DRAWN_ALIKE` has a family whose weights differ, or lacks one whose weights don't, where a folder's weights
or buffers are others than transformers reads, and where lint refuses a folder.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from families import FAMILIES  # type: ignore[import-not-found]

from hp_plan import ParallelPlan, PlanError, build_model, lint
from hp_plan.torch.build import build_empty
from hp_plan.torch.materialize import DRAWN_ALIKE, begin, finish
from hp_platform import destroy_process_group, init_process_group


def differences(model: torch.nn.Module, truth: torch.nn.Module) -> list[str]:
    """List the parameters and buffers that differ."""
    buffers = dict(truth.named_buffers())
    pairs = [(name, value, truth.get_parameter(name)) for name, value in model.named_parameters()]
    pairs += [(name, value, buffers[name]) for name, value in model.named_buffers()]
    return [name for name, value, expected in pairs if not torch.equal(value, expected)]


def main() -> int:
    """Print a line a family; return the exit status."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    init_process_group()
    faults = 0
    for name in sys.argv[1:] or FAMILIES:
        family = FAMILIES[name]
        task = {"task": family.task} if family.task else {}
        plan = ParallelPlan.from_dict({"model": {"config": family.config, "overrides": family.overrides, **task}})
        truth, empty = build_model(plan), build_empty(plan)
        try:
            drawn = differences(finish(empty, plan), truth)
        except PlanError as error:
            drawn = [str(error)]
        with tempfile.TemporaryDirectory() as folder:
            truth.save_pretrained(folder)
            saved = ParallelPlan.from_dict({"model": {"path": folder, **task}})
            refused = [str(each) for each in lint(saved) if each.key.startswith("model.")]
            model = begin(saved)
            shards = any(parameter.is_meta for parameter in model.parameters())
            read = differences(finish(model, saved), truth)
        listed = type(truth).__name__ in DRAWN_ALIKE
        fault = bool(read or refused or listed == bool(drawn))
        faults += fault
        kinds = f"drawn {'alike' if not drawn else 'otherwise'}, folder read by {'shards' if shards else 'whole'}"
        print(
            f"{'FAULT ' if fault else ''}{name}: {kinds} {[*drawn, *read, *refused][:3] if fault else ''}", flush=True
        )
    destroy_process_group()
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
