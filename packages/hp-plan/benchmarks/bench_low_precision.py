"""Products in eight bits against bfloat16: the loss after 300 steps, and the seconds of a step and of a product.

The model of docs/how-to/fit.md learns bytes of the interpreter's sources under a plan for one rank, once in bfloat16
and once with each format of `[precision]`, with the same weights and samples. On a CPU the arithmetic is right and the
times mean nothing. Formats that the device has no product of are emulated, and say so.

python packages/hp-plan/benchmarks/bench_low_precision.py [--device cuda] [--steps 300] [--size 4096]
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch

import hp_platform
from hp_plan import ParallelPlan, apply, build_model, lint

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
MODEL = {"config": "LlamaConfig", "overrides": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}}
FORMATS = ("bfloat16", "float8-tensorwise", "float8-rowwise", "mxfp8")
LENGTH, BATCH, BAR = 64, 8, 0.01


def plan_of(form: str) -> tuple[ParallelPlan, bool]:
    """The plan of a format, and whether it is emulated on this device."""
    fsdp = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    tables = {"model": MODEL, "data": {"sequence_length": LENGTH, "batch_size": BATCH}, "fsdp": fsdp}
    if form == "bfloat16":
        return ParallelPlan.from_dict(tables), False
    plan = ParallelPlan.from_dict({**tables, "precision": {"linear": form}})
    if not lint(plan):
        return plan, False
    return ParallelPlan.from_dict({**tables, "precision": {"linear": form, "kernels": "emulated"}}), True


def corpus() -> torch.Tensor:
    """Bytes of the interpreter's own sources, the first million."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:1_000_000]), dtype=torch.uint8)


def train(plan: ParallelPlan, steps: int, device: str) -> tuple[float, float]:
    """The mean loss of the last twentieth of the steps, and the median seconds of a step."""
    torch.manual_seed(0)
    model = build_model(plan).to(device)
    model = apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, generator, losses, seconds = corpus(), torch.Generator().manual_seed(1), [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts]).long().to(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    last = losses[-max(1, steps // 20) :]
    return sum(last) / len(last), sorted(seconds)[len(seconds) // 2]


def product_seconds(form: str, size: int, device: str) -> float:
    """The median seconds of forward and backward of one layer of ``size`` features on as many tokens."""
    plan, _ = plan_of(form)
    sizes = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 2, "num_attention_heads": size // 64}
    overrides = {**MODEL["overrides"], **sizes, "num_key_value_heads": size // 64}
    plan = ParallelPlan.from_dict({**plan.to_dict(), "model": {**MODEL, "overrides": overrides}})
    model = apply(build_model(plan).to(device), plan)
    model.unshard()
    model.model.layers[0].unshard()
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(size, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        layer(x).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, default=0, help="of the layer whose product is timed; 0 times none")
    options = parser.parse_args()
    hp_platform.init_process_group()
    size = options.size or (4096 if options.device == "cuda" else 256)
    base = None
    for form in FORMATS:
        plan, emulated = plan_of(form)
        loss, seconds = train(plan, options.steps, options.device)
        base = loss if base is None else base
        product = product_seconds(form, size, options.device)
        within = abs(loss / base - 1)
        print(
            f"{form + (' (emulated)' if emulated else ''):32} loss {loss:.4f} after {options.steps} steps,"
            f" {within:.2%} from bfloat16 (bar {BAR:.0%}); {seconds * 1e3:.1f} ms a step,"
            f" {product * 1e3:.2f} ms forward and backward of a layer of {size} on {options.device}",
            flush=True,
        )
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main()
