"""fully_shard against torch's FSDP2, both in the same processes, taking turns; ratio last.

python packages/hp-fsdp/benchmarks/bench_fsdp.py [--repeats N] [--ranks N] [--hidden N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

LAYERS, VOCABULARY = 12, 1024


class Block(nn.Module):
    """A llama-like block: 9 parameters."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.o(h)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(kind: str, hidden: int) -> nn.Module:
    """The model, sharded by ``kind``: ours, torch or none."""
    torch.manual_seed(0)
    model = Model(hidden)
    if kind == "ours":
        from hp_fsdp import fully_shard
    elif kind == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        return model
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def step_of(model: nn.Module, tokens: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> Callable[[], float]:
    """A training step; without an optimizer, forward and backward."""

    parameters = list(model.parameters())

    def step() -> float:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return loss.item()

    return step


def take_turns(steps: dict[str, Callable[[], float]], repeats: int, wait: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each step, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 3):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def optimizer_of(model: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def measure(
    hidden: int, tokens_shape: tuple[int, int], repeats: int, kinds: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Seconds by row and kind, in the process group that is there."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, tokens_shape)
    fake = dist.get_backend() == "fake"
    wait = (lambda: None) if fake else (lambda: dist.barrier())
    models = {kind: build(kind, hidden) for kind in kinds}
    rows = {}
    plain = {kind: step_of(model, tokens, None) for kind, model in models.items()}
    rows["forward + backward"] = take_turns(plain, repeats, wait)
    for name, fused in (("step, AdamW", None), ("step, AdamW fused", True)):
        steps = {kind: step_of(model, tokens, optimizer_of(model, fused)) for kind, model in models.items()}
        rows[name] = take_turns(steps, repeats, wait)
        losses = {kind: step() for kind, step in steps.items()}
        if not fake and abs(losses["ours"] - losses["torch"]) > 1e-3 * abs(losses["torch"]):
            raise AssertionError(f"the losses differ: {losses}")
    return rows


def measure_fake(ranks: int, hidden: int, repeats: int) -> dict[str, dict[str, float]]:
    """The same on a fake group: this process is rank 0 of ``ranks``, and nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return measure(hidden, (1, 8), repeats, ("ours", "torch", "none"))
    finally:
        dist.destroy_process_group()


def show(
    title: str, rows: dict[str, dict[str, float]], targets: dict[str, float], *, without: str | None = None
) -> None:
    print(f"\n{title}")
    print(f"{'':34}{'ours ms':>10}{'FSDP2 ms':>10}{'none ms':>10}{'ratio':>8}{'target':>8}")
    for name, row in rows.items():
        lines = [(name, row["ours"], row["torch"], targets.get(name))]
        if without in row:
            less = row[without]
            lines.append((f"{name}, less the model's", row["ours"] - less, row["torch"] - less, None))
        for label, ours, theirs, target in lines:
            none = f"{row['none'] * 1e3:10.2f}" if "none" in row and label == name else " " * 10
            print(
                f"{label:34}{ours * 1e3:10.2f}{theirs * 1e3:10.2f}{none}{ours / theirs:8.2f}"
                + (f"{'<= ' + str(target):>8}" if target else "")
            )


def main() -> None:
    from hp_platform.testing import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, one thread a rank, medians of {arguments.repeats}, taking"
        " turns"
    )
    rows = run_ranks(
        arguments.ranks, measure, arguments.hidden, (2, 32), arguments.repeats, ("ours", "torch", "none"), timeout=600.0
    )[0]
    show(
        f"{arguments.ranks} gloo ranks, {LAYERS} layers, hidden {arguments.hidden}, 2 x 32 tokens a rank",
        rows,
        {"step, AdamW": 0.85},
    )
    rows = measure_fake(64, 64, arguments.repeats)
    show(
        f"host time: fake group of 64 ranks, {LAYERS} layers, hidden 64, 8 tokens",
        rows,
        {"forward + backward": 0.4, "step, AdamW": 0.4},
        without="none",
    )


if __name__ == "__main__":
    main()
