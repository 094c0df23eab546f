"""What recovery takes: from a kill to the next step, beside torchrun's restart; what cycles leave; what copies cost.

python packages/hyper-parallel/benchmarks/bench_recovery.py [PART ...] [--rounds 5] [--cycles 60]

`seconds` kills a rank of two in step 5, with `train --recover` and with `torchrun --max-restarts 1 ... --resume auto`
(a checkpoint each step), and prints the seconds from the kill until step 5's line is written. `cycles` kills a rank in
the same step again and again, and prints descriptors, threads and memory of the launcher and of the rank that stays; it
fails where they grow, or where a process is left. `copies` prints what part of a step a copy takes, in one process.
`torchft`, which is not among the parts that run by default, kills one of two replicas with `train --recover` and under
torchft's manager, each with a process that waits to take its place; torchft's other replica goes on by itself first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from injections import Fault, Launcher
from recovery_matrix import plan_of

KILLED = 5
GROWTH = 1.15  # of memory, over the second half of the cycles; descriptors and threads do not grow at all


def await_line(path: Path, begin: int, step: int, limit: float = 300.0) -> float:
    """Return when the line of a step was written behind a place of a file."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        text = path.read_text(encoding="utf-8", errors="replace")[begin:] if path.exists() else ""
        if f'{{"step": {step},' in text:
            return time.time()
        time.sleep(0.005)
    raise TimeoutError(f"step {step} did not come")


def recovered(launcher: Launcher, plan: str, run: str, fault: Fault) -> float:
    """Return the seconds from the kill to the next step of a run that recovers."""
    out = launcher.folder / "out"
    begin = len(out.read_text(encoding="utf-8", errors="replace")) if out.exists() else 0
    done: list[float] = []

    def watch() -> None:
        done.append(await_line(out, begin, fault.step))

    thread = threading.Thread(target=watch)
    thread.start()
    ended = launcher.train(plan, run, "--recover", fault=fault)
    thread.join()
    assert ended.status == 0, ended.err
    return done[0] - json.loads(launcher.mark(run).read_text().splitlines()[0])["at"]


