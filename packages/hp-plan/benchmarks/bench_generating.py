"""Generation under a plan beside transformers' own on the whole model, in turns, on ranks of this machine.

    torchrun --nproc-per-node 2 packages/hp-plan/benchmarks/bench_generating.py [--rounds 8] [--hidden 256]
        [--tokens 32]
    torchrun --nproc-per-node 2 packages/hp-plan/benchmarks/bench_generating.py --parts bits price

Each rank writes so many tokens after each of 4 prompts of 16, greedily. "whole" is the model on every rank without a
plan; on as many cores as ranks its time is what one device takes. Printed are medians over rounds of the CPU seconds of
rank 0 (by the clock on a device), the median of their ratios to "whole" in the same round, and medians of the seconds
by the clock; under "pp" the stages take turns, so there rank 0 waits for the others. Log-probabilities of the texts
follow, with their gradients, beside those of whole logits, and the largest tensors of logits.

`bits` counts tokens whose log-probability in generation has other bits than in another computation of the same tokens,
without and with `[run] generation = "exact"`. `price` is the time that exact takes, over plain.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hp_platform
from hp_plan import ParallelPlan, apply, build_model, generating, log_probabilities
from hp_plan.torch.generation.exact.forward import make_exact
from hp_platform import get_platform
from hp_testing import note_figure

SIZES: dict[str, Any] = {
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
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 24, "tie_word_embeddings": False},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256},
}
CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}


def plan_of(family: str = "Llama", run: dict[str, object] | None = None, **mesh: int) -> ParallelPlan:
    model = {"config": f"{family}Config", "overrides": SIZES | FAMILIES[family]}
    table = {"model": model, "mesh": mesh, "data": {"sequence_length": 64}, "run": run or {}}
    return ParallelPlan.from_dict(table | ({"styles": "auto"} if "tp" in mesh else {}))


def measure(runs: dict[str, Callable[[], object]], rounds: int, device: torch.device, title: str) -> None:
    """Run each in turns, and print medians and ratios to the first."""
    groups, collectives, devices = get_platform().groups, get_platform().collectives, get_platform().devices
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    waited: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in [*runs][number % len(runs) :] + [*runs][: number % len(runs)]:
            collectives.barrier()
            begun, began = clock(), time.perf_counter()
            runs[name]()
            devices.synchronize()
            if number:
                seconds[name].append(clock() - begun)
                waited[name].append(time.perf_counter() - began)
    if groups.rank() == 0:
        print(f"\n{title}")
        first = seconds[next(iter(runs))]
        for name, found in seconds.items():
            ratio = statistics.median(mine / other for mine, other in zip(found, first, strict=True))
            note_figure(title, name, ratio)
            by_clock = statistics.median(waited[name])
            print(f"{name:<40}{statistics.median(found):>8.3f} s{ratio:>8.2f}{by_clock:>10.3f} s by the clock")


def bits() -> None:
    """Count tokens whose bits differ."""
    rank, ranks = get_platform().groups.rank(), get_platform().groups.size()
    lengths = [3, 17, 9, 1] * ranks
    texts = torch.randint(
        1, SIZES["vocab_size"], (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0)
    )
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    ids, own = texts * mask, slice(4 * rank, 4 * rank + 4)
    columns = ("training", "alone", "right padding", "fully_shard", "dp_replicate")
    if rank == 0:
        tokens = OPTIONS["max_new_tokens"] * len(lengths)
        print(f"\n{tokens} tokens: whose bits are not those of one batch of {len(lengths)}")
        print(f"{'':<28}" + "".join(f"{name:>15}" for name in columns))
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            for mode in ("plain", "exact"):
                run = {"dtype": dtype, "deterministic": True, "generation": mode}
                whole = build_model(plan_of(family, run))
                if mode == "exact":
                    make_exact(whole)
                written, expected = generated(whole, ids, mask)
                full = torch.cat([mask, mask.new_ones(written.shape[0], expected.shape[1])], 1)
                new = expected.shape[1]
                training = log_probabilities(whole, written, attention_mask=full).log_probabilities[:, -new:]
                different = [(training != expected).sum().item()]
                alone = [
                    generated(
                        whole, ids[row : row + 1, -length:], mask[row : row + 1, -length:], written[row : row + 1]
                    )
                    for row, length in enumerate(lengths)
                ]
                different.append(sum((found != expected[row]).sum().item() for row, (_, found) in enumerate(alone)))
                right = 0
                for row, length in enumerate(lengths):
                    text = torch.nn.functional.pad(written[row : row + 1, -new - length :], (0, 5))
                    kept = torch.ones_like(text)
                    kept[:, -5:] = 0
                    found = log_probabilities(whole, text, attention_mask=kept).log_probabilities[:, length - 1 : -5]
                    right += (found != expected[row]).sum().item()
                different.append(right)
                for axis in ("dp_shard", "dp_replicate"):
                    plan = plan_of(family, run, **{axis: ranks})
                    _, found = generated(apply(build_model(plan), plan), ids[own], mask[own], written[own])
                    count = (found != expected[own]).sum()
                    torch.distributed.all_reduce(count)
                    different.append(count.item())
                if rank == 0:
                    print(f"{family + ' ' + dtype + ' ' + mode:<28}" + "".join(f"{count:>15}" for count in different))


def generated(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, forced: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts, and the log-probabilities of their new tokens in generation; `forced` are the texts to write."""
    options = dict(OPTIONS)
    if forced is not None:
        new = forced.shape[1] - OPTIONS["max_new_tokens"]

        def only(row: int, text: torch.Tensor) -> list[int]:
            return [int(forced[row, new + len(text) - ids.shape[1]])]

        options["prefix_allowed_tokens_fn"] = only
    with generating(model) as generation:
        texts = model.generate(ids, attention_mask=mask, **options)
    return texts, generation.log_probabilities


