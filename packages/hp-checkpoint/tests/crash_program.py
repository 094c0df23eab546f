"""Kills a process at every point of a save, and looks whether a whole checkpoint is there: `crash_program.py FOLDER`.

Points are before and after each system call that changes files, and every 4 KiB of what is written. Needs no framework.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from hp_checkpoint import load, save, storage

CALLS = ("pwrite", "fsync", "rename", "mkdir", "open")
STRIDE = 4096


def state(seed: int) -> dict:
    values = np.random.default_rng(seed)
    model = {f"w{n}": values.standard_normal((30 + n, 17)).astype(np.float32) for n in range(3)}
    return {"model": model, "optimizer": {"w0": {"m": values.standard_normal(800)}}, "step": seed}


def empty() -> dict:
    def zeros(value):
        return {k: zeros(v) for k, v in value.items()} if isinstance(value, dict) else np.zeros_like(value)

    return {**zeros(state(0)), "step": None}


def loads(folder: Path, seed: int) -> bool:
    """Tell whether a folder has the state of this seed, bit for bit."""
    new, truth = empty(), state(seed)
    load(new, checkpoint_id=folder, no_dist=True, verify="all")
    same = all((new["model"][name] == value).all() for name, value in truth["model"].items())
    return same and (new["optimizer"]["w0"]["m"] == truth["optimizer"]["w0"]["m"]).all() and new["step"] == seed


def killed_at(point: int, target: Path, seed: int) -> bool:
    """Save in a child that is killed at a point; tell whether it was, or False where it had ended before."""
    child = os.fork()
    if not child:
        passed = 0

        def reach() -> None:
            nonlocal passed
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

        def wrapped(call):
            def run(*arguments, **options):
                reach()
                result = call(*arguments, **options)
                reach()
                return result

            return run

        own = {name: getattr(os, name) for name in CALLS}

        def pwrite(descriptor, data, offset):
            done = 0
            while done < len(data):  # in parts, with a point between them
                reach()
                done += own["pwrite"](descriptor, data[done : done + STRIDE], offset + done)
            reach()
            return done

        for name in CALLS:
            setattr(os, name, pwrite if name == "pwrite" else wrapped(own[name]))
        save(state(seed), checkpoint_id=target, no_dist=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def main(folder: Path) -> None:
    points, storage._NEW = 0, 0.0  # rests may be removed at once
    save(state(1), checkpoint_id=folder / "old", no_dist=True)
    while killed_at(points, folder / "new", 2):
        assert loads(folder / "old", 1), points
        if (folder / "new").exists():
            assert loads(folder / "new", 2), points
        points += 1
    assert loads(folder / "new", 2)
    replaced = 0
    while killed_at(replaced, folder / "old", 3):  # the same name: the old one or the new one, never none
        if loads(folder / "old", 3):
            save(state(1), checkpoint_id=folder / "old", no_dist=True)
        assert loads(folder / "old", 1), replaced
        replaced += 1
    assert loads(folder / "old", 3)
    save(state(4), checkpoint_id=folder / "last", no_dist=True)
    assert sorted(path.name for path in folder.iterdir()) == ["last", "new", "old"]
    print(f"{points} and {replaced} points")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
