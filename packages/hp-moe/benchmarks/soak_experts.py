"""A thousand steps of experts over two ranks: memory and the garbage collector's work stay flat.

Half of the steps compute the block again in backward; routings change from step to step, evaluation, wrong inputs that
all ranks refuse and graphs that nobody differentiates come in between.

python packages/hp-moe/benchmarks/soak_experts.py [--steps N]
"""

from __future__ import annotations

import argparse
import gc
import resource

import torch
from torch.utils.checkpoint import checkpoint

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, FeedForward, MoE, update_expert_bias
from hp_platform import get_platform
from hp_styles import parallelize_module
from hp_testing import close_pools, run_ranks


def run(steps: int, combine: str) -> list[tuple[int, int]]:
    """Train on a rank; return the tensors alive and the peak of memory in MiB at a fifth and at the end."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    moe = MoE(32, 32, 8, top_k=2, load_balance_coeff=0.01, shared_expert=FeedForward(32, 32))
    parallelize_module(moe, mesh, {"experts": ExpertParallel(combine=combine)})
    optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)
    torch.manual_seed(get_platform().groups.rank())
    counts = []
    gc.collect()
    gc.disable()
    for step in range(steps):
        x = torch.randn(0 if step % 20 == 9 else 64 + step % 7, 32)
        (checkpoint(moe, x, use_reentrant=False) if step % 2 else moe(x)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_expert_bias(moe)
        if step % 10 == 3:
            with torch.no_grad():
                moe.eval()(x)
            moe.train()(x)  # a graph that nobody differentiates
        if step % 50 == 7:
            try:
                moe(x * float("nan"))
            except ValueError:
                pass
        if step in (steps // 5, steps - 1):
            tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
            counts.append((tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    gc.enable()
    return counts


def main(steps: int) -> None:
    """Run both ways to combine; end with an error where tensors grew, or memory by more than 8 MiB."""
    for combine in ("fast", "exact"):
        for rank, (early, late) in enumerate(run_ranks(2, run, steps, combine, timeout=600.0)):
            print(
                f"{combine}, rank {rank}: {early[0]} tensors, {early[1]} MiB; after {steps} steps {late[0]}, {late[1]}"
            )
            assert early[0] == late[0], "tensors grew"
            assert late[1] - early[1] <= 8, "memory grew"
    close_pools()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    main(parser.parse_args().steps)
