"""Attention over a cut sequence against torch's experimental ring attention, on two gloo ranks.

    python packages/hp-styles/benchmarks/bench_context_parallel.py [--rounds 15] [--lengths 1024 4096]

Forward and backward of causal attention, float32, head-tail balanced, one thread a rank; each round runs every
candidate, in rotating order, behind a barrier; medians of rank 0's wall time. torch's `context_parallel` is for CUDA:
its handlers know no CPU kernel. What is timed is the ring that it runs, with the CPU flash kernel that ours uses, in an
autograd function. The second table is a block with its projections.
"""

from __future__ import annotations

import argparse
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
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from hp_dtensor import init_device_mesh
from hp_styles import AsyncContextParallel, ContextParallel, parallelize_module
from hp_testing import close_pools, run_ranks

BATCH, HEADS, SIZE = 1, 8, 64
_aten: Any = torch.ops.aten


def _peer_forward(q: Any, k: Any, v: Any, is_causal: bool, **_: Any) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _peer_backward(query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, grad_out: Any) -> Any:
    lse = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad_out, query, key, value, out, lse, 0.0, is_causal)


class _PeerRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        made = peer._templated_ring_attention(dist.group.WORLD, 2, _peer_forward, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, made[0], made[1].squeeze(-1))
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        back = peer._templated_ring_attention_backward
        return back(dist.group.WORLD, 2, _peer_backward, grad, "grad_out", q, k, v, out, lse, is_causal=True)[:3]


class Attention(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _torchs(method: str) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any) -> Any:
        peer.set_rotate_method(method)
        return _PeerRing.apply(q, k, v)

    return run


def _rounds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(rounds + 2):
        at = round_ % len(names)
        for name in names[at:] + names[:at]:
            dist.barrier()
            start = time.perf_counter()
            runs[name]().square().sum().backward()
            if round_ > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of attention alone."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), ("cp",))
    ring = parallelize_module(Attention(), mesh, ContextParallel(ulysses_degree=1, load_balance=True))
    ulysses = parallelize_module(Attention(), mesh, ContextParallel(load_balance=True))
    shape = (BATCH, HEADS, length // mesh.size(), SIZE)
    given = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    runs: dict[str, Callable[[], Any]] = {
        "torch's ring, keys gathered (its default)": lambda: _torchs("allgather")(*given),
        "torch's ring, keys passed on": lambda: _torchs("alltoall")(*given),
        "our ring": lambda: ring(*given),
        "our Ulysses": lambda: ulysses(*given),
    }
    made = [run().detach() for run in runs.values()]
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=1e-3, atol=1e-4)
    return _rounds(runs, rounds)


def block(length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a block with its projections."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), ("cp",))
    x = torch.randn(BATCH, length // mesh.size(), HEADS * SIZE, requires_grad=True)
    styles = {
        "ContextParallel": ContextParallel(load_balance=True),
        "AsyncContextParallel": AsyncContextParallel(
            q_proj="q", k_proj="k", v_proj="v", head_size=SIZE, load_balance=True
        ),
    }
    blocks = {name: parallelize_module(Block(), mesh, style) for name, style in styles.items()}
    return _rounds({name: (lambda made=made: made(x)) for name, made in blocks.items()}, rounds)


def table(title: str, made: dict[str, float]) -> None:
    base = next(iter(made.values()))
    print(f"\n{title}")
    for name, value in made.items():
        print(f"  {name:<44} {value:>9.2f} ms  {value / base:>5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each table; default 15")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="tokens; default 1024 4096")
    given = parser.parse_args()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    )
    for length in given.lengths:
        title = f"{length} tokens, {HEADS} heads of {SIZE}, forward and backward"
        table(f"Attention, {title}", run_ranks(2, attention, length, given.rounds, timeout=600.0)[0])
        table(f"Block, {title}", run_ranks(2, block, length, given.rounds, timeout=600.0)[0])
    close_pools()


if __name__ == "__main__":
    main()
