"""A plan against loops on FSDP2 that do the same: a small Llama on two ranks of this machine's CPUs, tokens a second.

The loops are written plainly: `fsdp2_loop.py` by PyTorch's tutorial, and the same with accelerate. They shard the same
blocks, train on the same text with the same optimizer, clip gradients, and read loss and norm in each step; a rank has
one thread. Programs take turns, and the figure is the median step of all turns but for the first steps of each. Lines
are those that a user writes and keeps: of the plan's file, and of the loop without blank lines and docstrings.

python packages/hyper-parallel/benchmarks/bench_loops.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MODEL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
LENGTH, BATCH, FIRST = 256, 4, 3
PLAN = """[model]
config = "LlamaConfig"
overrides = {overrides}
[mesh]
dp_shard = 2
[data]
paths = ["{text}"]
sequence_length = {length}
batch_size = {batch}
[run]
steps = {steps}
grad_clip = 1.0
"""
LOOPS = ("fsdp2", "accelerate")


def main(rounds: int, steps: int) -> None:
    """Print each program's tokens a second and lines, and the plan's as a multiple of the others'."""
    programs = ["plan", *LOOPS]
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate is not installed, so its loop is left out")
        programs.remove("accelerate")
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        text.write_bytes(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))))
        for turn in range(rounds):
            for program in programs:
                lines = _run(program, folder / f"{program}-{turn}", text, steps)
                times[program] += [line["seconds"] for line in lines[FIRST:]]
                losses[program] = [line["loss"] for line in lines]
        plan = PLAN.format(overrides=_inline(MODEL), text="text", length=LENGTH, batch=BATCH, steps=steps)
        written = {name: _lines(f"{name}_loop.py") for name in LOOPS} | {"plan": sum(map(bool, plan.splitlines()))}
    speed = {name: LENGTH * BATCH / statistics.median(times[name]) for name in programs}
    for name in programs:
        ratio = "" if name == "plan" else f", {speed['plan'] / speed[name]:.2f} times as fast with a plan"
        ends = f"loss from {losses[name][0]:.2f} to {min(losses[name]):.2f}"  # samples are drawn in other orders
        print(f"{name}: {speed[name]:,.0f} tokens/s, {written[name]} lines, {ends}{ratio}")


def _run(program: str, out: Path, text: Path, steps: int) -> list[dict[str, float]]:
    """Run one of the programs, and return its metrics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYPER_PARALLEL_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    if program == "plan":
        plan = out.with_suffix(".toml")
        plan.write_text(
            PLAN.format(overrides=_inline(MODEL), text=text, length=LENGTH, batch=BATCH, steps=steps), encoding="utf-8"
        )
        command = ["-m", "hyper_parallel", "train", str(plan), "--out", str(out), "--json"]
        metrics = out / "metrics.jsonl"
    else:
        settings = {"model": MODEL, "sequence_length": LENGTH, "batch_size": BATCH, "steps": steps}
        loop = str(HERE / f"{program}_loop.py")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, loop, str(text), json.dumps(settings), str(out)]
        metrics = out
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def _inline(table: dict[str, int]) -> str:
    return "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"


def _lines(name: str) -> int:
    """Count a program's lines without blank ones and its docstring."""
    text = (HERE / name).read_text(encoding="utf-8")
    documented = ast.get_docstring(ast.parse(text), clean=False) or ""
    return sum(bool(line.strip()) for line in text.splitlines()) - len(documented.splitlines())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    main(options.rounds, options.steps)
