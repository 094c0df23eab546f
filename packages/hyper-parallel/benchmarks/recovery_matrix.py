"""Faults at every moment of runs with `train --recover`: they go on in the same processes, and end with the same bits.

python packages/hyper-parallel/benchmarks/recovery_matrix.py [--injections 100] [--launchers 1] [--seed 0] [--plans]

A rank is killed, ends by `os._exit`, raises, loops in Python, or stays in C with the interpreter; in the data, the
forward, a collective, the backward, before and in the optimizer's update, while a step is copied, in a save, while one
is written, and while the run evaluates. Fails where a run does not end well, another rank is named than the one with
the fault, its final weights or moments have other bits than those of the run without a fault, its metrics are others,
or a step was trained on other samples. `--plans` goes through the plans (fsdp, hsdp, tp, pp, ep, cp, Muon, AdamW of
eight bits, states and weights on the host) with a kill each, in place of the moments.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from injections import Fault, Launcher, side_by_side, started

from hp_checkpoint.extend import diff
from hp_plan import ParallelPlan

STEPS, BATCH = 8, 12
HOWS = ("kill", "exit", "raise", "loop", "keep")
MOMENTS = (
    *("data", "forward", "collective", "backward", "before the update", "optimizer", "copy"),
    *("save", "writing", "evaluation"),
)
MESHES = ({"dp_shard": 3}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 3}, {"dp_shard": 2, "pp": 2})
DRAWN = {
    "config": "Qwen3Config",
    "overrides": {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
    },
}
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # matrices of 4096 elements and more, whose states are coded
PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"dp_shard": 3}},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "drawn": {"mesh": {"dp_shard": 2}, "model": DRAWN, "objective": {"function": "injected:killing_loss"}},
    "ep": {
        "mesh": {"dp_shard": 2, "ep": 2},
        "model": {"function": "injected:model", "overrides": {"experts": True}},
        "styles": {"model.layers.*.mlp.experts": "expert_parallel"},
    },
    "cp": {"mesh": {"cp": 2}},
    "muon": {"mesh": {"dp_shard": 2}, "optimizer": {"name": "muon", "lr": 0.01}},
    "eight bits": {
        "mesh": {"dp_shard": 2},
        "model": {"function": "injected:model", "overrides": WIDE},
        "optimizer": {"name": "adamw8bit", "lr": 0.01},
    },
    "states on the host": {"mesh": {"dp_shard": 2}, "optimizer": {"lr": 0.01, "swap_slices": 2}},
    "weights on the host": {"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers.*"], "offload": True}},
    "all replaced": {"mesh": {"dp_shard": 2}, "recovery": {"replace": "all"}},
}


def plan_of(data: Path, *, mesh: dict[str, int], **changed: Any) -> str:
    """Return a plan that saves every third step, as TOML.

    Args:
        data: a text.
        mesh: the axes.
        **changed: sections that are others.
    """
    sharded = {"dp_shard", "dp_replicate"} & set(mesh)
    tables: dict[str, Any] = {
        "model": {"function": "injected:model"},
        "mesh": mesh,
        "styles": "auto" if "tp" in mesh else {},
        "fsdp": {"groups": ["model.layers.*"]} if sharded else {},
        "optimizer": {"lr": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "data": {"sequence_length": 16, "batch_size": BATCH, "paths": [str(data)]},
        "run": {"steps": STEPS, "checkpoint_every": 3, "grad_clip": 1.0, "stop_within": 10.0, "hang_after": 8.0},
        "recovery": {"limit": 100, "wait_for_spare": 120.0},  # on a busy machine, too
    }
    for name, section in changed.items():
        tables[name] = {**tables["recovery"], **section} if name == "recovery" else section
    return ParallelPlan.from_dict(tables).to_toml()


def metrics_of(folder: Path) -> list[tuple[float | None, ...]]:
    """Return what a run wrote of each step, but for times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [tuple(map(line.get, ("step", "loss", "grad_norm", "lr", "validation_loss"))) for line in lines]


def samples_of(folder: Path, run: str) -> dict[int, set[tuple[int, ...]]]:
    """Return what each sample held, wherever and how often a rank was given it."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for file in folder.glob(f"{run}-samples-*.jsonl"):
        for first, digests in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            for number, digest in enumerate(digests, first):
                found.setdefault(number, set()).add(digest)
    return found


class Truth:
    """Undisturbed runs of plans, each made once by a launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._made: dict[str, str] = {}

    def of(self, plan: str) -> str:
        """Return the run of a plan.

        Raises:
            RuntimeError: it failed.
        """
        if plan not in self._made:
            run = f"truth{len(self._made)}"
            ended = self._launcher.train(plan, run, log=True)
            if ended.status:
                raise RuntimeError(f"{run}: {ended.err[-3000:]}")
            self._made[plan] = run
        return self._made[plan]


