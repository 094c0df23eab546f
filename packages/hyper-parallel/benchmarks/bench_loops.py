"""A plan against loops on FSDP2 that do the same: a small Llama on two ranks of this machine's CPUs, tokens a second.

The loops are written plainly: `fsdp2_loop.py` by PyTorch's tutorial, and one with accelerate. They train on the same
text with the same optimizer, clip gradients, and read loss and norm in each step; a rank has one thread. On CPUs
accelerate leaves its plugin of FSDP2 aside without a word and replicates the model, so it is compared with a plan that
replicates it. `alone_loop.py` computes as much on each rank and communicates nothing: no library that shards is faster.
Programs take turns, and the figure is the median step of all turns but for the first steps of each. Lines are those
that a user writes and keeps: of the plan's file, and of the loop without blank lines and docstrings.

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

from hp_testing import note_figure

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
{axis} = 2
[data]
paths = ["{text}"]
sequence_length = {length}
batch_size = {batch}
[run]
steps = {steps}
grad_clip = 1.0
"""
PLANS = {"plan": "dp_shard", "replicating plan": "dp_replicate"}
LOOPS = {"fsdp2": "plan", "accelerate": "replicating plan", "alone": "plan"}  # each with what it is compared with


def main(rounds: int, steps: int) -> None:
    """Print each program's tokens a second and lines, and the plan's as a multiple of the others'."""
    programs = [*PLANS, *LOOPS]
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
                metrics = _run(program, folder / f"{program}-{turn}", text, steps)
                times[program] += [each["seconds"] for each in metrics[FIRST:]]
                losses[program] = [each["loss"] for each in metrics]
        lines = {name: _lines(f"{name}_loop.py") for name in LOOPS if name in programs}
        lines |= {name: sum(map(bool, _plan(name, text, steps).splitlines())) for name in PLANS}
    speed = {name: LENGTH * BATCH / statistics.median(times[name]) for name in programs}
    for name in programs:
        peer = LOOPS.get(name)
        ratio = "" if peer is None else f", {speed[peer] / speed[name]:.2f} times as fast with a {peer}"
        if peer is not None:
            note_figure("seconds a token of a plan", f"over the loop {name!r}", speed[name] / speed[peer])
        ends = f"loss from {losses[name][0]:.2f} to {min(losses[name]):.2f}"  # samples are drawn in other orders
        print(f"{name}: {speed[name]:,.0f} tokens/s, {lines[name]} lines, {ends}{ratio}")


def _run(program: str, out: Path, text: Path, steps: int) -> list[dict[str, float]]:
    """Run one of the programs, and return its metrics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYPER_PARALLEL_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    if program in PLANS:
        plan = out.with_suffix(".toml")
        plan.write_text(_plan(program, text, steps), encoding="utf-8")
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


def _plan(name: str, text: Path, steps: int) -> str:
    return PLAN.format(overrides=_inline(MODEL), axis=PLANS[name], text=text, length=LENGTH, batch=BATCH, steps=steps)


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
