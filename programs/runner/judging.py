"""Runs a program once and judges it: how it ended, and what it reported, against one process."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runner.catalogue import Launch, Program
from runner.launching import start

Reports = tuple[dict[int, float], dict[str, np.ndarray]]


@dataclass
class Outcome:
    """What one run of a program was: right where there are no faults.

    Attributes:
        program: its name.
        run: which of its runs, from 1; 0 is the one that runs alone.
        faults: what was wrong, in sentences.
        output: the ranks' output, of a run with faults.
        loss: the greatest difference of a loss, relative to the greater of 1 and the loss.
        weight: the same of a weight.
        cpu: CPU seconds of all its processes.
        seconds: by the clock.
    """

    program: str
    run: int
    faults: list[str] = field(default_factory=list)
    output: str = ""
    loss: float = 0.0
    weight: float = 0.0
    cpu: float = 0.0
    seconds: float = 0.0


def run_program(
    program: Program, folder: Path, *, run: int = 1, python: str = sys.executable, limit: float = 900.0,
    truth: Reports | None = None,
) -> tuple[Outcome, Reports]:  # fmt: skip
    """Run a program once, and judge it.

    Args:
        program: it.
        folder: an empty folder, where it runs.
        run: the run's number; 0 runs it alone, for its reports.
        python: the interpreter with its framework.
        limit: seconds for each start.
        truth: the reports of the program that ran alone.

    Returns:
        What was found, and the run's reports.
    """
    outcome, began = Outcome(program.name, run), time.monotonic()
    losses: dict[int, float] = {}
    weights: dict[str, np.ndarray] = {}
    for index, launch in enumerate(program.launches if run else (Launch(ranks=0),)):
        reports = folder / f"reports-{index}"
        reports.mkdir(parents=True)
        ended = start(program, launch, folder, reports, python=python, limit=limit)
        outcome.cpu += ended.seconds
        outcome.output += ended.output
        if ended.exit is None:
            outcome.faults.append(f"it hung for {limit:.0f} s on {launch.ranks} ranks")
        elif ended.exit != launch.exit:
            outcome.faults.append(
                f"exit status {ended.exit}, expected {launch.exit}; ranks that failed: {ended.failed}"
            )
        for rank, code in launch.failed:
            if ended.failed.get(rank) != code:
                outcome.faults.append(f"rank {rank} should end with {code}; ranks that failed: {ended.failed}")
        if launch.error and launch.error not in ended.output:
            outcome.faults.append(f"nobody said {launch.error!r}")
        outcome.faults += [f"a process was left: {command}" for command in ended.left]
        if program.reports:
            outcome.faults += _read(program, reports, losses, weights)
    outcome.faults += _compare(program, outcome, (losses, weights), truth) if run and truth else []
    outcome.seconds = time.monotonic() - began
    return outcome, (losses, weights)


def _read(program: Program, folder: Path, losses: dict[int, float], weights: dict[str, np.ndarray]) -> list[str]:
    """Add a start's reports to those of the starts before; return the faults in them."""
    faults, by_step = [], {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        sizes = [line["bytes"] for line in lines[1:]]
        if program.constant and sizes and max(sizes) > sizes[0]:
            faults.append(f"{path.stem}: live bytes of the steps from the second on: {sizes}")
        for line in lines:
            by_step.setdefault(line["step"], []).append(line["loss"])
    for step, values in by_step.items():
        losses[step] = sum(values) if program.losses == "sum" else sum(values) / len(values)
    for path in sorted(folder.glob("weights-*.npz")):
        for name, value in np.load(path).items():
            if name in weights and not np.array_equal(weights[name], value):
                faults.append(f"{path.stem}: {name} differs from another rank's")
            weights[name] = value
    return faults


def _compare(program: Program, outcome: Outcome, got: Reports, truth: Reports) -> list[str]:
    faults = []
    (losses, weights), (expected, full) = got, truth
    if sorted(losses) != sorted(expected):
        faults.append(f"losses of the steps {sorted(losses)}, expected {sorted(expected)}")
    if sorted(weights) != sorted(full):
        faults.append(f"weights {sorted(set(weights) ^ set(full))} are on one side only")
    for step in sorted(losses.keys() & expected.keys()):
        apart = abs(losses[step] - expected[step]) / max(1.0, abs(expected[step]))
        outcome.loss = max(outcome.loss, apart)
        if not apart <= program.tolerance:
            faults.append(f"loss {losses[step]!r} in step {step}, of one process {expected[step]!r}: {apart:.1e} apart")
    for name in sorted(weights.keys() & full.keys()):
        if weights[name].shape != full[name].shape:
            faults.append(f"{name} has the shape {weights[name].shape}, of one process {full[name].shape}")
            continue
        apart = np.max(np.abs(weights[name] - full[name]) / np.maximum(1.0, np.abs(full[name])), initial=0.0)
        outcome.weight = max(outcome.weight, float(apart))
        if not apart <= program.tolerance:
            faults.append(f"{name} is {apart:.1e} from that of one process")
    return faults


def run_alone(program: Program, folder: Path, python: str, limit: float) -> tuple[Outcome, Reports]:
    """Run a program by itself: the truth of its runs on ranks."""
    outcome, reports = run_program(program, folder, run=0, python=python, limit=limit)
    if not outcome.faults and not reports[0]:
        outcome.faults.append("it reports no step")
    return outcome, reports
