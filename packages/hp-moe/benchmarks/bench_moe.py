"""What hp-moe costs beside torch and transformers, interleaved in the same processes. Medians, minima and ratios.

grouped   forward and backward of a grouped product against torch's own, and in float64 against a loop over the weight
replicas  the worst rank's load over the mean, with a replica a rank and without, and the time to plan it
layer     a layer of experts on two gloo ranks against transformers' all-to-all, and what each saves for backward
hot       a layer on four gloo ranks where half of the tokens choose one expert, with replicas and without

bits      the share of weights whose bits differ from one rank's, by ranks, replicas and moving experts

    python packages/hp-moe/benchmarks/bench_moe.py --repeats 30
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, ExpertPlacement, GroupedExperts, plan_replicas, rebalance
from hp_platform import get_platform
from hp_platform.torch.grouped import grouped_linear
from hp_styles import parallelize_module

EXPERTS, CHOICES, HIDDEN, INNER, TOKENS, RANKS = 64, 8, 256, 128, 2048, 2
HOT_RANKS = 4


def compared(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            get_platform().devices.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def grouped(repeats: int, device: str) -> None:
    print(f"torch {torch.__version__}, {get_platform().devices.name() if device != 'cpu' else 'CPU'}")
    for experts, hidden, inner, tokens in ((16, 64, 128, 512), (64, 64, 128, 512), (16, 256, 512, 2048)):
        for dtype in (torch.float32, torch.float64):
            with torch.device(device):  # not around what is timed: it looks at every call of torch
                weight = torch.randn(experts, inner, hidden, dtype=dtype, requires_grad=True)
                x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
                sizes, grad = [tokens // experts] * experts, torch.randn(tokens, inner, dtype=dtype)
                ends = torch.tensor(sizes).cumsum(0).int()

            def ours(x=x, weight=weight, sizes=sizes, grad=grad):
                weight.grad = x.grad = None
                grouped_linear(x, weight, sizes).backward(grad)

            def torchs(x=x, weight=weight, ends=ends, grad=grad):
                weight.grad = x.grad = None
                F.grouped_mm(x, weight.transpose(1, 2), offs=ends).backward(grad)

            def loop(x=x, weight=weight, sizes=sizes, grad=grad):
                weight.grad = x.grad = None
                torch.cat([F.linear(rows, weight[e]) for e, rows in enumerate(x.split(sizes))]).backward(grad)

            peer = torchs if dtype is torch.float32 else loop
            times = compared({"ours": ours, "peer": peer}, repeats)
            middle = {name: 1e3 * statistics.median(each) for name, each in times.items()}
            what = "torch's grouped product" if peer is torchs else "the loop over weight[e]"
            print(
                f"grouped {experts} x {inner} x {hidden}, {tokens} rows, {str(dtype)[6:]}: {middle['ours']:.2f} ms,"
                f" {what} {middle['peer']:.2f} ms, {middle['ours'] / middle['peer']:.2f}"
                f" (minima {min(times['ours']) / min(times['peer']):.2f})"
            )


def replicas(draws: int = 20) -> None:
    for experts, ranks, exponent in ((64, 8, 1.0), (256, 32, 1.0), (256, 32, 0.6), (256, 64, 1.2)):
        worst: dict[int, list[float]] = {0: [], 1: [], 2: []}
        milliseconds = []
        for seed in range(draws):
            weights = [1 / (place + 1) ** exponent for place in range(experts)]
            random.Random(seed).shuffle(weights)
            load = [int(1e6 * weight / sum(weights)) for weight in weights]
            for slots, values in worst.items():
                begin = time.perf_counter()
                placement = plan_replicas(load, ExpertPlacement.even(experts, ranks), slots)
                milliseconds.append(1e3 * (time.perf_counter() - begin))
                values.append(max(placement.loads(placement.shares([load]))) * ranks / sum(load))
        means = ", ".join(f"{slots} slots {statistics.mean(values):.2f}" for slots, values in worst.items())
        print(
            f"replicas {experts} experts, {ranks} ranks, Zipf {exponent}: worst over mean {means}; planned in"
            f" {statistics.median(milliseconds):.1f} ms"
        )


def layer(rank: int, store: str, repeats: int) -> None:
    from moe_models import saved_bytes
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOICES
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    whole: Any = Qwen3MoeExperts(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    torch.manual_seed(1 + rank)
    tokens, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, CHOICES)
    chosen = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices

    own = EXPERTS // RANKS
    part = copy.deepcopy(whole)
    for name, parameter in list(part.named_parameters()):
        setattr(part, name, torch.nn.Parameter(parameter.data[rank * own : (rank + 1) * own].clone()))
    part.num_experts = own
    theirs: Any = AllToAllEP.__new__(AllToAllEP)  # its constructor wants a model's meshes; this is what it sets
    vars(theirs).update(experts=part, num_local_experts=own, experts_forward=part.forward)
    theirs.ep_mesh = init_torch_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    theirs.tp_mesh = init_torch_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))["tp"]

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    layers: dict[str, tuple[Any, Any]] = {"transformers": (theirs, part)}
    for combine in ("fast", "exact"):
        module = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(combine=combine))  # type: ignore[arg-type]
        layers[combine] = (module, module)

    def run(call: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = None
        dist.barrier()
        own, scores = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
        call(own, chosen, scores).square().mean().backward()

    def saved(call: Any, module: Any) -> int:
        """Count the bytes that all ranks save for backward."""
        inputs = tokens.clone().requires_grad_(), chosen, weights.clone().requires_grad_()
        total = torch.tensor(sum(saved_bytes(lambda: call(*inputs), module.parameters())))
        dist.all_reduce(total)
        return int(total)

    megabytes = {name: saved(*each) / 2**20 for name, each in layers.items()}
    times = compared({name: (lambda each=each: run(*each)) for name, each in layers.items()}, repeats)
    if rank == 0:
        for name, values in times.items():
            print(
                f"layer {name}: {1e3 * statistics.median(values):.0f} ms (minimum {1e3 * min(values):.0f}),"
                f" {statistics.median(values) / statistics.median(times['transformers']):.2f} of transformers' (minima"
                f" {min(values) / min(times['transformers']):.2f}); saves {megabytes[name] / RANKS:.1f} MiB a rank,"
                f" {megabytes[name] / megabytes['transformers']:.2f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def hot(rank: int, store: str, repeats: int) -> None:
    """Time a layer where one expert gets half of the tokens: the CPU time of the busiest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=HOT_RANKS)
    mesh = init_device_mesh("cpu", (HOT_RANKS,), mesh_dim_names=("ep",))
    experts, hidden, inner, tokens = 16, 512, 1024, 1024
    layers: dict[str, Any] = {}
    for name, slots in (("no replicas", 0), ("one slot", 1)):
        torch.manual_seed(0)
        layers[name] = parallelize_module(
            GroupedExperts(hidden, inner, experts, True), mesh, ExpertParallel(slots=slots)
        )
    torch.manual_seed(1 + rank)
    chosen = torch.where(torch.rand(tokens) < 0.5, 0, torch.randint(1, experts, (tokens,))).sort().values
    counts, x = chosen.bincount(minlength=experts), torch.randn(tokens, hidden)

    def step(name: str) -> float:
        layers[name].zero_grad()
        dist.barrier()
        begin = time.process_time()
        layers[name](x.clone().requires_grad_(), counts).square().mean().backward()
        return time.process_time() - begin

    step("one slot")
    placement = rebalance(layers["one slot"])[""]
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for repeat in range(repeats + 2):
        for name, values in seconds.items():
            every: list[Any] = [None] * HOT_RANKS
            dist.all_gather_object(every, step(name))
            values += [max(every)] if repeat > 1 else []
    if rank == 0:
        none, one = seconds.values()
        shared = sum(map(bool, placement.replicas))
        megabytes = 3 * hidden * inner * 4 / 2**20
        print(
            f"hot {experts} experts of {hidden} x {inner} on {HOT_RANKS} ranks, half of {HOT_RANKS} x {tokens}"
            f" tokens to one: {1e3 * statistics.median(none):.0f} ms of the busiest rank's CPU, with one slot a rank"
            f" ({shared} expert has {len(placement.replicas[0])} replicas) {1e3 * statistics.median(one):.0f} ms,"
            f" {statistics.median(one) / statistics.median(none):.2f} (minima {min(one) / min(none):.2f}); a slot in"
            f" use holds {megabytes:.0f} MiB of weights, and as many of gradients in backward"
        )
    dist.barrier()
    dist.destroy_process_group()


