"""Ends saves at every point, and looks whether a whole checkpoint is there.

    crash_program.py FOLDER [FAULT] [ROWS] [LAYOUT]

Points are before and after each system call that changes files, and every 4 KiB of what is written. At a point the
process is killed, or the call fails there and ever after as on a full disk or a broken one. Needs no framework.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint import load, save
from hp_checkpoint.disk import storage
from hp_checkpoint.disk.manifest import Keep, steps_in
from hp_checkpoint.disk.storage import Arena
from hp_checkpoint.errors import Ranks, describe
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.saving import background
from hp_checkpoint.saving import writer_process as writer
from hp_checkpoint.saving.saving import prepare_save

CALLS = ("pwrite", "fsync", "rename", "mkdir", "open", "unlink", "rmdir")
FAULTS = {"kill": 0, "ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
STRIDE = 4096
DONE, UNNOTICED, RAISED, WRONG = 0, 10, 11, 12  # how a child ends; unnoticed: what failed was not needed


def state(seed: int, rows: int = 30) -> dict:
    values = np.random.default_rng(seed)
    model = {f"w{n}": values.standard_normal((rows + n, 17)).astype(np.float32) for n in range(3)}
    return {"model": model, "optimizer": {"w0": {"m": values.standard_normal(800)}}, "step": seed}


def empty(rows: int = 30) -> dict:
    def zeros(value):
        return {k: zeros(v) for k, v in value.items()} if isinstance(value, dict) else np.zeros_like(value)

    return {**zeros(state(0, rows)), "step": None}


def loads(folder: Path, seed: int, rows: int = 30) -> bool:
    """Tell whether a folder has the state of this seed, bit for bit."""
    new, truth = empty(rows), state(seed, rows)
    load(new, checkpoint_id=folder, no_dist=True, verify="all")
    same = all((new["model"][name] == value).all() for name, value in truth["model"].items())
    return same and (new["optimizer"]["w0"]["m"] == truth["optimizer"]["w0"]["m"]).all() and new["step"] == seed


def ended_at(point: int, fault: str, action: Callable[[], Any]) -> bool:
    """Run an action in a child with a fault at a point; tell whether it came to that point."""
    child = os.fork()
    if not child:
        os._exit(_with_fault(point, fault, action))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and fault == "kill":
        return True
    code = os.waitstatus_to_exitcode(status)
    assert code in (DONE, UNNOTICED, RAISED), f"point {point}: the save ended with {code}"
    return code != DONE


def _with_fault(point: int, fault: str, action: Callable[[], Any]) -> int:
    passed = 0

    def reach(*, before: bool) -> None:
        nonlocal passed
        passed += 1
        if fault == "kill" and passed == point + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault != "kill" and before and passed > point:
            raise OSError(FAULTS[fault], os.strerror(FAULTS[fault]))

    def wrapped(call):
        def run(*arguments, **options):
            reach(before=True)
            result = call(*arguments, **options)
            reach(before=False)
            return result

        return run

    own = {name: getattr(os, name) for name in CALLS}

    def pwrite(descriptor, data, offset):
        done = 0
        while done < len(data):  # in parts, with a point between them
            reach(before=True)
            done += own["pwrite"](descriptor, data[done : done + STRIDE], offset + done)
        reach(before=False)
        return done

    for name in CALLS:
        setattr(os, name, pwrite if name == "pwrite" else wrapped(own[name]))
    try:
        action()
    except Exception as error:
        named = fault in describe(error)
        if not named:
            print(describe(error), file=sys.stderr, flush=True)
        return RAISED if named else WRONG
    return UNNOTICED if passed > point else DONE


def job_of(state: Mapping[str, Any], target: Path, keep: Keep, layout: Any = "files") -> Callable[[], Any]:
    """Return what a writer process does for a save beside the training."""
    sent: list[Mapping[str, Any]] = []
    background.send = lambda _, job: sent.append(job)
    process = argparse.Namespace(stdin=sys.stdin, stdout=sys.stdout, poll=lambda: 0)
    background.subprocess = types.SimpleNamespace(Popen=lambda *_, **__: process, PIPE=None)
    writer._reply = lambda **_: None
    own, ranks = background.Writer(), Ranks(alone=True)
    own.start(prepare_save(flatten(state), target, ranks, step=state["step"], layout=layout), ranks, keep)
    return lambda: writer._run(sent[0], Arena(own._arena.descriptor))


def main(folder: Path, fault: str = "kill", rows: int = 30, layout: Any = "files") -> None:
    storage._NEW = 0.0  # rests may be removed at once

    def whole(path: Path, seed: int) -> bool:
        return loads(path, seed, rows)

    def saved(path: Path, seed: int) -> None:
        save(state(seed, rows), checkpoint_id=path, no_dist=True, layout=layout)

    points = 0
    saved(folder / "old", 1)
    while ended_at(points, fault, lambda: saved(folder / "new", 2)):
        assert whole(folder / "old", 1), points
        if (folder / "new").exists():
            assert whole(folder / "new", 2), points
            shutil.rmtree(folder / "new")
        points += 1
    assert whole(folder / "new", 2)
    replaced = 0
    while ended_at(replaced, fault, lambda: saved(folder / "old", 3)):  # the old one or the new one, never none
        if not whole(folder / "old", 1):
            assert whole(folder / "old", 3), replaced
            saved(folder / "old", 1)
        replaced += 1
    assert whole(folder / "old", 3)
    run, beside = folder / "run", 0
    saved(run / "step-00000001", 1)
    while ended_at(beside, fault, job_of(state(2, rows), run / "step-00000002", Keep(last=1), layout)):
        steps = steps_in(run)  # the older one is removed once the new one is there
        assert steps and all(whole(run / f"step-{step:08d}", step) for step in steps), beside
        if 2 in steps:
            shutil.rmtree(run / "step-00000002")
            saved(run / "step-00000001", 1)
        beside += 1
    assert steps_in(run) == [2] and whole(run / "step-00000002", 2)
    saved(folder / "last", 4)
    saved(run / "step-00000003", 3)
    assert sorted(path.name for path in folder.iterdir()) == ["last", "new", "old", "run"]
    assert sorted(path.name for path in run.iterdir()) == ["step-00000002", "step-00000003"]
    print(
        f"{fault}, {layout}: {points} points of a save, {replaced} of one that replaces, {beside} of one beside a"
        " training"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:4]), *sys.argv[4:5])
