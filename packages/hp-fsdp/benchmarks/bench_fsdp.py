"""fully_shard against torch's FSDP2 on one model, in the same processes, taking turns; ratio last.

"raw" is the unwrapped model's forward and backward, then the same collectives one by one, then the optimizer on
plain tensors of the shards' sizes: what a wrapper costs that overlaps nothing and adds nothing.

python packages/hp-fsdp/benchmarks/bench_fsdp.py [--repeats N] [--ranks N] [--hidden N ...] [--parts PART ...]
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hp_testing import note_figure

LAYERS, VOCABULARY, FAKE_RANKS = 12, 1024, (64, 1024)
PARTS = ("steps", "host", "memory", "bits")
MICRO_BATCHES, STEPS, RANKS = 24, 3, (1, 2, 3, 4, 8)  # of the comparison of bits
Row = dict[str, float]


class Block(nn.Module):
    """A GPT-like block of 16 parameters."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.o(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(kind: str, model: nn.Module) -> nn.Module:
    """The model, sharded by ``kind``: ours, deterministic (ours in that mode), torch or none."""
    if kind in ("ours", "deterministic"):
        from hp_fsdp import fully_shard as ours

        fully_shard = functools.partial(ours, deterministic=kind == "deterministic")
    elif kind == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        return model
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def build(kind: str, hidden: int) -> nn.Module:
    """The same weights for each kind."""
    torch.manual_seed(0)
    return shard(kind, Model(hidden))


def step_of(
    model: nn.Module, tokens: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], float]:
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


