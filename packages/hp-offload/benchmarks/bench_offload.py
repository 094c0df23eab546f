"""Selective and full recomputation against torch's, in one process, taking turns; and how long plans of memory take.

The part "model" plans a small Llama of transformers: bytes that are freed against the plan's, and the seconds that a
second run takes against those predicted.

"extra" is what a policy costs over recomputing all, in seconds of a step: light is ours, torch the dispatch mode of its
selective checkpoint. One policy keeps the linear layers' products, the other the attention's output as well.

python packages/hp-offload/benchmarks/bench_offload.py [--repeats N] [--hidden N ...] [--parts PART ...]
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
import time
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hp_offload import CheckpointPolicy, Saved, apply_memory_plan, checkpoint, plan_memory, trace_saved
from hp_testing import note_figure

BLOCKS, LENGTH, PARTS = 4, 64, ("recompute", "plan", "model")
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
            note_figure(f"hidden {hidden}, {kind}", f"extra over full, {what}", extra)
            print(f"hidden {hidden:4}  {kind}: extra over full, {what}: light / torch {extra:.2f}")


def planned_step(equal: bool, spared: float) -> list[Saved]:
    """32 layers of 12 sites; to keep a site spares a part of its seconds, the rest is spent if its layer runs again."""
    made, now = [], 0.0
    for layer in range(32):
        for site in range(12):
            size = (site * 37 % 64 + 1) << 20
            cost = (site * 17 % 29 + 1) * 1e-4
            if not equal:
                size, cost = size + (layer * 7919 % 64 << 16), cost * (1 + layer % 5 / 10)
            now += cost
            made.append((f"layers.{layer}.part{site}#0", size, cost, now))
    return [
        Saved(name, size, at, 3 * now - 2 * at + cost, cost * spared, rerun=cost * (1 - spared))
        for name, size, cost, at in made
    ]


def bench_plan() -> None:
    plan_memory(planned_step(True, 1.0)[:12], 1 << 40, 12e9)  # imports scipy
    for equal in (True, False):
        for spared in (1.0, 0.5):
            saved = planned_step(equal, spared)
            total = sum(each.bytes for each in saved)
            for part in (0.7, 0.4, 0.2):
                begin = time.process_time()
                plan = plan_memory(saved, int(part * total), 12e9)
                took = time.process_time() - begin
                what = f"32 x 12 sites, {'equal' if equal else 'different'} blocks, {spared:.0%} spared,"
                print(f"{what} {part:.0%} of all bytes: {took:.3f} s CPU, step {plan.predicted_step:.4f} s")


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in inputs | self._known:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.bytes -= nbytes


def bench_model(repeats: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False,
    ))  # fmt: skip
    tokens = torch.randint(256, (2, 256))

    def lives(model: nn.Module) -> int:
        """Return the bytes between forward and backward, output apart."""
        gc.collect()
        with Live() as live:
            out = model(input_ids=tokens, labels=tokens)
            result = live.bytes - out.loss.untyped_storage().nbytes() - out.logits.untyped_storage().nbytes()
            out.loss.backward()
        model.zero_grad()
        return result

    def seconds(model: nn.Module) -> float:
        begin = time.process_time()
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        return time.process_time() - begin

    saved = trace_saved(model, (), {"input_ids": tokens, "labels": tokens})
    total, plain = sum(each.bytes for each in saved), lives(model)
    assert total == plain, f"traced {total} bytes, and a step has {plain}"
    print(f"Llama of 6 layers: {total} bytes are saved, as traced")
    position_ids = tokens.shape[1] * 8  # an argument that a layer that runs again keeps, and no other does
    for part in (0.7, 0.5, 0.35):
        plan = plan_memory(saved, int(part * total), 0)
        planned = apply_memory_plan(copy.deepcopy(model), plan)
        seconds(planned)
        freed, expected = plain - lives(planned), plan.total(CheckpointPolicy.MUST_RECOMPUTE)
        assert freed == expected - position_ids, f"freed {freed} bytes, planned {expected}"
        times = [(seconds(model), seconds(planned)) for _ in range(repeats)]
        again = min(each for _, each in times) - min(each for each, _ in times)
        predicted = plan.predicted_step - max(each.needed_at for each in saved)
        print(f"Llama, {part:.0%}: {freed} bytes freed, as planned; second runs {1e3 * again:.1f} ms,"
              f" predicted {1e3 * predicted:.1f} ms")  # fmt: skip


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
    if "model" in options.parts:
        bench_model(options.repeats)
