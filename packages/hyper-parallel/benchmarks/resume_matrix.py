"""Runs that are stopped at random moments and go on in other layouts, against the same runs undisturbed.

python packages/hyper-parallel/benchmarks/resume_matrix.py [--minutes 10] [--launchers 2] [--seed 0] [--cases N]

Each case is stopped once or twice, by SIGTERM, SIGKILL or an exception, in the data, forward, a collective, backward,
around the optimizer's update, in a save or while a save is written, and goes on with `--resume auto` on 1 to 8 ranks.
Each step's loss is that of the undisturbed run: bit for bit in deterministic mode, on any number of data parallel
ranks, else to 1e-6. Each global sample is trained on once, and holds what it held; over two epochs of windows each
window is trained on twice. Fails where one of that is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from injections import Fault, Launcher, side_by_side, started

from hp_plan import ParallelPlan
from hyper_parallel.data import write_tokens

STEPS, BATCH, LENGTH = 8, 24, 16
KINDS = ("text", "mixed", "packed", "both")
PARALLEL = ({}, {"dp_shard": 2}, {"dp_replicate": 3}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2})
OTHERS = ({"tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2}, {"dp_shard": 2, "pp": 2}, {"dp_shard": 4, "tp": 2})
MOMENTS = ("data", "forward", "collective", "backward", "before the update", "optimizer", "save", "writing")
HOWS = ("sigterm", "kill", "raise")
TOLERANCE = 1e-6


def write_data(folder: Path) -> None:
    """Write a text of as many windows as an epoch has samples, and two token files of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    windows = STEPS * BATCH // 2
    (folder / "text").write_bytes(numbers.integers(32, 127, windows * LENGTH).astype(np.uint8).tobytes())
    for name, documents in (("a", 120), ("b", 60)):
        lengths = numbers.integers(2, 30, documents)
        write_tokens(folder / name, [numbers.integers(0, 256, length).tolist() for length in lengths], vocabulary=256)