def bits(rank: int, store: str, ranks: int, file: str, options: dict[str, Any]) -> None:
    """Train the job of the tests for 20 steps, and write its weights down."""
    from deterministic_experts import weights_after

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    weights = weights_after(20, **options)
    if rank == 0:
        torch.save(weights, file)
    dist.barrier()
    dist.destroy_process_group()


def compare_bits() -> None:
    jobs = {"alone": (1, {})} | {
        f"{ranks} ranks{text}": (ranks, options)
        for ranks in (2, 4)
        for text, options in {
            "": {},
            **{f", {slots} slots": {"slots": slots} for slots in (1, 2, 3, 4)},
            ", moving": {"moves": True},
            ", moving, 2 slots": {"moves": True, "slots": 2},
        }.items()
    }
    for deterministic in (True, False):
        weights = {}
        for name, (ranks, options) in jobs.items():
            with tempfile.TemporaryDirectory() as folder:
                arguments = (f"{folder}/store", ranks, f"{folder}/weights", {**options, "deterministic": deterministic})
                torch.multiprocessing.spawn(bits, arguments, nprocs=ranks)
                weights[name] = torch.load(f"{folder}/weights").view(torch.int32)
        one = weights.pop("alone")
        shares = [f"{name} {float((each != one).double().mean()):.0%}" for name, each in weights.items()]
        print(f"bits deterministic={deterministic}: weights that differ from one rank's: {'; '.join(shares)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=["grouped", "replicas", "layer", "hot", "bits"])
    parser.add_argument("--device", default="cpu", help="of the grouped products: cpu, cuda or npu (default: cpu)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    torch.set_num_threads(1)
    if "grouped" in arguments.parts:
        grouped(arguments.repeats, arguments.device)
    if "replicas" in arguments.parts:
        replicas()
    for name, run, ranks in (("layer", layer, RANKS), ("hot", hot, HOT_RANKS)):
        if name in arguments.parts:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(run, (f"{folder}/store", arguments.repeats), nprocs=ranks)
    if "bits" in arguments.parts:
        compare_bits()


if __name__ == "__main__":
    main()
