"""A thousand steps under a plan of memory: memory, buffers of the host and the garbage collector's work stay flat.

Evaluation, an exception in forward and a graph that nobody differentiates come in between.

python packages/hp-offload/benchmarks/soak_offload.py [--steps N]
"""

from __future__ import annotations

import argparse
import gc
import resource

import torch
import torch.nn.functional as F
from torch import nn

from hp_offload import SwapManager, apply_memory_plan, plan_memory, trace_saved


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.isnan().any():
            raise ArithmeticError("nan")
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def main(steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(64, 64)
    saved = trace_saved(model, (x,))
    plan = plan_memory(saved, int(0.7 * sum(each.bytes for each in saved)), 1e15)
    apply_memory_plan(model, plan)
    print(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    counts: list[tuple[int, int]] = []
    gc.collect()
    gc.disable()
    for step in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 3:
            with torch.no_grad():
                model.eval()(x)
            model.train()(x)  # a graph that nobody differentiates
        if step % 50 == 7:
            try:
                model(x * float("nan"))
            except ArithmeticError:
                pass
        if step in (steps // 5, steps - 1):
            tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
            host = SwapManager().host_bytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"step {step}: {tensors} tensors, {host} bytes of the host, peak of the process {peak} MiB", flush=True
            )
            counts.append((tensors, host))
    assert counts[0] == counts[1], "tensors or buffers grew"
    print(f"flat over {steps} steps; the garbage collector, off meanwhile, finds {gc.collect()} objects")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    main(parser.parse_args().steps)
