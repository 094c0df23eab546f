"""Muon and AdamW against torch's and against programs that gather every matrix, taking turns; ratio last.

"gathered" is a Muon that gathers every momentum whole on every rank and orthogonalizes all of them there, in batches
by the same iteration as ours. "Dion's exchange" is the exchange of Microsoft's dion, written from its description: for
each shape an all-to-all each way, of as many matrices as there are ranks, filled up with zeros, sharded evenly.

python packages/hp-optim/benchmarks/bench_optim.py [--repeats N] [--parts PART ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor import RaggedShard, init_device_mesh
from hp_fsdp import fully_shard
from hp_optim import AdamW, AdamW8bit, Muon, SwapOptimizerConfig, swap_optimizer
from hp_optim.muon.ownership import Placed, assign
from hp_optim.muon.rules import NS_VARIANTS, split
from hp_optim.torch.newton_schulz import orthogonalize
from hp_platform import collectives, count_collectives, get_platform
from hp_testing import note_figure

PARTS = ("process", "adamw", "swap", "codes", "ranks", "host", "bytes")
SHAPES = [(128, 128)] * 12 + [(128, 512)] * 8
Row = dict[str, float]


def take_turns(steps: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> Row:
    """Median seconds of each step, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            if dist.is_initialized() and dist.get_backend() != "fake":
                dist.barrier()
            start = clock()
            step()
            if turn >= 2:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(title: str, row: Row, ours: str, targets: dict[str, float], unit: float = 1e3, what: str = "ms") -> None:
    """Print times, and ours over each of the others."""
    print(f"\n{title}")
    for name, seconds in row.items():
        ratio = f"{row[ours] / seconds:8.2f}" if name != ours else " " * 8
        note_figure(title, name, row[ours] / seconds)
        target = f"  (<= {targets[name]})" if name in targets else ""
        print(f"  {name:44}{seconds * unit:10.2f} {what}{ratio}{target}".rstrip())


class Matrices(nn.Module):
    """Matrices alone; gradients are set."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return sum(((weight * scale).sin().sum() for weight in self.weights), scale.new_zeros(()))


class Loop:
    """What torch.optim.Muon does, one matrix after the other, with products in a chosen dtype."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.buffers = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        for parameter, buffer in zip(self.parameters, self.buffers):
            gradient: Any = parameter.grad
            buffer.lerp_(gradient, 0.05)
            x = gradient.lerp(buffer, 0.95).to(self.dtype)
            x.div_(x.norm().clamp(min=1e-7))
            for a, b, c in NS_VARIANTS["asym5"]:
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            parameter.mul_(1 - 1e-3 * 0.1).add_(x, alpha=-1e-3 * 0.2 * max(parameter.shape) ** 0.5)


