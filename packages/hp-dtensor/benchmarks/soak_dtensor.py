"""Whether anything grows: steps of a tensor-parallel transformer, its memory and objects printed on the way.

    python packages/hp-dtensor/benchmarks/soak_dtensor.py [--steps 10000]

A fake process group of 8 ranks; forward, backward, AdamW, a clipped gradient norm and another learning rate each step.
"""

from __future__ import annotations

import argparse
import gc
import warnings

import torch
import torch.distributed as dist
from bench_dtensor import RANKS, _model, table
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_dtensor as hp
import hp_styles
from hp_dtensor.torch.ops.dispatching import dispatch


def resident() -> float:
    """MB of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000, help="default 10000")
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    model, mesh = _model(), hp.init_device_mesh("cpu", (RANKS,), ("tp",))
    plan = dict.fromkeys(("*.q", "*.k", "*.v", "*.up"), "colwise") | dict.fromkeys(("*.o", "*.down"), "rowwise")
    hp_styles.parallelize_module(model, mesh, plan)
    hp.distribute_module(model, mesh)
    x = hp.distribute_tensor(torch.randn(2, 8, 64), mesh, [hp.Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = []
    for step in range(steps + 1):
        if step % max(steps // 5, 1) == 0 and step:
            gc.collect()
            rows.append([step, resident(), len(gc.get_objects()), len(dispatch._PLANS)])
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        model(x * (1.0 + step % 7)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    table("A tensor-parallel transformer", ["steps", "resident MB", "objects", "plans"], rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
