"""Host overhead of a DTensor against torch's own, in one process.

    python packages/hp-dtensor/benchmarks/bench_dtensor.py [--rounds 30]

Every table interleaves all candidates in each round and takes medians of CPU time, on one thread, with a fake process
group of 8 ranks (no communication: what is measured is the host). Overhead is the time minus that of the plain
operation on the same local tensors; it is negative where ours spends less than torch's own ``backward()`` does in
Python before the engine starts. The last column is the ratio to torch's DTensor. Of a replicated operand ours gives the
summed gradient, torch's leaves it partial.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import init_device_mesh as peer_mesh
from torch.distributed.tensor import parallel as peer_styles
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_dtensor as hp
from hp_testing import note_figure

DEVICE = torch.device("cpu")
RANKS = 8


def interleave(fns: dict[str, Callable[[], Any]], rounds: int, target_us: float = 6000.0) -> dict[str, float]:
    """Median microseconds a call of each candidate; each round runs every candidate, in rotating order."""
    names = list(fns)
    inner: dict[str, int] = {}
    for name in names:
        for _ in range(20):
            fns[name]()
        start = time.process_time_ns()
        for _ in range(10):
            fns[name]()
        inner[name] = max(3, min(400, int(target_us / max((time.process_time_ns() - start) / 1e4, 0.01))))
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            at = index % len(names)
            for name in names[at:] + names[:at]:
                fn, count = fns[name], range(inner[name])
                start = time.process_time_ns()
                for _ in count:
                    fn()
                times[name].append((time.process_time_ns() - start) / 1e3 / inner[name])
            if index % 8 == 7:
                gc.collect()
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def table(title: str, header: list[str], rows: list[list[Any]]) -> None:
    for row in rows:
        note_figure(title, row[0], row[-1])
    shown = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    print(f"\n{title}")
    for index, row in enumerate(shown):
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
        if index == 0:
            print("  ".join("-" * width for width in widths))


# ---- one operation ----
def _cases() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[int | None, ...]]]:
    """Operation -> function, local operands, sharded dim of each operand (None: replicated)."""
    r = torch.randn
    x, y, w, b = r(4, 8), r(4, 8), r(8, 8), r(8)
    ids, table_ = torch.randint(0, 8, (4,)), r(8, 8)
    return {
        "add": (lambda a, c: a + c, (x, y), (0, 0)),
        "mul": (lambda a, c: a * c, (x, y), (0, 0)),
        "mul scalar": (lambda a: a * 0.5, (x,), (0,)),
        "matmul": (lambda a, c: a @ c, (x, w), (0, None)),
        "linear": (F.linear, (x, w), (None, 0)),
        "view": (lambda t: t.view(t.shape[0], 2, 4), (x,), (0,)),
        "transpose": (lambda t: t.transpose(0, 1), (x,), (0,)),
        "slice": (lambda t: t[:, :4], (x,), (0,)),
        "cat": (lambda a, c: torch.cat((a, c), 1), (x, y), (0, 0)),
        "sum": (lambda t: t.sum(-1), (x,), (0,)),
        "mean": (lambda t: t.mean(-1, keepdim=True), (x,), (0,)),
        "silu": (F.silu, (x,), (0,)),
        "softmax": (lambda t: F.softmax(t, -1), (x,), (0,)),
        "layer_norm": (lambda t, a, c: F.layer_norm(t, (8,), a, c), (x, b, b.clone()), (0, None, None)),
        "embedding": (F.embedding, (ids, table_), (0, None)),
    }


def bench_operations(rounds: int, backward: bool) -> None:
    ours_mesh = hp.init_device_mesh(DEVICE.type, (RANKS,), ("tp",))
    theirs_mesh = peer_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("tp",))

    def ours(local: torch.Tensor, dim: int | None) -> Any:
        made = hp.DTensor.from_local(
            local.clone(), ours_mesh, [hp.Replicate() if dim is None else hp.Shard(dim)]
        ).detach()
        return made.requires_grad_(local.is_floating_point())

    def theirs(local: torch.Tensor, dim: int | None) -> Any:
        made = peer.DTensor.from_local(
            local.clone(), theirs_mesh, [peer.Replicate() if dim is None else peer.Shard(dim)], run_check=False
        )
        return made.detach().requires_grad_(local.is_floating_point())

    def plain(local: torch.Tensor, dim: int | None) -> Any:
        return local.clone().requires_grad_(local.is_floating_point())

    rows, ratios = [], []
    with DEVICE:  # not while it is timed: a default device is a mode, which every operation passes through
        cases = _cases()
    for name, (fn, operands, dims) in cases.items():
        runs: dict[str, Callable[[], Any]] = {}
        for who, make in (("plain", plain), ("torch", theirs), ("ours", ours)):
            args = [make(local, dim) for local, dim in zip(operands, dims, strict=True)]
            if backward:
                out = fn(*args)
                gradient = (
                    out.detach().clone()
                    if who != "ours"
                    else hp.DTensor.from_local(torch.ones(out.local_shape, device=DEVICE), ours_mesh, out.placements)
                )
                leaves = [a for a in args if a.requires_grad]

                def run(fn: Any = fn, args: Any = args, gradient: Any = gradient, leaves: Any = leaves) -> None:
                    fn(*args).backward(gradient)
                    for leaf in leaves:
                        leaf.grad = None

                runs[who] = run
            else:
                runs[who] = lambda fn=fn, args=args: fn(*args)
        made = interleave(runs, rounds)
        ours_us, theirs_us = made["ours"] - made["plain"], made["torch"] - made["plain"]
        ratios.append(ours_us / theirs_us)
        rows.append([name, made["plain"], theirs_us, ours_us, ratios[-1]])
    totals = [sum(row[column] for row in rows) for column in (1, 2, 3)]
    if not backward:
        # On a busy machine noise may exceed an overhead; a mean of what is left would flatter.
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if min(ratios) > 0 else math.nan
        rows.append(["geometric mean", "", "", "", mean])
    rows.append(["sum", *totals, totals[2] / totals[1]])
    what = "forward and backward" if backward else "forward, gradients recorded"
    table(f"Overhead an operation, microseconds: {what}", ["operation", "plain", "torch's", "ours", "ratio"], rows)


# ---- a transformer ----
class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (m(h).view(batch, length, -1, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        # by hand: torch's DTensor has no fused attention on CPU
        a = F.softmax(q @ k.transpose(-2, -1) * self.head_dim**-0.5, -1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Enter(torch.autograd.Function):
    """The input of a column-parallel layer: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """The output of a row-parallel layer: summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class ByHand(Block):
    """A rank's part of a block, its collectives written by hand as Megatron-LM does (arXiv:1909.08053, section 3)."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        self.q, self.k, self.v = (nn.Linear(dim, dim // RANKS, bias=False) for _ in range(3))
        self.o = nn.Linear(dim // RANKS, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden // RANKS, bias=False), nn.Linear(hidden // RANKS, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h: Any = _Enter.apply(self.norm1(x))
        q, k, v = (m(h).view(batch, length, -1, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.softmax(q @ k.transpose(-2, -1) * self.head_dim**-0.5, -1) @ v
        attended: Any = _Leave.apply(self.o(a.transpose(1, 2).reshape(batch, length, -1)))
        x = x + attended
        fed: Any = _Leave.apply(self.down(F.gelu(self.up(_Enter.apply(self.norm2(x))))))
        return x + fed


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(64, 8, 128), Block(64, 8, 128)).to(DEVICE)


def bench_transformer(rounds: int) -> None:
    import hp_styles

    x = torch.randn(2, 8, 64, device=DEVICE)
    columns, rows_ = ("*.q", "*.k", "*.v", "*.up"), ("*.o", "*.down")
    ours = _model()
    mesh = hp.init_device_mesh(DEVICE.type, (RANKS,), ("tp",))
    plan = {key: hp_styles.ColwiseParallel(use_local_output=False) for key in columns}
    plan |= {key: hp_styles.RowwiseParallel(use_local_output=False) for key in rows_}
    hp_styles.parallelize_module(ours, mesh, plan)
    hp.distribute_module(ours, mesh)
    ours_x = hp.distribute_tensor(x, mesh, [hp.Replicate()])

    def theirs_of(local: bool) -> nn.Module:
        model = _model()
        made = peer_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("tp",))
        plan: dict[str, Any] = {key: peer_styles.ColwiseParallel(use_local_output=local) for key in columns}
        plan |= {key: peer_styles.RowwiseParallel(use_local_output=local) for key in rows_}
        peer_styles.parallelize_module(model, made, plan)
        return model if local else peer.distribute_module(model, made)

    theirs, theirs_local = theirs_of(False), theirs_of(True)
    theirs_x = peer.distribute_tensor(x, peer_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("tp",)), [peer.Replicate()])
    single = _model()

    def step(model: nn.Module, given: Any) -> Callable[[], None]:
        def run() -> None:
            model(given).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None

        return run

    runs = {
        "one device, unsharded": step(single, x),
        "by hand, as Megatron": step(nn.Sequential(ByHand(64, 8, 128), ByHand(64, 8, 128)).to(DEVICE), x),
        "torch, DTensor activations": step(theirs, theirs_x),
        "torch, local activations": step(theirs_local, x),
        "ours, DTensor activations": step(ours, ours_x),
    }
    made = interleave(runs, rounds, target_us=30000)
    base = made["torch, DTensor activations"]
    table(
        f"Two-layer tensor-parallel transformer, forward and backward, {RANKS} ranks (fake), microseconds",
        ["", "time", "ratio"],
        [[name, value, value / base] for name, value in made.items()],
    )
    note_figure(
        "transformer", "over Megatron by hand", made["ours, DTensor activations"] / made["by hand, as Megatron"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each table; default 30")
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu, cuda or npu; time is the host's CPU time")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    global DEVICE
    DEVICE = torch.device(arguments.device)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(
        f"{arguments.device}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()},"
        f" {os.cpu_count()} cores,"
        " one thread"
    )
    bench_operations(rounds, backward=False)
    bench_operations(rounds, backward=True)
    bench_transformer(rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