def measure_process(repeats: int) -> Row:
    """Steps of one process: 12 matrices of 128 x 128 and 8 of 128 x 512."""
    steps: dict[str, Callable[[], object]] = {}
    for name, make in (
        ("ours, float32", Muon),
        ("ours, bfloat16", lambda p: Muon(p, ns_dtype="bfloat16")),
        ("torch.optim.Muon, bfloat16", torch.optim.Muon),
        ("its loop, float32", lambda p: Loop(p, torch.float32)),
    ):
        parameters = list(Matrices(SHAPES).parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        steps[name] = make(parameters).step
    return take_turns(steps, repeats, time.process_time)


def measure_adamw(size: int, repeats: int) -> Row:
    """AdamW of 200 square parameters in a group of fully_shard on one rank's buffer, and of one flat tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    steps: dict[str, Callable[[], object]] = {}
    for name in (
        "ours, fully_shard",
        "ours, fully_shard, skip_nonfinite",
        "ours, plain",
        "torch fused, fully_shard",
        "torch fused, plain",
        "torch fused, flat",
    ):
        model: Any = Matrices([(size, size)] * 200)
        if "fully_shard" in name:
            fully_shard(model, mesh)
        model(torch.ones(())).backward()
        parameters = list(model.parameters())
        if "flat" in name:
            elements = sum(p.numel() for p in parameters) // dist.get_world_size()
            parameters = [nn.Parameter(torch.randn(elements))]
            parameters[0].grad = torch.randn(elements)
        options: dict[str, Any] = {"skip_nonfinite": True} if "skip" in name else {}
        steps[name] = (AdamW if "ours" in name else torch.optim.AdamW)(parameters, fused=True, **options).step
    return take_turns(steps, repeats, time.process_time)


def measure_swap(repeats: int) -> Row:
    """Steps of 4 M parameters with states on the device and on the host, in wall time: copies run beside the CPU."""
    devices = get_platform().devices
    steps: dict[str, Callable[[], object]] = {}
    for name, config in (
        ("states on the device", None),
        ("states on the host, 16 slices", SwapOptimizerConfig()),
        ("states on the host, 4 slices", SwapOptimizerConfig(swap_times=4)),
        ("states on the host, a copy a state", SwapOptimizerConfig(packed_swap=False)),
    ):
        parameters = [nn.Parameter(torch.randn(256, 1024, device=devices.current_device())) for _ in range(16)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer: Any = AdamW(parameters, fused=True)
        if config is not None:
            swap_optimizer(optimizer, config)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()
            devices.synchronize()

        steps[name] = step
    return take_turns(steps, repeats, time.perf_counter)


def measure_codes(repeats: int) -> Row:
    """Steps of one parameter of 16 M elements with states in float32 and in eight bits."""
    steps: dict[str, Callable[[], object]] = {}
    for name, make in (
        ("AdamW8bit", AdamW8bit),
        ("AdamW", AdamW),
        ("torch fused", lambda p: torch.optim.AdamW(p, fused=True)),
    ):
        parameter = nn.Parameter(torch.randn(4096, 4096))
        parameter.grad = torch.randn_like(parameter)
        steps[name] = make([parameter]).step
    return take_turns(steps, repeats, time.process_time)


class Gathered:
    """Every matrix gathered on every rank, all of them computed there."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.buffers = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        sorted_: dict[tuple[int, ...], list[int]] = {}
        whole = []
        for at, (parameter, buffer) in enumerate(zip(self.parameters, self.buffers)):
            buffer.mul_(0.95).add_(parameter.grad)
            whole.append((buffer * 0.95 + parameter.grad).full_tensor())
            sorted_.setdefault(tuple(parameter.shape), []).append(at)
        for shape, members in sorted_.items():
            made = orthogonalize(torch.stack([whole[at] for at in members]), NS_VARIANTS["asym5"], 1e-10)
            for at, update in zip(members, made * (0.2 * max(shape) ** 0.5)):
                parameter: Any = self.parameters[at]
                spec = parameter._spec
                start = sum(spec.placements[0].units[: dist.get_rank()])
                local = parameter.to_local()
                local.mul_(1 - 0.02 * 0.1).sub_(update.reshape(-1)[start : start + local.numel()] * 0.02)


def measure_ranks(shapes: list[tuple[int, int]], repeats: int) -> tuple[Row, int]:
    """CPU time of a rank's step, and how many collectives ours has."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    steps: dict[str, Callable[[], object]] = {}
    for name, make in (("ours", Muon), ("gathered", Gathered)):
        model: Any = fully_shard(Matrices(shapes), mesh)
        model(torch.ones(())).backward()
        steps[name] = make(list(model.parameters())).step
    row = take_turns(steps, repeats, time.process_time)
    with count_collectives() as counts:
        steps["ours"]()
    return row, sum(counts.values())


class DionExchange:
    """What a rank's host does for dion's exchange of evenly sharded matrices."""

    def __init__(self, shapes: list[tuple[int, int]], ranks: int) -> None:
        self.ranks = ranks
        self.sorted: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rows, columns in shapes:
            self.sorted.setdefault((rows, columns), []).append(torch.randn(max(1, rows // ranks), columns))
        self.momenta = {shape: [torch.zeros_like(each) for each in each_] for shape, each_ in self.sorted.items()}

    def step(self) -> None:
        """Exchange, orthogonalize one matrix of each shape and update."""
        for shape, shards in self.sorted.items():
            for start in range(0, len(shards), self.ranks):
                own = shards[start : start + self.ranks]
                momenta = self.momenta[shape][start : start + self.ranks]
                torch._foreach_mul_(momenta, 0.95)
                torch._foreach_add_(momenta, own)
                updates = [each.clone() for each in momenta]
                updates += [torch.zeros_like(own[0]) for _ in range(self.ranks - len(own))]
                pieces = [torch.empty_like(own[0]) for _ in range(self.ranks)]
                dist.all_to_all(pieces, updates)
                whole = torch.cat(pieces)[: shape[0]]
                made = orthogonalize(whole[None], NS_VARIANTS["asym5"], 1e-10)[0]
                back = list(
                    torch.cat([made, made.new_zeros(self.ranks * len(own[0]) - shape[0], shape[1])]).split(len(own[0]))
                )
                dist.all_to_all(updates, back)
                torch._foreach_mul_(own, 1 - 0.02 * 0.1)
                torch._foreach_sub_(own, torch._foreach_mul(updates[: len(own)], 0.02))


def measure_host(ranks: int, repeats: int) -> Row:
    """Host's time for 200 small matrices as rank 0 of many; nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        shapes = [(32, 32)] * 120 + [(32, 64)] * 80
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        model: Any = fully_shard(Matrices(shapes), mesh)
        model(torch.ones(())).backward()
        optimizer = Muon(list(model.parameters()))
        _zeros_arrive()
        steps: dict[str, Callable[[], object]] = {
            "ours": optimizer.step,
            "Dion's exchange": DionExchange(shapes, ranks).step,
        }
        return take_turns(steps, repeats, time.process_time)
    finally:
        dist.destroy_process_group()


def _zeros_arrive() -> None:
    """Zero what Muon gets from a fake group, which is any bits: no other rank has a problem, so the step goes on."""
    exchange = collectives.all_to_all

    def zeroed(arrived: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        exchange(arrived, *args, **kwargs)
        arrived.zero_()

    collectives.all_to_all = zeroed  # type: ignore[assignment]


def show_bytes() -> None:
    """What all ranks send of the blocks of llama 8B, over an all-to-all of even slices; and the balance of the work."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    print("\nllama 8B, each block a group of fully_shard: bytes over an all-to-all of even slices, work max / mean")
    for ranks, target in ((2, 0.2), (4, None), (8, 0.75), (16, None), (64, None)):
        piece, parameters, start = -(-sum(map(prod, shapes)) // ranks), [], 0
        for shape in shapes:
            edges = [min(max(piece * rank, start), start + prod(shape)) - start for rank in range(ranks + 1)]
            units = tuple(b - a for a, b in zip(edges, edges[1:]))
            matrices = split(shape, None, "w")
            parameters.append(
                Placed("w", shape, matrices, tuple(range(ranks)), (ranks,), (RaggedShard((0, 1), units),))
            )
            start += prod(shape)
        begin = time.perf_counter()
        plan = assign(parameters * 32, range(ranks))
        seconds = time.perf_counter() - begin
        even = 32 * sum(map(prod, shapes)) * (ranks - 1) / ranks
        told = f"  (<= {target})" if target else ""
        ratio = plan.sent_elements() / even
        print(f"  {ranks:3} ranks {ratio:8.2f}{told:11} {plan.imbalance:8.3f}   planned in {seconds:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measured steps of each kind (default: 10)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, one thread a rank, CPU time, medians of {arguments.repeats}"
    )
    if "process" in arguments.parts:
        title = "one process, 12 matrices of 128 x 128 and 8 of 128 x 512; ratios of ours in"
        row = measure_process(arguments.repeats)
        show(f"{title} float32", row, "ours, float32", {"torch.optim.Muon, bfloat16": 0.35})
        show(f"{title} bfloat16", row, "ours, bfloat16", {"torch.optim.Muon, bfloat16": 0.35})
    if "swap" in arguments.parts:
        title = "AdamW, 16 parameters of 256 x 1024; on CPU the copies are done at once"
        show(title, measure_swap(3 * arguments.repeats), "states on the host, 16 slices", {})
    if "codes" in arguments.parts:
        show("one parameter of 4096 x 4096", measure_codes(arguments.repeats), "AdamW8bit", {"torch fused": 3.0})
    if "bytes" in arguments.parts:
        show_bytes()
    if "adamw" in arguments.parts or "ranks" in arguments.parts:
        show_ranks(arguments.parts, arguments.repeats)
    if "host" in arguments.parts:
        row = measure_host(1024, arguments.repeats)
        show("host time, 200 matrices, fake group of 1,024 ranks", row, "ours", {"Dion's exchange": 0.2})


def show_ranks(parts: list[str], repeats: int) -> None:
    """Print what gloo ranks measure."""
    from hp_testing import run_ranks

    if "adamw" in parts:
        targets = {"torch fused, flat": 1.1, "torch fused, fully_shard": 0.4}
        for size in (64, 256):
            row = run_ranks(2, measure_adamw, size, 3 * repeats, timeout=600.0)[0]
            show(f"AdamW, 200 parameters of {size} x {size}, 2 gloo ranks", row, "ours, fully_shard", targets)
    if "ranks" in parts:
        for ranks, target in ((2, 0.65), (4, 0.35)):
            for shapes in (SHAPES, [(256, 256)] * 12 + [(256, 1024)] * 8):
                rows = run_ranks(ranks, measure_ranks, shapes, repeats, timeout=600.0)
                row = {name: statistics.mean(each[name] for each, _ in rows) for name in rows[0][0]}
                title = f"Muon, {ranks} gloo ranks, mean of ranks, 20 matrices of {shapes[0][0]} rows"
                show(f"{title}; {rows[0][1]} collectives", row, "ours", {"gathered": target})


if __name__ == "__main__":
    main()
