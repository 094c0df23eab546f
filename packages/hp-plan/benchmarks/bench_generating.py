"""Generation under a plan beside transformers' own on the whole model, in turns, on ranks of this machine.

    torchrun --nproc-per-node 2 packages/hp-plan/benchmarks/bench_generating.py [--rounds 8] [--device cpu]

Each rank writes 32 tokens after each of 4 prompts of 16, greedily. "whole" is the model on every rank without a plan;
on as many cores as ranks its time is what one device takes. Printed are medians over rounds of the CPU seconds of rank
0 (by the clock on a device), and the median of their ratios to "whole" in the same round. Log-probabilities of the
texts follow, with their gradients, beside those of whole logits, and the largest tensors of logits.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

import torch

import hp_platform
from hp_plan import ParallelPlan, apply, build_model, generating, log_probabilities
from hp_platform import get_platform
from hp_testing import note_figure

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "eos_token_id": None,
    "bos_token_id": None,
}
OPTIONS = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}


def plan_of(**mesh: int) -> ParallelPlan:
    table = {"model": {"config": "LlamaConfig", "overrides": SIZES}, "mesh": mesh, "data": {"sequence_length": 64}}
    return ParallelPlan.from_dict(table | ({"styles": "auto"} if "tp" in mesh else {}))


def measure(runs: dict[str, Callable[[], object]], rounds: int, device: torch.device, title: str) -> None:
    """Run each in turns, and print medians and ratios to the first."""
    groups, collectives, devices = get_platform().groups, get_platform().collectives, get_platform().devices
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in [*runs][number % len(runs) :] + [*runs][: number % len(runs)]:
            collectives.barrier()
            begun = clock()
            runs[name]()
            devices.synchronize()
            if number:
                seconds[name].append(clock() - begun)
    if groups.rank() == 0:
        print(f"\n{title}")
        first = seconds[next(iter(runs))]
        for name, found in seconds.items():
            ratio = statistics.median(mine / other for mine, other in zip(found, first, strict=True))
            note_figure(title, name, ratio)
            print(f"{name:<40}{statistics.median(found):>8.3f} s{ratio:>8.2f}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu, cuda or npu; default cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hp_platform.init_process_group()
    ranks, device = get_platform().groups.size(), torch.device(arguments.device)
    ids = torch.randint(SIZES["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    whole = build_model(plan_of(), device=device).eval()
    fsdp, tp = (
        apply(build_model(plan, device=device), plan).eval() for plan in (plan_of(dp_shard=ranks), plan_of(tp=ranks))
    )

    def generation(model: torch.nn.Module, context: Callable = generating) -> Callable[[], object]:
        def run() -> object:
            with context(model):
                return model.generate(ids, attention_mask=mask, **OPTIONS)

        return run

    plain = contextlib.nullcontext
    runs = {
        "whole": generation(whole, plain),
        "fully_shard, generating": generation(fsdp),
        "fully_shard, gathered for each token": generation(fsdp, plain),
        "tp, generating": generation(tp),
        "tp, generate alone": generation(tp, plain),
    }
    measure(runs, arguments.rounds, device, f"Generation, {ranks} ranks, {device}: 4 x 32 tokens")
    texts = torch.cat([ids] * 4, 1)

    def of_whole_logits() -> None:
        logs = whole(texts, use_cache=False).logits[:, :-1].log_softmax(-1)
        (logs.gather(-1, texts[:, 1:, None]).sum() - (logs.exp() * logs).sum()).backward()

    def of(model: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            found = log_probabilities(model, texts, chunk=64)
            (found.log_probabilities.sum() + found.entropy.sum()).backward()

        return run

    runs = {"whole logits": of_whole_logits, "chunks": of(whole), "chunks, fully_shard": of(fsdp), "chunks, tp": of(tp)}
    measure(runs, arguments.rounds, device, f"Log-probabilities and gradients, {ranks} ranks, {device}: 4 x 64 tokens")
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main()
