"""Selective and full recomputation against torch's, in one process, taking turns; and how long plans of memory take.

"extra" is what a policy costs over recomputing all, in seconds of a step: light is ours, torch the dispatch mode of its
selective checkpoint. One policy keeps the linear layers' products, the other the attention's output as well.

python packages/hp-offload/benchmarks/bench_offload.py [--repeats N] [--hidden N ...] [--parts PART ...]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hp_offload import CheckpointPolicy, Saved, checkpoint, plan_memory

BLOCKS, LENGTH, PARTS = 4, 64, ("recompute", "plan")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (*PRODUCTS, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)


class Block(nn.Module):
    """A llama-like block of about 56 operations."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = 4
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    @staticmethod
    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    @staticmethod
    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * 0.8 + torch.cat((-second, first), -1) * 0.6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        h = self.normed(x, self.norm1)
        q, k, v = (p(h).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(batch, length, hidden))
        h = self.normed(x, self.norm2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def ours(kept, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def torchs(kept, ctx, op, *args, **kwargs):
    return TorchPolicy.MUST_SAVE if op in kept else TorchPolicy.PREFER_RECOMPUTE


def torch_selective(kept):
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(torchs, kept))
    return functools.partial(torch_checkpoint, use_reentrant=False, context_fn=contexts)


CALLS = {
    "plain": lambda block, x: block(x),
    "full": checkpoint,
    "torch full": functools.partial(torch_checkpoint, use_reentrant=False),
    "light": functools.partial(checkpoint, policy_fn=functools.partial(ours, PRODUCTS)),
    "torch selective": torch_selective(PRODUCTS),
    "light, attention": functools.partial(checkpoint, policy_fn=functools.partial(ours, ATTENTION)),
    "torch, attention": torch_selective(ATTENTION),
}


def bench_recompute(hidden: int, repeats: int) -> None:
    torch.manual_seed(0)
    blocks, x = [Block(hidden) for _ in range(BLOCKS)], torch.randn(2, LENGTH, hidden)
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    gradients: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for name, call in CALLS.items():
            for block in blocks:
                block.zero_grad()
            begin = time.process_time()
            h = x
            for block in blocks:
                h = call(block, h)
            h.square().mean().backward()
            seconds[name].append(time.process_time() - begin)
            gradients[name] = [parameter.grad for block in blocks for parameter in block.parameters()]
    assert all(torch.equal(*pair) for found in gradients.values() for pair in zip(found, gradients["plain"]))
    quick = {name: statistics.quantiles(each, n=10)[0] for name, each in seconds.items()}
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    for name in CALLS:
        print(f"hidden {hidden:4}  {name:16} {1e3 * quick[name]:8.2f} ms  median {1e3 * middle[name]:8.2f} ms")
    for kind, times in (("first decile", quick), ("median", middle)):
        full = times["full"] / times["torch full"]
        print(f"hidden {hidden:4}  {kind}: full / torch full {full:.2f}")
        for what, light, theirs in (
            ("products", "light", "torch selective"),
            ("and attention", "light, attention", "torch, attention"),
        ):
            extra = (times[light] - times["full"]) / (times[theirs] - times["torch full"])
            print(f"hidden {hidden:4}  {kind}: extra over full, {what}: light / torch {extra:.2f}")


def bench_plan() -> None:
    for equal in (True, False):
        saved, now = [], 0.0
        made = []
        for layer in range(32):
            for site in range(12):
                size = (site * 37 % 64 + 1) << 20
                cost = (site * 17 % 29 + 1) * 1e-4
                if not equal:
                    size, cost = size + (layer * 7919 % 64 << 16), cost * (1 + layer % 5 / 10)
                now += cost
                made.append((f"layers.{layer}.part{site}#0", size, cost, now))
        for name, size, cost, at in made:
            saved.append(Saved(name, size, at, 3 * now - 2 * at + cost, cost))
        total = sum(each.bytes for each in saved)
        plan_memory(saved[:12], total, 12e9)  # imports scipy
        for part in (0.7, 0.4, 0.2):
            begin = time.process_time()
            plan = plan_memory(saved, int(part * total), 12e9)
            took = time.process_time() - begin
            what = f"32 x 12 sites, {'equal' if equal else 'different'} blocks, {part:.0%} of all bytes"
            print(f"{what}: {took:.3f} s CPU, step {plan.predicted_step:.4f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--hidden", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "recompute" in options.parts:
        for hidden in options.hidden:
            bench_recompute(hidden, options.repeats)
    if "plan" in options.parts:
        bench_plan()
