"""Random faults at random moments of runs: how long the other ranks wait, and whether the right one is named.

python packages/hyper-parallel/benchmarks/hang_matrix.py [--injections 200] [--launchers 3] [--seed 0]

A rank is killed, stopped, ends by `os._exit`, raises, loops in Python, or stays in C with the interpreter; in the data,
the forward, a collective, the backward, before and in the optimizer's update, in a save, while one is written, and in a
load. Fails where a run does not end, another rank is named than the one with the fault, the phase is wrong, or the
operation is missing: the others' collective of a hang, the rank's last one of an end. The wait is the time from the
fault to the command's end, less the limit of the phase (`run.hang_after`, six times that outside of steps; half of it
where a stage fails on one of the ranks that communicate inside of it; else 0 of ends);
on a machine with other work it is what that leaves.
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
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from injections import Ended, Fault, Launcher, side_by_side, started

from hp_plan import ParallelPlan

LIMIT = 4.0
HOWS = ("kill", "exit", "raise", "stop", "loop", "keep")
HANGS = ("stop", "loop", "keep")
MOMENTS = (
    *("data", "forward", "collective", "backward", "before the update", "optimizer"),
    *("save", "writing", "load"),
)
MESHES = ({"dp_shard": 3}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 3}, {"dp_shard": 2, "pp": 2})
PHASES = {"save": ("save",), "writing": ("save", "step"), "load": ("start",)}
BEGUN = 2  # the step that the fault is in; those before have another limit


def plan_of(mesh: dict[str, int], data: Path) -> str:
    """Return a plan that saves every other step, as TOML."""
    tables = {
        "model": {"function": "injected:model"},
        "mesh": mesh,
        "styles": "auto" if "tp" in mesh else {},
        "fsdp": {"groups": ["model.layers.*"]},
        "data": {"sequence_length": 16, "batch_size": 12, "paths": [str(data)]},
        "run": {"steps": 100, "checkpoint_every": 2, "stop_within": 10.0, "hang_after": LIMIT},
    }
    return ParallelPlan.from_dict(tables).to_toml()


def problem(fault: Fault, ended: Ended, began: bool) -> str:
    """Return what is wrong with a run's end, "" if nothing is."""
    text = ended.err
    if not began:
        return "the fault did not come"
    if ended.status != 1:
        return f"exit status {ended.status}"
    named = re.search(r"rank (\d+) failed first", text)
    if named is None or int(named[1]) != fault.rank:
        return f"rank {named and named[1]} is named"
    place = (
        rf"Stack of rank {fault.rank}, in step (\d+) \((\w+)\)" if fault.how in HANGS else r"in step (\d+) \((\w+)\)"
    )
    at = re.search(place, text)
    if at is None or at[2] not in PHASES.get(fault.moment, ("step",)):
        return f"the phase is {at and at[2]}"
    if fault.how in HANGS and "the run hung: for " not in text:
        return "no hang is told"
    if re.search(r"\w+ number \d+ (over ranks|from rank) ", text) is None:
        return "no operation is named"
    return ""


def limit_of(fault: Fault, text: str, mesh: Mapping[str, int]) -> float:
    """Return the seconds after which the run is to end."""
    if fault.how == "raise" and "pp" in mesh and "broken: start the processes again" in text:
        return LIMIT / 2  # a rank of a pipeline that has failed, and gets nowhere
    if fault.how not in HANGS:
        return 0.0
    waited = re.search(r"the run hung: for (\d+) s", text)
    return LIMIT * (6 if waited is not None and int(waited[1]) >= 6 * LIMIT else 1)


def inject(launcher: Launcher, data: Path, number: int, seed: int) -> tuple[str, str, float]:
    """Make a run with a fault; return what it was, what is wrong, and the seconds that the others waited."""
    numbers = random.Random(seed * 1_000_003 + number)
    how, moment = HOWS[number % len(HOWS)], MOMENTS[number // len(HOWS) % len(MOMENTS)]
    mesh = numbers.choice(MESHES)
    ranks, run = 1, f"fault{number}"
    for size in mesh.values():
        ranks *= size
    plan, more = plan_of(mesh, data), list[str]()
    if moment == "load":
        launcher.train(plan, run, "--until", "2")
        more = ["--resume", "auto"]
    step = numbers.randrange(BEGUN, BEGUN + 4)
    fault = Fault(numbers.randrange(ranks), moment, how, step, numbers.randrange(6))
    ended = launcher.train(plan, run, *more, fault=fault)
    mark = launcher.mark(run)
    began = mark.exists()
    wrong = problem(fault, ended, began)
    waited = ended.at - json.loads(mark.read_text())["at"] - limit_of(fault, ended.err, mesh) if began else 0.0
    shutil.rmtree(launcher.folder / run, ignore_errors=True)
    return f"{how} in {moment}, rank {fault.rank} of {mesh}", f"{wrong}: {ended.err[-1500:]}" if wrong else "", waited


def main() -> int:
    """Print a line a fault; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--launchers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    waits: list[float] = []
    faults: list[int] = []
    done: Counter[str] = Counter()
    lock, numbers = threading.Lock(), iter(range(arguments.injections))
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        place = Path(name)
        (place / "text").write_bytes(b"to be or not to be, " * 40)

        def work(launcher: Launcher) -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    what, wrong, waited = inject(launcher, place / "text", number, arguments.seed)
                except (TimeoutError, RuntimeError) as error:
                    what, wrong, waited = "", f"{type(error).__name__}: {error}", float("inf")
                with lock:
                    done["injections"] += 1
                    done["hangs"] += waited == float("inf")
                    waits.append(waited)
                    if wrong:
                        faults.append(number)
                    print(
                        f"{'FAULT ' if wrong else ''}{number}: {what}: {waited:.1f} s{wrong and f'; {wrong}'}",
                        flush=True,
                    )
                if waited == float("inf"):
                    return

        with started(place, arguments.launchers) as launchers:
            side_by_side(work, launchers)
    waits.sort()
    over = sum(each > 2 for each in waits)
    print(
        f"{done['injections']} injections, {done['hangs']} runs without end, {len(faults)} faults"
        f" {sorted(faults) or ''}; waits past the limit: median {waits[len(waits) // 2]:.1f} s, largest"
        f" {waits[-1]:.1f} s, {over} over 2 s"
    )
    return 1 if faults or done["injections"] < arguments.injections else 0


if __name__ == "__main__":
    sys.exit(main())