def optimizer_of(model: nn.Module, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def raw_step_of(
    model: nn.Module,
    tokens: torch.Tensor,
    issued: list[tuple[str, int]],
    fused: bool | None,
    shards: list[torch.Tensor],
) -> Callable[[], float]:
    """What "raw" means, see above.

    Args:
        model: not wrapped.
        tokens: the input.
        issued: kind and bytes of each collective of a sharded step.
        fused: for AdamW.
        shards: tensors for it; none for no optimizer.
    """
    compute = step_of(model, tokens)
    parts = [torch.zeros_like(shard, requires_grad=True) for shard in shards]
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer = torch.optim.AdamW(parts, lr=1e-4, fused=fused) if parts else None
    ranks = dist.get_world_size()
    largest = max(size for _, size in issued) // 4
    whole, piece = torch.zeros(largest), torch.zeros(largest // ranks)

    def step() -> float:
        loss = compute()
        for kind, size in issued:
            count = size // 4
            if kind == "all_gather":
                dist.all_gather_into_tensor(whole[:count], piece[: count // ranks])
            else:
                dist.reduce_scatter_tensor(piece[: count // ranks], whole[:count])
        if optimizer is not None:
            optimizer.step()
        return loss

    return step


def collectives_of(step: Callable[[], float]) -> list[tuple[str, int]]:
    """Kind and bytes of each collective that one of our steps issues."""
    from hp_platform.communication.checks import observers

    issued: list[tuple[str, int]] = []
    observers.append(lambda kind, size, group: issued.append((kind, size)))
    step()
    observers.pop()
    return issued


def count_of(step: Callable[[], float]) -> int:
    """How many collectives a step of torch's issues."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as comm:
        step()
    return comm.get_total_counts()


def take_turns(steps: dict[str, Callable[[], float]], repeats: int, wait: Callable[[], object]) -> Row:
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


def measure_steps(hidden: int, shape: tuple[int, int], repeats: int) -> dict[str, Row]:
    """Seconds by row and kind, in the process group that is there."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, shape)
    fake = dist.get_backend() == "fake"
    wait = (lambda: None) if fake else dist.barrier
    models = {kind: build(kind, hidden) for kind in ("ours", "torch", "none")}
    plain = {kind: step_of(model, tokens) for kind, model in models.items()}
    plain["ours"]()  # the first step gathers nothing ahead of time
    issued = collectives_of(plain["ours"])
    shards = [parameter.to_local().detach().clone() for parameter in models["ours"].parameters()]
    forward_and_backward = {**plain, "raw": raw_step_of(models["none"], tokens, issued, None, [])}
    rows = {"forward + backward": take_turns(forward_and_backward, repeats, wait)}
    for name, fused in (("step with AdamW", None), ("step with AdamW, fused", True)):
        steps = {kind: step_of(model, tokens, optimizer_of(model, fused)) for kind, model in models.items()}
        steps["raw"] = raw_step_of(models["none"], tokens, issued, fused, shards)
        rows[name] = take_turns(steps, repeats, wait)
        losses = {kind: step() for kind, step in steps.items()}
        if not fake and abs(losses["ours"] - losses["torch"]) > 1e-3 * abs(losses["torch"]):
            raise AssertionError(f"the losses differ: {losses}")
    if not fake:
        rows |= measure_deterministic(hidden, tokens, repeats)
    rows["wrapping"] = take_turns_wrapping(hidden, wait)
    rows["collectives"] = {"ours": float(len(issued)), "torch": float(count_of(plain["torch"]))}
    return rows


def take_turns_wrapping(hidden: int, wait: Callable[[], object]) -> Row:
    """Median seconds to wrap one model, each kind in turn; what is wrapped is freed before the next.

    "raw" copies the shards to new memory, and does nothing else.
    """
    ranks = dist.get_world_size()
    seconds: dict[str, list[float]] = {"ours": [], "torch": [], "raw": []}
    for turn in range(6):
        for kind, taken in seconds.items():
            model = Model(hidden)
            wait()
            start = time.perf_counter()
            if kind == "raw":
                kept = [each.detach()[: -(-len(each) // ranks)].clone() for each in model.parameters()]
            else:
                kept = shard(kind, model)
            if turn:
                taken.append(time.perf_counter() - start)
            del model, kept
            gc.collect()
    return {kind: statistics.median(taken) for kind, taken in seconds.items()}


def measure_deterministic(hidden: int, tokens: torch.Tensor, repeats: int) -> dict[str, Row]:
    """Steps in deterministic mode, against FSDP2 without such a mode."""
    models = {"ours": build("deterministic", hidden), "torch": build("torch", hidden), "none": build("none", hidden)}
    optimizers = {kind: optimizer_of(model, True) for kind, model in models.items()}
    steps = {kind: step_of(model, tokens, optimizers[kind]) for kind, model in models.items()}
    rows = {"deterministic, AdamW, fused": take_turns(steps, repeats, dist.barrier)}

    def accumulated(kind: str) -> float:
        model = models[kind]
        for index in range(4):
            if kind != "none":
                model.set_requires_gradient_sync(index == 3)
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizers[kind].step()
        optimizers[kind].zero_grad()
        return 0.0

    steps = {kind: functools.partial(accumulated, kind) for kind in models}
    rows["deterministic, 4 micro-batches a step"] = take_turns(steps, max(3, repeats // 3), dist.barrier)
    return rows


def weights_after(kind: str, hidden: int) -> torch.Tensor:
    """All weights after some steps of as many micro-batches, whatever the number of ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = build(kind, hidden)
    for module in model.modules():
        if kind == "torch" and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    if kind != "torch":
        model.set_reduce_op_type("sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # large, so that a last bit is not rounded away
    count = MICRO_BATCHES // dist.get_world_size()
    for step in range(STEPS):
        for index in range(count):
            number = dist.get_rank() * count + index
            generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)
            tokens = torch.randint(VOCABULARY, (1, 16), generator=generator)
            model.set_requires_gradient_sync(index == count - 1)
            (F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()])


def show_bits(hidden: int) -> None:
    """Prints the share of weights that are not the same on one rank and on several."""
    from hp_testing import run_ranks

    print(f"\nshare of weights that differ from one rank's after {STEPS} steps of {MICRO_BATCHES} micro-batches, AdamW")
    print(f"{'':38}" + "".join(f"{f'{ranks} ranks':>10}" for ranks in RANKS[1:]))
    for kind, title in (("deterministic", "ours, deterministic=True"), ("ours", "ours"), ("torch", "FSDP2")):
        weights = [run_ranks(ranks, weights_after, kind, hidden, timeout=600.0)[0] for ranks in RANKS]
        shares = [(each != weights[0]).float().mean().item() for each in weights[1:]]
        print(f"{title:38}" + "".join(f"{share:10.1%}" for share in shares))


def measure_memory(kind: str, hidden: int) -> float:
    """Most resident bytes of a rank in three steps with AdamW, beyond what was resident before the model."""
    from hp_platform import get_platform

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    devices = get_platform().devices
    tokens = torch.randint(VOCABULARY, (2, 32))
    small = shard(kind, Model(16))
    step_of(small, tokens, optimizer_of(small, True))()  # what is loaded at the first use is loaded before
    devices.reset_peak_memory()
    before = devices.peak_memory()
    model = build(kind, hidden)
    step = step_of(model, tokens, optimizer_of(model, True))
    devices.reset_peak_memory()
    for _ in range(3):
        step()
    return float(devices.peak_memory() - before)


def measure_fake(ranks: int, hidden: int, repeats: int) -> dict[str, Row]:
    """Steps on a fake group: this process is rank 0 of many, and nothing is communicated.

    The group itself copies each piece in a loop over the ranks, in "raw" as in the others.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return measure_steps(hidden, (1, 8), repeats)
    finally:
        dist.destroy_process_group()


def show(title: str, rows: dict[str, Row], targets: dict[str, float], unit: float = 1e3, what: str = "ms") -> None:
    collectives = rows.pop("collectives", None)
    print(f"\n{title}")
    print(f"{'':38}" + "".join(f"{kind + ' ' + what:>10}" for kind in ("ours", "FSDP2", "none", "raw")), end="")
    print(f"{'/FSDP2':>8}{'target':>9}{'/raw':>7}")
    for name, row in rows.items():
        cells = [f"{row[kind] * unit:10.2f}" if kind in row else " " * 10 for kind in ("ours", "torch", "none", "raw")]
        target = f"{'<= ' + str(targets[name]):>9}" if name in targets else " " * 9
        over_raw = f"{row['ours'] / row['raw']:7.2f}" if "raw" in row else ""
        note_figure(title, name, row["ours"] / row["torch"])
        if "raw" in row:
            note_figure(title, f"{name}, over raw", row["ours"] / row["raw"])
        print(f"{name:38}{''.join(cells)}{row['ours'] / row['torch']:8.2f}{target}{over_raw}".rstrip())
    if collectives is not None:
        print(f"collectives a step: ours {collectives['ours']:.0f}, FSDP2 {collectives['torch']:.0f};", end=" ")
        print(f"groups: {LAYERS + 1}, of which {LAYERS} are gathered twice and one once")


def show_steps(ranks: int, hidden: int, repeats: int) -> None:
    """Prints the times of steps on gloo ranks."""
    from hp_testing import run_ranks

    rows = run_ranks(ranks, measure_steps, hidden, (2, 32), repeats, timeout=1800.0)[0]
    targets = {"step with AdamW": 0.8, "wrapping": 0.5}
    show(f"{ranks} gloo ranks, {LAYERS} layers, hidden {hidden}, 2 x 32 tokens a rank", rows, targets)


def show_host(ranks: int, repeats: int) -> None:
    """Prints the host's time on a fake group."""
    rows = measure_fake(ranks, 64, repeats)
    collectives = rows.pop("collectives")
    for name in ("forward + backward", "step with AdamW", "step with AdamW, fused"):
        row = rows[name]
        rows[f"{name}, less raw"] = {kind: row[kind] - row["raw"] for kind in ("ours", "torch")}
    title = f"host time: fake group of {ranks} ranks, {LAYERS} layers, hidden 64, 8 tokens"
    targets = {"step with AdamW": 0.3, "wrapping": 0.5}
    show(title, {**rows, "collectives": collectives}, targets)


def show_memory(ranks: int, hidden: int) -> None:
    """Prints the peak memory of a rank; each kind in fresh processes."""
    from hp_testing import close_pools, run_ranks

    memory: Row = {}
    for kind in ("ours", "deterministic", "torch", "none"):
        close_pools()
        memory[kind] = run_ranks(ranks, measure_memory, kind, hidden, timeout=300.0)[0]
    rows = {"step": memory, "step, deterministic": {**memory, "ours": memory["deterministic"]}}
    show(f"peak resident memory of a rank, {ranks} gloo ranks, hidden {hidden}", rows, {"step": 0.95}, 2.0**-20, "MB")
    close_pools()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measured steps of each kind (default: 10)")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default: 2)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512], help="on gloo ranks (default: 256 512)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, one thread a rank, medians of {arguments.repeats}")
    if "steps" in arguments.parts:
        for hidden in arguments.hidden:
            show_steps(arguments.ranks, hidden, arguments.repeats)
    if "host" in arguments.parts:
        for ranks in FAKE_RANKS:
            show_host(ranks, arguments.repeats)
    if "memory" in arguments.parts:
        for hidden in arguments.hidden:
            show_memory(arguments.ranks, hidden)
    if "bits" in arguments.parts:
        show_bits(32)


if __name__ == "__main__":
    main()