def plan_of(kind: str, mesh: dict[str, int], data: Path, *, deterministic: bool) -> str:
    """Return a plan, as TOML.

    Args:
        kind: of the data.
        mesh: the axes.
        data: the folder of the data.
        deterministic: twelve micro-batches, divided over any number of data parallel ranks.
    """
    parallel = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    paths = ["text"] if kind == "text" else ["a.bin"] if kind == "packed" else ["a.bin", "b.bin"]
    section: dict[str, Any] = {"paths": [str(data / path) for path in paths], "packing": kind in ("packed", "both")}
    if len(paths) > 1:
        section["weights"] = [2.0, 1.0]
    run: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 3, "grad_clip": 1.0, "stop_within": 20.0}
    run |= {"deterministic": True, "accumulate": 12 // parallel} if deterministic else {"dtype": "float64"}
    tables: dict[str, Any] = {
        "model": {"function": "injected:model"},
        "mesh": mesh,
        "optimizer": {"lr": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "data": {"sequence_length": LENGTH, "batch_size": BATCH, **section},
        "run": run,
    }
    if parallel > 1:
        tables["fsdp"] = {"groups": ["model.layers.*"]}
    if "tp" in mesh:
        tables["styles"] = "auto"
    return ParallelPlan.from_dict(tables).to_toml()


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of each step that a run has written down."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


class Samples:
    """The global samples that a run was given, in the order of its processes, and what each held."""

    def __init__(self, folder: Path, run: str) -> None:
        self._files, self._read = (folder, f"{run}-samples-*.jsonl"), Counter[Path]()
        self.held: dict[int, int] = {}

    def new(self) -> dict[int, int]:
        """Return those of the last process: number to digest.

        Raises:
            ValueError: ranks with the same sample had other tokens.
        """
        found: dict[int, int] = {}
        folder, pattern = self._files
        for file in folder.glob(pattern):
            lines = file.read_text(encoding="utf-8").splitlines()
            for line in lines[self._read[file] :]:
                first, digests = json.loads(line)
                for number, digest in enumerate(digests, first):
                    if found.setdefault(number, digest) != digest:
                        raise ValueError(f"sample {number} was not the same on all ranks")
            self._read[file] = len(lines)
        return found


class Case:
    """A run that is stopped and goes on, beside its undisturbed one.

    Args:
        launcher: that runs it.
        data: the folder of the data.
        numbers: what is chosen by.
        name: of the run.
        deterministic: the layouts are data parallel, and losses bit-equal.
    """

    def __init__(self, launcher: Launcher, data: Path, numbers: random.Random, name: str, deterministic: bool) -> None:
        self.launcher, self.data, self.name, self.deterministic = launcher, data, name, deterministic
        self.kind = numbers.choice(KINDS)
        layouts = PARALLEL if deterministic else PARALLEL + OTHERS
        if self.kind in ("packed", "both"):
            layouts = tuple(mesh for mesh in layouts if "pp" not in mesh)
        self.parts: list[tuple[dict[str, int], Fault | None]] = []
        for _ in range(numbers.choice((1, 1, 2))):
            mesh = numbers.choice(layouts)
            ranks = int(np.prod(list(mesh.values()) or [1]))
            fault = Fault(
                numbers.randrange(ranks),
                numbers.choice(MOMENTS),
                numbers.choice(HOWS),
                numbers.randrange(1, 5),
                numbers.randrange(12),
            )
            self.parts.append((mesh, fault))
        self.parts.append((numbers.choice(layouts), None))
        self.exact, self.stopped = True, 0

    def run(self, truth: dict[int, float], held: dict[int, int]) -> str:
        """Run all parts; return what is wrong, "" if nothing is.

        Args:
            truth: the losses of the undisturbed run.
            held: its samples.
        """
        samples, folder = Samples(self.launcher.folder, self.name), self.launcher.folder / self.name
        trained: dict[int, int] = {}
        for number, (mesh, fault) in enumerate(self.parts):
            plan = plan_of(self.kind, mesh, self.data, deterministic=self.deterministic)
            more = ("--resume", "auto") if number else ()
            ended = self.launcher.train(plan, self.name, *more, fault=fault, log=True)
            self.stopped += ended.status != 0
            if ended.status and fault is None:
                return f"failed: {ended.err[-1500:]}"
            if ended.status and not self.launcher.mark(self.name).exists():
                return f"ended before the fault: {ended.err[-1500:]}"
            new = samples.new()
            if ended.status:  # in the step that was not finished some ranks may have come to their samples
                new = {sample: digest for sample, digest in new.items() if _whole(sample // BATCH, new)}
            first = min(new, default=len(trained))
            if sorted(new) != list(range(first, first + len(new))) or first > max(trained, default=-1) + 1:
                return f"the samples of part {number} are {sorted(new)}"
            trained = {sample: digest for sample, digest in trained.items() if sample < first} | new
            if not ended.status:
                break
        if trained != held:
            return f"{len(trained)} samples, {sum(held.get(n) != d for n, d in trained.items())} with other tokens"
        got = losses_of(folder)
        lost = sorted(truth.keys() - got.keys())
        if STEPS in lost or len(lost) > len(self.parts):  # a run that fails doesn't read its last step's numbers
            return f"no losses of the steps {lost}"
        self.exact = all(truth[step] == loss for step, loss in got.items())
        tolerance = 0.0 if self.deterministic else TOLERANCE
        wrong = {step: (loss, truth[step]) for step, loss in got.items() if abs(loss - truth[step]) > tolerance}
        return f"losses differ: {wrong}" if wrong else ""

    def __str__(self) -> str:
        texts = []
        for mesh, fault in self.parts:
            what = "to the end" if fault is None else f"{fault.how} in {fault.moment} of step {fault.step}"
            texts.append(f"{' x '.join(f'{axis} {size}' for axis, size in mesh.items()) or '1 rank'}, {what}")
        return f"{'deterministic, ' if self.deterministic else ''}{self.kind}: {'; '.join(texts)}"


def _whole(step: int, samples: dict[int, int]) -> bool:
    return all(sample in samples for sample in range(step * BATCH, (step + 1) * BATCH))


class Truth:
    """Undisturbed runs on one rank, each made once."""

    def __init__(self, launcher: Launcher, data: Path) -> None:
        self._known: dict[tuple[str, bool], tuple[dict[int, float], dict[int, int]]] = {}
        for kind in KINDS:
            for deterministic in (False, True):
                run = f"whole-{kind}-{deterministic}"
                plan = plan_of(kind, {}, data, deterministic=deterministic)
                ended = launcher.train(plan, run, log=True)
                if ended.status:
                    raise RuntimeError(f"the undisturbed run failed: {ended.err}")
                held = Samples(launcher.folder, run).new()
                if sorted(held) != list(range(STEPS * BATCH)):
                    raise RuntimeError(f"{run} was given the samples {sorted(held)}")
                if kind == "text" and set(Counter(held.values()).values()) != {2}:
                    raise RuntimeError(f"{run} has not had each window once an epoch, over two")
                self._known[kind, deterministic] = losses_of(launcher.folder / run), held

    def of(self, case: Case) -> tuple[dict[int, float], dict[int, int]]:
        """Return the losses and the samples of a case's undisturbed run."""
        return self._known[case.kind, case.deterministic]


def main() -> int:
    """Print a line a case; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--launchers", type=int, default=2)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faults: list[str] = []
    done: Counter[str] = Counter()
    lock, numbers = threading.Lock(), iter(range(arguments.cases))
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        place = Path(name)
        write_data(place / "data")
        with started(place, arguments.launchers) as launchers:
            truth = Truth(launchers[0], place / "data")
            until = time.monotonic() + arguments.minutes * 60

            def work(launcher: Launcher) -> None:
                while time.monotonic() < until:
                    with lock:
                        number = next(numbers, None)
                    if number is None:
                        return
                    chosen = random.Random(arguments.seed * 1_000_003 + number)
                    case = Case(launcher, place / "data", chosen, f"case{number}", number % 2 == 0)
                    try:
                        wrong = case.run(*truth.of(case))
                    except (TimeoutError, RuntimeError, ValueError) as error:
                        wrong = f"{type(error).__name__}: {error}"
                    with lock:
                        done["cases"] += 1
                        done["stops"] += case.stopped
                        done["exact"] += case.exact and not wrong
                        for _, fault in case.parts[:-1]:
                            done[f"{fault.how}" if fault else ""] += 1
                        if wrong:
                            faults.append(f"case {number}")
                        print(f"{'FAULT ' if wrong else ''}case {number}: {case}{wrong and f': {wrong}'}", flush=True)
                    if wrong.startswith(("TimeoutError", "RuntimeError")):
                        return

            side_by_side(work, launchers)
    print(
        f"{done['cases']} cases with {done['stops']} stops ({', '.join(f'{how} {done[how]}' for how in HOWS)}),"
        f" {done['exact']} bit-equal, {len(faults)} faults {faults or ''}"
    )
    return 1 if faults or not done["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
