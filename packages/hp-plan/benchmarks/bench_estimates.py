"""Peaks of a training step under plans of 2 or 4 ranks, against what `hyper-parallel init` counts for them.

A peak is what the step's tensors take at once on the rank with the most: weights, gradients, optimizer states, what
backward needs and what kernels return, by the allocations that torch's profiler lists in the second step.

torchrun --standalone --nproc-per-node 2 packages/hp-plan/benchmarks/bench_estimates.py [CASE ...]
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hp_platform
from hp_plan import ParallelPlan, build_model, build_optimizer, build_parallel_model
from hp_plan.port import models
from hp_plan.torch.training.loss import backward_loss
from hp_plan.tuning.proposal import Estimate, _Counts

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
SEQUENCE = {"styles": "auto-sequence"}
RECOMPUTE = {"memory": {"recompute": ["model.layers.*"]}}
CASES: dict[int, dict[str, tuple[dict[str, int], dict[str, object]]]] = {
    1: {"one rank": ({}, {}), "one rank, recompute": ({}, RECOMPUTE)},
    2: {
        "dp_shard": ({"dp_shard": 2}, {}),
        "dp_shard, recompute": ({"dp_shard": 2}, RECOMPUTE),
        "dp_shard, accumulate": ({"dp_shard": 2}, {"run": {"accumulate": 4}}),
        "tp": ({"tp": 2}, {}),
        "tp, sequence": ({"tp": 2}, SEQUENCE),
        "tp, recompute": ({"tp": 2}, RECOMPUTE),
        "cp": ({"cp": 2}, {}),
        "pp 1f1b": ({"pp": 2}, {"pipeline": {"schedule": "1f1b"}}),
        "pp zbv": ({"pp": 2}, {"pipeline": {"schedule": "zbv"}}),
    },
    4: {
        "tp 4": ({"tp": 4}, {}),
        "tp 4, sequence": ({"tp": 4}, SEQUENCE),
        "dp_shard x tp": ({"dp_shard": 2, "tp": 2}, {}),
        "pp 4 1f1b": ({"pp": 4}, {"pipeline": {"schedule": "1f1b"}}),
        "pp 4 zbv": ({"pp": 4}, {"pipeline": {"schedule": "zbv"}}),
        "pp 4 v-half": ({"pp": 4}, {"pipeline": {"schedule": "v-half"}}),
        "pp 4 zb2p": ({"pp": 4}, {"pipeline": {"schedule": "zb2p"}}),
        "pp 4 looped-bfs": ({"pp": 4}, {"pipeline": {"schedule": "looped-bfs"}}),
        "pp x tp": ({"pp": 2, "tp": 2}, {"pipeline": {"schedule": "1f1b"}}),
        "dp_shard x cp": ({"dp_shard": 2, "cp": 2}, {}),
    },
}


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of weights, gradients, buffers and optimizer states."""
    held = [*model.parameters(), *model.buffers()]
    held += [each.grad for each in model.parameters() if each.grad is not None]
    held += [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())


def measured(plan: ParallelPlan) -> int:
    """Return the peak of the second step, in bytes, on this rank."""
    model = build_parallel_model(plan)
    optimizer = build_optimizer(plan, model.named_parameters())
    rows = plan.data.batch_size // plan.mesh.data_parallel
    tokens = torch.randint(0, LLAMA["vocab_size"], (rows, plan.data.sequence_length), generator=torch.Generator())

    def step() -> None:
        optimizer.zero_grad()
        backward_loss(plan, model, tokens=tokens)
        optimizer.step()

    step()
    gc.collect()
    before = held_bytes(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = peak = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        now += each.nbytes()
        peak = max(peak, now)
    return before + peak


def main() -> None:
    """Print a line a case."""
    torch.set_num_threads(1)
    hp_platform.init_process_group()
    chosen = sys.argv[1:]
    for name, (mesh, sections) in CASES[dist.get_world_size()].items():
        if chosen and name not in chosen:
            continue
        plan = ParallelPlan.from_dict(
            {
                "model": {"config": "LlamaConfig", "overrides": LLAMA},
                "mesh": mesh,
                "data": {"sequence_length": 128, "batch_size": 8},
                **({"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}),
                **sections,
            }
        )
        empty = build_model(plan, device="meta")
        estimate: Estimate = _Counts(empty, models().outline(empty), plan.run.dtype).estimate(plan)
        peak = torch.tensor(measured(plan))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        parts = (estimate.trained, estimate.gathered, estimate.saved or 0)
        if dist.get_rank() == 0:
            shown = " + ".join(f"{each / 2**20:.1f}" for each in parts)
            counted, real = estimate.total / 2**20, peak.item() / 2**20
            line = f"{name:22} peak {real:7.1f} MiB, counted {counted:7.1f} ({shown}) {counted / real - 1:+.0%}"
            print(line, flush=True)
        gc.collect()
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main()
