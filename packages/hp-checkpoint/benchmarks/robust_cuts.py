"""Saves that end at any point: the old checkpoint loads bit for bit each time, and the next save needs no cleaning.

Killed, or with ENOSPC or EIO from there on, before and after each system call and every 4 KiB of what is written: of a
new checkpoint, of one that replaces another, and in the writer beside a training; each in both layouts of files. On a
real full disk, a small tmpfs, at every page of free space (where `unshare` may mount one). Two ranks with their
writers, killed at random moments.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import crash_program  # noqa: E402

from hp_checkpoint import Checkpointer, CheckpointError, save  # noqa: E402
from hp_checkpoint.disk import storage  # noqa: E402
from hp_checkpoint.saving import saving  # noqa: E402

RANKS, VALUES = 2, 200_000
LAYOUTS = ("files", "shards")


def cut_points(rows: int) -> None:
    """Run the program of the tests on a larger state."""
    for fault, layout in itertools.product(crash_program.FAULTS, LAYOUTS):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, crash_program.__file__, folder, fault, str(rows), layout], check=True)


def full_disk(folder: Path, pages: int, layout: Any) -> None:
    """Save with each number of free pages, from none to enough; the folder is a file system of its own."""
    storage._NEW, failed = 0.0, 0
    saving.check_space = lambda *_: None  # else it is seen before the first byte
    save(crash_program.state(1), checkpoint_id=folder / "old", no_dist=True)
    for free in range(pages):
        usage = os.statvfs(folder)
        filler = folder / "filler"
        filler.write_bytes(bytes((usage.f_bavail - free) * usage.f_frsize))
        try:
            save(crash_program.state(2), checkpoint_id=folder / "new", no_dist=True, layout=layout)
        except CheckpointError as error:
            assert "ENOSPC: No space left on device" in str(error), error
            assert sorted(each.name for each in folder.iterdir()) == ["filler", "old"]
            failed += 1
        else:
            assert crash_program.loads(folder / "new", 2)
            shutil.rmtree(folder / "new")
        assert crash_program.loads(folder / "old", 1)
        filler.unlink()
    save(crash_program.state(2), checkpoint_id=folder / "new", no_dist=True, layout=layout)
    assert crash_program.loads(folder / "new", 2) and 5 < failed < pages
    for name in ("old", "new"):
        shutil.rmtree(folder / name)
    print(f"a full disk, {layout}: {failed} saves failed at other pages, and left the old checkpoint", flush=True)


def killed_ranks(rounds: int) -> None:
    """Kill two ranks at random moments of their saves, and go on from what is there."""
    import torch  # the ranks are forked from this process, which has no group and no threads

    torch.set_num_threads(1)
    choice, ended = random.Random(0), {"a rank": 0, "all ranks": 0, "all ranks and writers": 0}
    storage._NEW = 0.0
    with tempfile.TemporaryDirectory() as base:
        run = Path(base) / "run"
        first = 0
        for number in range(rounds):
            kind = choice.choice(list(ended))
            ended[kind] += 1
            first = _killed_round(Path(base), run, number, kind, choice, first)
        rests = [path.name for path in run.iterdir() if ".part-" in path.name]
    print(f"ranks killed in {rounds} rounds ({ended}): {first} steps, all whole; {len(rests)} rests", flush=True)


def _killed_round(base: Path, run: Path, number: int, kind: str, choice: random.Random, first: int) -> int:
    """Save steps until a kill; return the newest step, after a look at all that are there."""
    group, ready = f"{base}/store{number}", base / f"ready{number}"
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            code = 1
            try:
                _train(run, rank, group, ready, first, background=bool(number % 2), layout=LAYOUTS[number // 2 % 2])
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(choice.random() * 0.6)
    writers = [int(each) for child in children for each in _children(child)]
    killed = [*children, *writers] if kind == "all ranks and writers" else children
    for process in killed[:1] if kind == "a rank" else killed:
        os.kill(process, signal.SIGKILL)
    time.sleep(0.05 if kind == "a rank" else 0.0)
    for child in children:  # the other rank raises, or waits for the lost one
        if kind == "a rank":
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    checkpoints = Checkpointer(run, background=False)
    steps = checkpoints.steps()
    assert steps and max(steps) >= first, (steps, first)
    for step in steps:
        try:
            model = _model(None)
            checkpoints.load(model, step=step)
        except (CheckpointError, FileNotFoundError):
            assert step not in checkpoints.steps(), step  # a writer that goes on removed it meanwhile
        else:
            assert all((value == _value(name, step)).all() for name, value in model.state_dict().items()), step
    return max(steps)


def _train(run: Path, rank: int, group: str, ready: Path, first: int, *, background: bool, layout: Any) -> None:
    import hp_platform
    from hp_dtensor import Shard, distribute_tensor, init_device_mesh

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of ranks that lost the other one
    hp_platform.init_process_group("gloo", init_method=f"file://{group}", world_size=RANKS, rank=rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    checkpoints = Checkpointer(run, background=background, layout=layout)
    step = first
    while True:
        step += 1
        model = _model(step)
        for name, parameter in list(model.named_parameters()):
            import torch

            setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        checkpoints.save(step, model)
        if step == first + 1:
            ready.touch()


def _model(step: int | None):
    import torch

    model = torch.nn.Module()
    for name in ("a", "b"):
        values = torch.zeros(VALUES) if step is None else _value(name, step)
        model.register_parameter(name, torch.nn.Parameter(values))
    return model


def _value(name: str, step: int):
    import torch

    return torch.arange(VALUES, dtype=torch.float32) * (1 + ord(name)) + step


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=900, help="of three matrices of 17 columns")
    parser.add_argument("--rounds", type=int, default=60, help="in which ranks are killed")
    parser.add_argument("--full-disk", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full_disk:
        for layout in LAYOUTS:
            full_disk(Path(options.full_disk), 40, layout)
        return
    cut_points(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        own = f'mount -t tmpfs -o size=1m none {folder} && exec "$0" "$@"'
        mounting = ["unshare", "-Urm", "sh", "-c"]
        if shutil.which("unshare") and not subprocess.run([*mounting, own, "true"], capture_output=True).returncode:
            subprocess.run([*mounting, own, sys.executable, __file__, "--full-disk", folder], check=True)
        else:
            print("a full disk: skipped, it needs unshare and the right to mount a tmpfs")
    killed_ranks(options.rounds)


if __name__ == "__main__":
    main()
