"""The figures that are far from their bar, each measured in turns with its peer; those worse than before by name.

    nox -s bench -- summary [PART ...]

It runs the benchmarks that have them, quickly, and adds what commands cost. "before" is what `--keep` wrote last to
summary.json beside this program; a figure is worse if it is over 1.03 times that. Two runs on a shared machine differ
by more, so a worse figure is one to look at again, and nothing fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hp_testing.figures import FIGURES, read_figures

ROOT = Path(__file__).parents[3]
KEPT = Path(__file__).with_name("summary.json")
PLAN = ROOT / "examples" / "qwen3_fsdp_tp.toml"
WORSE = 1.03
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(frozen=True)
class Figure:
    """A figure of the summary.

    Attributes:
        name: what it is.
        table: title of the benchmark's table, or how it begins.
        row: its row in that table.
        bar: at most this.
        peer: what ours is divided by; empty: nothing, it has a unit of its own.
    """

    name: str
    table: str
    row: str
    bar: float
    peer: str = "torch"


def _fsdp(hidden: int, row: str, bar: float, peer: str = "FSDP2", *, what: str = "") -> Figure:
    return Figure(
        f"fully_shard, hidden {hidden}: {what or row}", f"2 gloo ranks, 12 layers, hidden {hidden}", row, bar, peer
    )


_FORWARD, _BACKWARD = (f"Overhead an operation, microseconds: forward{rest}" for rest in (", grad", " and"))
PARTS: dict[str, tuple[list[str], list[Figure]]] = {
    "dtensor": (
        ["packages/hp-dtensor/benchmarks/bench_dtensor.py", "--rounds", "6"],
        [
            *(
                Figure(f"DTensor forward, overhead: {name}", _FORWARD, name, bar)
                for name, bar in {
                    **dict.fromkeys(("embedding", "mean", "layer_norm", "silu", "cat"), 0.25),
                    "geometric mean": 0.15,
                }.items()
            ),
            *(Figure(f"the same with backward: {name}", _BACKWARD, name, 0.3) for name in ("layer_norm", "embedding")),
            Figure("tensor-parallel transformer", "transformer", "over Megatron by hand", 1.1, "Megatron by hand"),
        ],
    ),
    "fsdp": (
        ["packages/hp-fsdp/benchmarks/bench_fsdp.py", "--parts", "steps", "memory", "--repeats", "5"],
        [
            figure
            for hidden, step, memory in ((256, 0.5, 0.7), (512, 0.6, 0.7))
            for figure in (
                _fsdp(hidden, "forward + backward, over raw", 1.0, "compute and raw collectives"),
                _fsdp(hidden, "step with AdamW, over raw", 1.0, "compute and raw collectives"),
                _fsdp(hidden, "step with AdamW", step),
                _fsdp(hidden, "wrapping", 0.5),
                Figure(
                    f"fully_shard, hidden {hidden}: peak memory",
                    f"peak resident memory of a rank, 2 gloo ranks, hidden {hidden}",
                    "step",
                    memory,
                    "FSDP2",
                ),
            )
        ],
    ),
    "pipeline": (
        ["packages/hp-pipeline/benchmarks/bench_pipeline.py"],
        [
            Figure(f"pipeline, host time an action: {name}", "host time an action over torch's", name, 0.6)
            for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBV")
        ],
    ),
    "checkpoint": (
        ["packages/hp-checkpoint/benchmarks/bench_checkpoint.py"],
        [
            Figure(f"checkpoint: {name}", "CPU over DCP's", name, bar, "DCP")
            for name, bar in {
                "save: ours, with fsync and checksums": 0.6,
                "save Shard(1): ours": 0.7,
                "save Shard(1): ours, a file each": 0.5,
                "load: ours": 0.5,
                "load as Shard(1): ours": 0.5,
            }.items()
        ],
    ),
    "optim": (
        ["packages/hp-optim/benchmarks/bench_optim.py", "--parts", "process", "adamw", "--repeats", "9"],
        [
            Figure("AdamW, 200 small matrices", "AdamW, 200 parameters of 64", "torch fused, flat", 1.1, "torch, flat"),
            *(
                Figure(f"Muon, one process, {dtype}", f"{_ONE} {dtype}", "torch.optim.Muon, bfloat16", bar)
                for dtype, bar in (("float32", 0.9), ("bfloat16", 0.8))
                for _ONE in ("one process, 12 matrices of 128 x 128 and 8 of 128 x 512; ratios of ours in",)
            ),
        ],
    ),
    "offload": (
        ["packages/hp-offload/benchmarks/bench_offload.py", "--repeats", "20"],
        [
            Figure(
                f"selective recomputation, extra, {what}", "hidden 32, first decile", f"extra over full, {what}", 0.2
            )
            for what in ("products", "and attention")
        ],
    ),
    "trainer": (
        ["packages/hyper-parallel/benchmarks/bench_loops.py", "--rounds", "3", "--steps", "20"],
        [
            Figure("trainer, seconds a token", "seconds a token of a plan", f"over the loop '{name}'", bar, peer)
            for name, bar, peer in (
                ("alone", 1.11, "a loop that communicates nothing"),
                ("fsdp2", 1.0, "a loop on FSDP2"),
            )
        ],
    ),
    "commands": (
        [],
        [
            Figure("lint of a right plan, seconds of CPU", "commands", "lint", 1.5, ""),
            Figure("refusal of a plan wrong by its numbers, seconds of CPU", "commands", "refusal", 1.5, ""),
            Figure("importing torch and the model's code alone, seconds of CPU", "commands", "imports", 1.5, ""),
            Figure("first step of the demo, all four ranks, seconds of CPU", "commands", "first step", 20.0, ""),
            Figure("resident memory of a rank of the demo, MiB", "commands", "resident", 407.0, ""),
        ],
    ),
}


def commands() -> Iterator[tuple[str, float]]:
    """Measure what commands cost: (row, value)."""
    text = PLAN.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        wrong = Path(name) / "wrong.toml"
        wrong.write_text(re.sub(r"(?m)^steps = .*", "steps = 5", text), encoding="utf-8")  # fewer than its warm-up has
        program, out = [sys.executable, "-m", "hyper_parallel"], str(Path(name) / "run")
        yield "lint", _processor_seconds([*program, "lint", str(PLAN)])
        yield "refusal", _processor_seconds([*program, "train", str(wrong)])
        yield (
            "imports",
            _processor_seconds([sys.executable, "-c", "import transformers; transformers.Qwen3ForCausalLM"]),
        )
        yield "first step", _processor_seconds([*program, "train", str(PLAN), "--out", out, "--until", "1"])
        metrics = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        yield "resident", json.loads(metrics[-1])["peak_memory"] / 2**20


def _processor_seconds(command: list[str]) -> float:
    """Run a command and return the CPU seconds of it and of all that it started."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # whoever outlives its parent is ours to wait for, and counts

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run(command, capture_output=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return spent() - before


def measure(part: str) -> dict[tuple[str, str], float]:
    """Run the program of a part, and return its figures."""
    command = PARTS[part][0]
    if not command:
        return {("commands", row): value for row, value in commands()}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "figures"
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, FIGURES: str(path)}, capture_output=True, text=True
        )
        if done.returncode:
            print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return read_figures(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--keep", action="store_true", help="write these figures as those before")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {unknown.pop()!r}; there are {', '.join(PARTS)}")
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    now, worse = dict(before), []
    print(f"{'figure':66}{'now':>8}{'bar':>7}{'before':>8}  over")
    for part in arguments.parts or PARTS:
        found = measure(part)
        for figure in PARTS[part][1]:
            value = next(
                (v for (table, row), v in found.items() if row == figure.row and table.startswith(figure.table)), None
            )
            last = before.get(figure.name + figure.row)
            shown = f"{value:8.2f}" if value is not None else f"{'none':>8}"
            print(
                f"{figure.name:66}{shown}{figure.bar:7.2f}{'' if last is None else f'{last:8.2f}':>8}  {figure.peer}",
                flush=True,
            )
            if value is not None:
                now[figure.name + figure.row] = round(value, 4)
                worse += [figure.name] if last is not None and value > WORSE * last else []
    print("worse than before: " + ("; ".join(worse) if worse else "none"))
    if arguments.keep:
        KEPT.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