def differences(folder: Path, run: str, truth: str) -> str:
    """Return what of a run differs from the undisturbed one, "" if nothing does."""
    one, other = (next((folder / each / "checkpoints").glob(f"step-*{STEPS}")) for each in (run, truth))
    unequal = [each for each in diff(one, other) if each.name.startswith(("model", "optimizer", "state"))]
    if unequal:
        return f"{len(unequal)} tensors differ, as {unequal[0]}"
    if metrics_of(folder / run) != metrics_of(folder / truth):
        return f"metrics {metrics_of(folder / run)} in place of {metrics_of(folder / truth)}"
    return "" if samples_of(folder, run) == samples_of(folder, truth) else "other samples"


def problem(launcher: Launcher, run: str, truth: str, fault: Fault, out: Any) -> str:
    """Return what is wrong with a run that had a fault, "" if nothing is."""
    if not launcher.mark(run).exists():
        return f"the fault did not come: {out.err[-2000:]}"
    if out.status:
        return f"exit status {out.status}: {out.err[-3000:]}"
    named = re.search(r"note: ranks? ([\d, ]+) failed", out.err)
    if named is None or str(fault.rank) not in named[1].split(", "):
        return f"rank {named and named[1]} is named: {out.err[-3000:]}"
    return differences(launcher.folder, run, truth)


def seconds_of(text: str) -> float:
    """Return the seconds from the notice of a fault to the model of the next epoch."""
    found = re.search(r"recovered in ([\d.]+) s", text)
    return float(found[1]) if found else float("nan")


def cases(arguments: argparse.Namespace, data: Path) -> list[tuple[str, str, Fault]]:
    """Return a name, a plan and a fault for each injection."""
    if arguments.plans:
        chosen = {name: values for name, values in PLANS.items() if not arguments.only or arguments.only in name}
        return [
            (name, plan_of(data, **values), Fault(1, "collective", "kill", 5, 2)) for name, values in chosen.items()
        ]
    found = []
    for number in range(arguments.injections):
        numbers = random.Random(arguments.seed * 1_000_003 + number)
        how, moment = HOWS[number % len(HOWS)], MOMENTS[number // len(HOWS) % len(MOMENTS)]
        mesh = MESHES[number % len(MESHES)] if not arguments.only else {"dp_shard": 3}
        # A first stage's backward is called by a name that no fault is put into, and stages do not evaluate.
        if moment in ("backward", "evaluation") and "pp" in mesh:
            mesh = MESHES[0]
        changed = {"validation": {"paths": [str(data)], "every": 2, "batches": 2}} if moment == "evaluation" else {}
        ranks = 1
        for size in mesh.values():
            ranks *= size
        fault = Fault(numbers.randrange(ranks), moment, how, numbers.randrange(2, 6), numbers.randrange(6))
        found.append(
            (f"{how} of rank {fault.rank} in {moment} of step {fault.step}", plan_of(data, mesh=mesh, **changed), fault)
        )
    return found


def main() -> int:
    """Inject faults, and print what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=100)
    parser.add_argument("--launchers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--only", default="", help="of --plans; else all faults are on one mesh")
    arguments = parser.parse_args()
    wrong: list[str] = []
    seconds: list[float] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        data = place / "text"
        data.write_bytes(b"to be or not to be, that is the question. " * 60)
        left = iter(enumerate(cases(arguments, data)))

        def work(launcher: Launcher) -> None:
            truth = Truth(launcher)
            while True:
                with lock:
                    number, (what, plan, fault) = next(left, (-1, ("", "", Fault(0, "", "", 0))))
                if number < 0:
                    return
                run = f"run{number}"
                try:
                    whole = truth.of(plan)
                    out = launcher.train(plan, run, "--recover", fault=fault, log=True)
                    text, took = problem(launcher, run, whole, fault, out), seconds_of(out.err)
                except (TimeoutError, RuntimeError, StopIteration) as error:
                    text, took = f"{type(error).__name__}: {error}", float("nan")
                with lock:
                    seconds.append(took)
                    wrong.extend([f"{number}"] if text else [])
                    print(f"{'FAULT ' if text else ''}{number}: {what}: {took:.2f} s{text and f'; {text}'}", flush=True)
                shutil.rmtree(launcher.folder / run, ignore_errors=True)

        with started(place, arguments.launchers) as launchers:
            side_by_side(work, launchers)
    known = sorted(each for each in seconds if each == each)
    middle = known[len(known) // 2] if known else float("nan")
    print(
        f"{len(seconds)} injections, {len(wrong)} wrong {', '.join(wrong)}; from the notice to the model: median"
        f" {middle:.2f} s"
    )
    return 1 if wrong or not seconds else 0


if __name__ == "__main__":
    sys.exit(main())
