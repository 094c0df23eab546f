"""What checkpoints cost a program that runs for long: bytes read, memory, descriptors.

bytes   over all ranks, in /proc/self/io, of loads in other layouts; and of a model's folder as its shards
files   of 5,000 tensors: the most that are open at a time
saves   20 of them beside the training: resident memory and descriptors of the program and of its writer
steps   a step's time while the writer runs, over one's without
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hp_checkpoint.disk.manifest import BLOCK
from hp_testing import close_pools, run_ranks
from hp_testing.pools.target import select

LAYOUTS = ("rows", "columns", "strided", "ragged", "replicated", "two axes")


def io_bytes() -> int:
    """Return the bytes that this process has read by system calls."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def tensors_in(layout: str, tensors: int, rows: int, *, empty: bool) -> dict[str, Any]:
    """Return tensors of rows x 512 in a layout over all ranks."""
    from hp_dtensor import RaggedShard, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
    from hp_platform import get_platform
    from hp_testing import as_tensor

    size = get_platform().groups.size()
    grid = (2, size // 2) if layout == "two axes" else (size,)
    units = (1, *(3,) * (size - 2), 4 * size - 3 * (size - 2) - 1)  # 4 for each rank
    placements: Any = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "strided": [StridedShard(0, 2)],
        "ragged": [RaggedShard((0,), units)],
        "replicated": [Replicate()],
        "two axes": [Shard(0), Shard(1)],
    }[layout]
    mesh = init_device_mesh("cpu", grid)
    result = {}
    for number in range(tensors):
        array = np.zeros((rows, 512), "f4") if empty else np.random.default_rng(number).random((rows, 512), "f4")
        result[f"t{number}"] = distribute_tensor(as_tensor(array), mesh, placements)
    return result


def reads_of(folder: str, saved: str, tensors: int, rows: int) -> dict[str, float]:
    """Save in one layout; return what all ranks read for each other one, over the checkpoint's bytes."""
    import torch
    import torch.distributed as dist

    from hp_checkpoint import load, save

    model = tensors_in(saved, tensors, rows, empty=False)
    save({"model": model, "step": 1}, checkpoint_id=folder)
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    ratios = {}
    for layout in LAYOUTS:
        new = tensors_in(layout, tensors, rows, empty=True)
        load({"model": new, "step": 0}, checkpoint_id=folder)  # opens what is opened once
        dist.barrier()
        before = io_bytes()
        load({"model": new, "step": 0}, checkpoint_id=folder)
        read = torch.tensor(io_bytes() - before)
        dist.all_reduce(read)
        ratios[layout] = int(read) / size
        truth = tensors_in(layout, tensors, rows, empty=False)
        for name, value in truth.items():
            assert torch.equal(new[name].to_local(), value.to_local()), (layout, name)
    return ratios


def reads_of_model(folder: str, tensors: int, rows: int) -> list[float]:
    """Load a Hugging Face folder as shards; return what each rank read over its own bytes, rows and then columns."""
    from hp_checkpoint import load

    ratios = []
    for layout in ("rows", "columns"):
        new = tensors_in(layout, tensors, rows, empty=True)
        load(new, checkpoint_id=folder)
        before = io_bytes()
        load(new, checkpoint_id=folder)
        own = sum(each.to_local().numel() * 4 for each in new.values())
        ratios.append((io_bytes() - before) / own)
    return ratios