def price(rounds: int) -> None:
    """Measure what exact takes, over plain, on each rank alone."""
    for family, dtype in itertools.product(("Llama", "Mixtral"), ("float32", "bfloat16")):
        models = {mode: build_model(plan_of(family, {"dtype": dtype})) for mode in ("plain", "exact")}
        make_exact(models["exact"])

        def generation(model: torch.nn.Module, rows: int) -> Callable[[], object]:
            ids = torch.randint(1, SIZES["vocab_size"], (rows, 16), generator=torch.Generator().manual_seed(0))

            def run() -> object:
                with generating(model):
                    return model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)

            return run

        def step(model: torch.nn.Module, tokens: int) -> Callable[[], None]:
            ids = torch.randint(1, SIZES["vocab_size"], (4, tokens), generator=torch.Generator().manual_seed(0))

            def run() -> None:
                model(ids, labels=ids).loss.backward()
                model.zero_grad()

            return run

        for rows in (4, 16):
            title = f"{family}, {dtype}: generation of {rows} x {OPTIONS['max_new_tokens']} tokens"
            measure({mode: generation(model, rows) for mode, model in models.items()}, rounds, CPU, title)
        for tokens in (64, 256):
            title = f"{family}, {dtype}: forward and backward of 4 x {tokens} tokens"
            measure({mode: step(model, tokens) for mode, model in models.items()}, rounds, CPU, title)


def times(rounds: int, device: torch.device) -> None:
    """Measure generation and log-probabilities under plans."""
    ranks = get_platform().groups.size()
    ids = torch.randint(SIZES["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    whole = build_model(plan_of(), device=device).eval()
    plans = (plan_of(dp_shard=ranks), plan_of(tp=ranks), plan_of(pp=ranks))
    fsdp, tp, pp = (apply(build_model(plan, device=device), plan).eval() for plan in plans)

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
        "pp, generating": generation(pp),
    }
    measure(runs, rounds, device, f"Generation, {ranks} ranks, {device}: 4 x {OPTIONS['max_new_tokens']} tokens")
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
    measure(runs, rounds, device, f"Log-probabilities and gradients, {ranks} ranks, {device}: 4 x 64 tokens")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("time", "bits", "price"), default=["time"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu, cuda or npu; default cpu")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model, a multiple of 64 (default: 256)")
    parser.add_argument("--tokens", type=int, default=32, help="that each text gets (default: 32)")
    arguments = parser.parse_args()
    OPTIONS["max_new_tokens"], hidden = arguments.tokens, arguments.hidden
    SIZES.update(hidden_size=hidden, intermediate_size=hidden * 11 // 4, head_dim=hidden // 8)
    torch.set_num_threads(1)
    hp_platform.init_process_group()
    if "time" in arguments.parts:
        times(arguments.rounds, torch.device(arguments.device))
    if "bits" in arguments.parts:
        bits()
    if "price" in arguments.parts:
        price(arguments.rounds)
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main()
