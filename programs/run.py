"""Runs the programs of this folder as their users would, each against one process in float64.

    python programs/run.py                              # each once, two at a time
    python programs/run.py --runs 5 --load 8            # five times, beside eight processes that compute
    python programs/run.py --only gan --only README     # those whose names have this in them
    python programs/run.py --list

A program is started by torchrun (or msrun), in a folder of its own, as a user starts it. What it has to do is in its
first lines: on how many ranks it runs, how it ends, what is killed meanwhile. It is right if the launcher and the ranks
end as said, its losses and weights are those of the same file started alone (`python programs/gan.py`), the bytes of
live tensors are the same in each step from the second on, with Python's collector off, and no process is left.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from runner.catalogue import ROOT, Program, programs
from runner.judging import Outcome, Reports, run_alone, run_program
from runner.launching import busy, end_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="programs with this in their name; may be repeated")
    parser.add_argument("--short", action="store_true", help="the few that each test run has")
    parser.add_argument("--runs", type=int, default=1, help="runs of each (1)")
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside them (0)")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (2)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds until a start counts as hanging (900)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after so many minutes")
    parser.add_argument(
        "--mindspore", metavar="PYTHON", help="an interpreter with MindSpore; without it its programs are left out"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each run")
    parser.add_argument("--list", action="store_true", help="name the programs, and run none")
    options = parser.parse_args(arguments)
    chosen = [each for each in programs() if each.short or not options.short]
    chosen = [each for each in chosen if not options.only or any(part in each.name for part in options.only)]
    pythons = {"torch": sys.executable, "mindspore": options.mindspore}
    left_out = [each.name for each in chosen if pythons[each.framework] is None]
    chosen = [each for each in chosen if pythons[each.framework] is not None]
    if options.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if not chosen:
        parser.error(f"no program is called so: {', '.join(options.only)}; --list names them")
    if importlib.util.find_spec("hp_platform") is None:
        sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
        os.environ["PYTHONPATH"] = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what has been started is ended, as on Ctrl-C
    with tempfile.TemporaryDirectory(prefix="programs-") as scratch, busy(options.load):
        outcomes = _run_all(chosen, Path(scratch), pythons, options)
    _summarize(outcomes, left_out, options)
    return 1 if any(each.faults for each in outcomes) else 0


def _run_all(chosen: list[Program], scratch: Path, pythons: dict, options: argparse.Namespace) -> list[Outcome]:
    """Run all programs; first each alone, then all of them once, and again."""
    stop = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []

    def folder(program: Program, run: int) -> Path:
        path = scratch / f"{program.name.replace('/', '-')}-{run}"
        path.mkdir()
        return path

    def truth(program: Program) -> tuple[Outcome, Reports]:
        return run_alone(program, folder(program, 0), pythons[program.framework], options.limit)

    def judge(program: Program, run: int) -> Outcome | None:
        if time.monotonic() > stop:
            return None
        reports = None
        if program.name in truths:
            outcome, reports = truths[program.name].result()
            if outcome.faults:
                return None
        python = pythons[program.framework]
        return run_program(program, folder(program, run), run=run, python=python, limit=options.limit, truth=reports)[0]

    pool = ThreadPoolExecutor(options.jobs)
    try:
        truths: dict[str, Future] = {each.name: pool.submit(truth, each) for each in chosen if each.alone}
        waiting = [pool.submit(judge, each, run + 1) for run in range(options.runs) for each in chosen]
        for future in as_completed([*truths.values(), *waiting]):
            found = future.result()
            outcome = found[0] if isinstance(found, tuple) else found
            if outcome is not None:
                outcomes.append(outcome)
                _show(outcome, options.json)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()
    return outcomes


def _show(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(outcome)), flush=True)
        return
    kind = "alone" if outcome.run == 0 else f"run {outcome.run}"
    word = "WRONG" if outcome.faults else "right"
    print(f"{word}  {outcome.program:32} {kind}  {outcome.cpu:6.1f} s CPU, {outcome.seconds:6.1f} s", flush=True)
    if outcome.faults:
        lines = outcome.output.splitlines()[-60:]
        print(
            "\n".join([*(f"       {fault}" for fault in outcome.faults), *(f"     | {line}" for line in lines)]),
            flush=True,
        )


def _summarize(outcomes: list[Outcome], left_out: list[str], options: argparse.Namespace) -> None:
    """Print a row for each program, and the sums."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.program, []).append(outcome)
    runs = [each for each in outcomes if each.run]
    wrong = [each for each in outcomes if each.faults]
    cpu = sum(each.cpu for each in outcomes)
    summary = f"{len(rows)} programs, {len(runs)} runs on ranks, {len(wrong)} wrong, {cpu:.0f} s CPU"
    if options.json:
        print(json.dumps({"summary": summary, "left_out": left_out, "load": options.load}))
        return
    print(f"\n{'program':32}  right  of  loss apart  weight apart  CPU s a run")
    for name, found in sorted(rows.items()):
        mine = [each for each in found if each.run]
        right = sum(not each.faults for each in mine)
        loss, weight = max((each.loss for each in mine), default=0.0), max((each.weight for each in mine), default=0.0)
        mean = sum(each.cpu for each in mine) / max(1, len(mine))
        print(f"{name:32}  {right:5}  {len(mine):2}  {loss:10.1e}  {weight:12.1e}  {mean:11.1f}")
    print(summary + (f"; beside {options.load} processes that compute" if options.load else ""))
    if left_out:
        print(f"left out, for there is no --mindspore PYTHON: {', '.join(left_out)}")


if __name__ == "__main__":
    sys.exit(main())