def open_files(folder: str, count: int) -> list[int]:
    """Save many tensors, and load them in the same layout and in another one; return the most descriptors of each.

    Those that were open before are not counted. A load that exchanges bytes opens the memory and the pipe of each other
    rank of the host.
    """
    from hp_checkpoint import load, save
    from hp_dtensor import Shard, distribute_tensor, init_device_mesh
    from hp_platform import get_platform
    from hp_testing import as_tensor

    mesh = init_device_mesh("cpu", (get_platform().groups.size(),))

    def state(value: float, placement: Any) -> dict[str, Any]:
        array = as_tensor(np.full((2, 8), value, "f4"))
        return {"model": {f"layers.{n}.w": distribute_tensor(array, mesh, [placement]) for n in range(count)}}

    saved, same, other = state(1.0, Shard(0)), state(0.0, Shard(0)), state(0.0, Shard(1))
    most = []
    calls: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("pwrite", lambda: save(saved, checkpoint_id=folder)),
        ("preadv", lambda: load(same, checkpoint_id=folder)),
        ("preadv", lambda: load(other, checkpoint_id=folder)),
    )
    for name, action in calls:
        action()  # opens the sockets of its collectives
        own, before, seen = getattr(os, name), len(os.listdir("/proc/self/fd")), [0]

        def counted(*arguments: Any, own: Any = own, seen: list[int] = seen) -> int:
            seen.append(len(os.listdir("/proc/self/fd")))
            return own(*arguments)

        setattr(os, name, counted)
        action()
        setattr(os, name, own)
        most.append(max(seen) - before)
    return most


def many_saves(folder: str, saves: int, mib: int) -> dict[str, list[int]]:
    """Save again and again beside a training; return resident KiB and descriptors after each save."""
    import torch

    from hp_checkpoint import Checkpointer, Keep

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(mib // 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict[str, list[int]] = {"rss": [], "descriptors": [], "rss of the writer": [], "its descriptors": []}
    with Checkpointer(folder, keep=Keep(last=2)) as checkpoints:
        for step in range(saves):
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            checkpoints.save(step, model, optimizer).wait()
            assert checkpoints._writer is not None and checkpoints._writer._process is not None
            for name, process in (("", os.getpid()), ("writer", checkpoints._writer._process.pid)):
                seen["rss of the writer" if name else "rss"].append(_resident(process))
                seen["its descriptors" if name else "descriptors"].append(len(os.listdir(f"/proc/{process}/fd")))
    return seen


def _resident(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main() -> None:
    """Measure all; the exit status is 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4096)
    options = parser.parse_args()
    select("torch-cpu")
    passed = []
    with tempfile.TemporaryDirectory() as base:
        worst = 0.0
        for saved in LAYOUTS:
            folder = f"{base}/{saved.replace(' ', '-')}"
            ratios = run_ranks(options.ranks, reads_of, folder, saved, 8, options.rows, timeout=600)[0]
            worst = max(worst, *ratios.values())
            print(f"bytes read, saved as {saved}: " + ", ".join(f"{k} {v:.3f}" for k, v in ratios.items()), flush=True)
        passed.append(worst <= 1.05)
        hub = Path(base) / "hub"
        hub.mkdir()
        os.link(f"{base}/rows/model.safetensors", hub / "model.safetensors")
        own = np.array(run_ranks(options.ranks, reads_of_model, str(hub), 8, options.rows, timeout=600))
        rows, columns = own.max(0)
        print(f"a model's folder, the most that a rank read over its own bytes: rows {rows:.3f}, columns {columns:.3f}")
        mine = 8 * options.rows * 512 * 4 / options.ranks
        passed.append(own.max() <= 1.1 + BLOCK / mine)  # blocks of 8 MiB are read whole
        most = np.array(run_ranks(2, open_files, f"{base}/many", 5000, timeout=600)).max(0)
        print(
            f"5,000 tensors, 2 ranks: {most[0]} more descriptors during a save, {most[1]} during a load in the same"
            f" layout, {most[2]} in another one",
            flush=True,
        )
        passed.append(most[0] <= 4 and max(most) <= 6)  # of a load: 3, and 3 for the other rank
        close_pools()
        seen = run_ranks(1, many_saves, f"{base}/run", 20, 48, timeout=600)[0]
        growth = {name: sum(values[-5:]) / sum(values[5:10]) for name, values in seen.items()}
        told = ", ".join(f"{name} {value:.4f}" for name, value in growth.items())
        print(f"20 saves, the last five over the sixth to tenth: {told}", flush=True)
        passed.append(all(value <= 1.01 for value in growth.values()))
        close_pools()
    sys.exit(0 if all(passed) else f"limits kept: {passed}")


if __name__ == "__main__":
    main()