def restarted(folder: Path, plan: str, run: str, fault: Fault) -> float:
    """Return the same of a run that torchrun starts again."""
    mark = folder / f"{run}.mark"
    told = {"rank": fault.rank, "moment": fault.moment, "how": fault.how, "step": fault.step, "count": fault.count}
    (folder / f"{run}.toml").write_text(plan, encoding="utf-8")
    given = json.dumps({**told, "launcher": 0, "mark": str(mark)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "hyper_parallel", "train", f"{run}.toml", "--out", run, "--json"]
    command += ["--resume", "auto", "--set", f"model.overrides.injection={json.dumps(given)}"]
    out = folder / f"{run}.out"
    with open(out, "w") as stream, open(folder / f"{run}.err", "w") as errors:
        environment = {**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=errors) as process:
            at = await_line(out, 0, fault.step)
            status = process.wait()
    assert status == 0, (folder / f"{run}.err").read_text()[-2000:]
    return at - json.loads(mark.read_text().splitlines()[0])["at"]


def seconds(place: Path, rounds: int) -> int:
    """Print the seconds of both, from the same runs."""
    data = place / "text"
    launcher = Launcher(place / "runs")
    run = {"steps": 7, "checkpoint_every": 1, "keep": 100, "stop_within": 10.0}
    plan = plan_of(data, mesh={"dp_shard": 2}, run=run)
    fault = Fault(1, "backward", "kill", KILLED)
    found: dict[str, list[float]] = {"recovered": [], "restarted": []}
    try:
        for number in range(rounds):
            found["recovered"].append(recovered(launcher, plan, f"run{number}", fault))
            found["restarted"].append(restarted(launcher.folder, plan, f"again{number}", fault))
            print(
                f"round {number}: {found['recovered'][-1]:.2f} s, torchrun {found['restarted'][-1]:.2f} s", flush=True
            )
    finally:
        launcher.close()
    middle = {name: sorted(each)[len(each) // 2] for name, each in found.items()}
    part = middle["recovered"] / middle["restarted"]
    print(
        f"from the kill to the line of the next step, median of {rounds}: {middle['recovered']:.2f} s; torchrun"
        f" {middle['restarted']:.2f} s; {part:.2f} of it"
    )
    return 0


def torchft(place: Path, rounds: int) -> int:
    """Print the seconds of torchft's manager beside ours, from the same runs."""
    import torchft_rejoin

    plan = plan_of(place / "text", mesh={"dp_replicate": 2}, run={"steps": 7, "checkpoint_every": 0})
    fault = Fault(1, "backward", "kill", KILLED)
    ours: list[float] = []
    first: list[float] = []
    both: list[float] = []
    torchft_rejoin.check()
    launcher = Launcher(place / "runs")
    try:
        for number in range(rounds):
            ours.append(recovered(launcher, plan, f"run{number}", fault))
            alone, together = torchft_rejoin.rejoined(KILLED)
            first.append(alone)
            both.append(together)
            print(f"round {number}: {ours[-1]:.2f} s; torchft {alone:.2f} s alone, {together:.2f} s both", flush=True)
    finally:
        launcher.close()
    print(
        f"from the kill to the next step of both replicas, median of {rounds}: {statistics.median(ours):.2f} s, the"
        f" same step with the same bits; torchft {statistics.median(both):.2f} s, after a step of one replica alone"
        f" ({statistics.median(first):.2f} s)"
    )
    return 0


def resources(pid: int) -> tuple[int, int, float]:
    """Return descriptors, threads and resident MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = {line.split(":")[0]: line.split(":")[1].split() for line in status.splitlines() if ":" in line}
    return len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"][0]), int(values["VmRSS"][0]) / 1024


def session(leader: int) -> Iterator[int]:
    """List the processes of a session."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                yield int(name)


def cycles(place: Path, count: int) -> int:
    """Print what processes hold from cycle to cycle."""
    launcher = Launcher(place / "runs", limit=300.0 + 10.0 * count)
    limits = {"limit": 10 * count, "same_step": 10 * count}
    plan = plan_of(place / "text", mesh={"dp_shard": 2}, recovery=limits)
    seen: list[tuple[tuple[int, int, float], tuple[int, int, float]]] = []
    over: list[bool] = []

    def watch() -> None:
        read = 0
        while not over:
            text = (launcher.folder / "err").read_text(errors="replace") if (launcher.folder / "err").exists() else ""
            if text.count("recovered in") > read:
                read = text.count("recovered in")
                with contextlib.suppress(OSError, ValueError):
                    ranks = [pid for pid in session(launcher.process.pid) if b"rank-0" in _maps(pid)]
                    seen.append((resources(launcher.process.pid), resources(ranks[0])))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        launcher.train(plan, "first")  # starts the servers that ranks are forked from
        before = set(session(launcher.process.pid))
        ended = launcher.train(plan, "run", "--recover", fault=Fault(1, "collective", "kill", 3, times=count))
        time.sleep(1.0)
        left = set(session(launcher.process.pid)) - before
        over.append(True)
        thread.join()
        shared = [name for name in os.listdir("/dev/shm") if "hp" in name or "hyper" in name]
    finally:
        over.append(True)
        launcher.close()
    done = ended.err.count("recovered in")
    print(f"{done} of {count} cycles, exit status {ended.status}; left: {len(left)} processes, {shared} in /dev/shm")
    wrong = ended.status or done != count or bool(left)
    for name, index in (("launcher", 0), ("rank that stays", 1)):
        own = [each[index] for each in seen]
        half, end = own[len(own) // 2], own[-1]
        print(
            f"{name}: descriptors {own[1][0]}, {half[0]}, {end[0]}; threads {own[1][1]}, {half[1]}, {end[1]}; MiB"
            f" {own[1][2]:.0f}, {half[2]:.0f}, {end[2]:.0f} (after cycles 2, {len(own) // 2}, {len(own)})"
        )
        wrong = wrong or end[0] > half[0] + 2 or end[1] > half[1] + 1 or end[2] > half[2] * GROWTH
    return int(wrong)


def _maps(pid: int) -> bytes:
    return Path(f"/proc/{pid}/maps").read_bytes()


def copies(place: Path, rounds: int) -> int:
    """Print the milliseconds of a step, of a copy, and its bytes, in one process."""
    os.environ.setdefault("HYPER_PARALLEL_DEVICE", "cpu")
    import hp_platform
    from hp_checkpoint.extend import Copies, hold
    from hp_plan import ParallelPlan
    from hyper_parallel.run import Run

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    tables: dict[str, Any] = {
        "model": {
            "config": "Qwen3Config",
            "overrides": {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        },
        "data": {"sequence_length": 128, "batch_size": 8, "paths": [str(place / "text")]},
        "run": {"steps": 4 * rounds},
    }
    hp_platform.init_process_group()
    took: dict[str, list[float]] = {"with": [], "without": [], "copy": []}
    size = 0
    for name in ("without", "with"):
        held = hold(1)
        kept = Copies([[arena.descriptor for arena in held[0]]], rank=0, epoch=0)
        keep = kept.keep

        def timed(step: int, state: Any, keep: Any = keep) -> None:
            begin = time.perf_counter()
            keep(step, state)
            took["copy"].append(time.perf_counter() - begin)

        kept.keep = timed  # type: ignore[method-assign]
        (place / name).mkdir()
        with Run(ParallelPlan.from_dict(tables), place / name, copies=kept if name == "with" else None) as run:
            took[name] = [step.seconds for step in run.steps()][2:]
        size = max(size, *(os.fstat(arena.descriptor).st_size for arena in held[0]))
    hp_platform.destroy_process_group()
    middle = {name: sorted(each)[len(each) // 2] for name, each in took.items()}
    print(
        f"step {1e3 * middle['without']:.1f} ms without copies, {1e3 * middle['with']:.1f} ms with; a copy of"
        f" {size / 2**20:.1f} MiB {1e3 * middle['copy']:.2f} ms: {100 * middle['copy'] / middle['without']:.1f}% of a"
        " step of 1,024 tokens"
    )
    return 0


def main() -> int:
    """Do what is asked for, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="seconds, cycles, copies (the default), torchft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=60)
    arguments = parser.parse_args()
    wrong = 0
    for part in arguments.parts or ("copies", "seconds", "cycles"):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "text").write_bytes(b"to be or not to be, that is the question. " * 100)
            if part == "cycles":
                wrong |= cycles(Path(name), arguments.cycles)
            else:
                wrong |= {"seconds": seconds, "copies": copies, "torchft": torchft}[part](Path(name), arguments.rounds)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
