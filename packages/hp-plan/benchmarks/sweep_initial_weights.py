"""Which families draw the same weights shard by shard as in their constructors, and which folders are read by shards.

python packages/hp-plan/benchmarks/sweep_initial_weights.py [FAMILY ...]

Each is built on two ranks, sharded by fully_shard and by tensor parallel styles. Fails where `DRAWN_ALIKE` has a family
whose weights differ, or lacks one whose weights don't, where a folder's weights or buffers are others than transformers
reads, and where lint refuses a folder.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from families import FAMILIES  # type: ignore[import-not-found]

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model, lint
from hp_plan.torch.build import DRAWN_ALIKE, begin, build_empty, finish
from hp_testing import close_pools, run_ranks

MESHES = ({"dp_shard": 2}, {"tp": 2})


def differences(model: torch.nn.Module, truth: torch.nn.Module) -> list[str]:
    """List the parameters and buffers that differ."""
    buffers = dict(truth.named_buffers())
    pairs = [(name, value, truth.get_parameter(name)) for name, value in model.named_parameters()]
    pairs += [(name, value, buffers[name]) for name, value in model.named_buffers()]
    whole = ((name, each.full_tensor() if isinstance(each, DTensor) else each, own) for name, each, own in pairs)
    return [name for name, value, expected in whole if not torch.equal(value, expected)]


def judge(name: str, folder: str) -> dict[str, Any]:
    """Build a family and read its folder, which rank 0 writes, on each mesh; say what differs."""
    warnings.simplefilter("ignore")
    family = FAMILIES[name]
    task = {"task": family.task} if family.task else {}
    model = {"config": family.config, "overrides": family.overrides, **task}
    truth = build_model(ParallelPlan.from_dict({"model": model}))
    if torch.distributed.get_rank() == 0:
        truth.save_pretrained(folder)
    torch.distributed.barrier()
    said: dict[str, Any] = {"class": type(truth).__name__, "drawn": [], "read": [], "refused": [], "shards": True}
    for mesh in MESHES:
        drawn = ParallelPlan.from_dict({"model": model, "mesh": mesh})
        try:
            said["drawn"] += differences(finish(apply(build_empty(drawn), drawn), drawn), truth)
        except Exception as error:  # whatever a family's own code raises on shards
            said["drawn"].append(f"{type(error).__name__}: {error}")
        saved = ParallelPlan.from_dict({"model": {"path": folder, **task}, "mesh": mesh})
        said["refused"] += [str(each) for each in lint(saved) if each.key.startswith("model.")]
        begun = begin(saved)
        said["shards"] &= any(parameter.is_meta for parameter in begun.parameters())
        try:
            said["read"] += differences(finish(apply(begun, saved), saved), truth)
        except Exception as error:
            said["read"].append(f"{type(error).__name__}: {error}")
    return said


def main() -> int:
    """Print a line a family; return the exit status."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    faults = 0
    with contextlib.ExitStack() as ends:
        ends.callback(close_pools)
        for name in sys.argv[1:] or FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                one = run_ranks(2, judge, name, folder, timeout=300.0)[0]
            drawn, wrong = one["drawn"], [*one["read"], *one["refused"]]
            fault = bool(wrong) or (one["class"] in DRAWN_ALIKE) == bool(drawn)
            faults += fault
            how = f"drawn {'otherwise' if drawn else 'alike'}, folder read by {'shards' if one['shards'] else 'whole'}"
            print(f"{'FAULT ' if fault else ''}{name}: {how} {[*drawn, *wrong][:3] if fault else ''}", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
