"""Save and load on two gloo ranks against torch.distributed.checkpoint and safetensors: CPU seconds, and bytes read.

The state is 32 matrices of float32, Shard(0) over two ranks; it is saved and loaded in the same layout and as Shard(1).
CPU seconds are the sum of both ranks' (user and system), the least of five interleaved rounds; bytes read are those of
/proc/self/io. Steps beside a background save are products of matrices on each rank; where the machine has as many cores
as there are ranks, the writers have none of their own. Whole weights are streamed from a model that is fully sharded,
in the shortest time of five rounds. Run it on an idle machine:
`python bench_checkpoint.py [--mib 256] [--folder FOLDER]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp as fsdp2
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import init_device_mesh as torch_mesh

import hp_fsdp
import hp_platform
from hp_checkpoint import Checkpointer, load, save, stream_weights
from hp_dtensor import DTensor, Shard, init_device_mesh
from hp_testing import note_figure

RANKS, TENSORS, ROUNDS = 2, 32, 5


def measured(action: Callable[[], Any]) -> tuple[float, int]:
    """Return CPU seconds and bytes read of an action, summed over the ranks."""
    dist.barrier()
    before, read = time.process_time(), _read()
    action()
    totals = torch.tensor([time.process_time() - before, float(_read() - read)], dtype=torch.float64)
    dist.all_reduce(totals)
    return float(totals[0]), int(totals[1])


def _read() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def rank_main(rank: int, folder: str, mib: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hp_platform.init_process_group("gloo", init_method=f"file://{store}", world_size=RANKS, rank=rank)
    rows = mib * 2**20 // TENSORS // 4 // 1024
    full = [torch.randn(rows, 1024, generator=torch.Generator().manual_seed(n)) for n in range(TENSORS)]
    ours, theirs = init_device_mesh("cpu", (RANKS,)), torch_mesh("cpu", (RANKS,))

    def state(cls: Any, mesh: Any, placement: Any, dim: int, zero: bool = False) -> dict[str, Any]:
        parts = [each.chunk(RANKS, dim)[rank].clone(memory_format=torch.contiguous_format) for each in full]
        parts = [torch.zeros_like(part) for part in parts] if zero else parts
        return {f"t{n}": cls.from_local(part, mesh, [placement]) for n, part in enumerate(parts)}

    base = Path(folder)
    saved = {"ours": state(DTensor, ours, Shard(0), 0), "dcp": state(TorchDTensor, theirs, TorchShard(0), 0)}
    plain = {name: value.to_local() for name, value in saved["dcp"].items()}
    same = {"ours": state(DTensor, ours, Shard(0), 0, True), "dcp": state(TorchDTensor, theirs, TorchShard(0), 0, True)}
    other = {
        "ours": state(DTensor, ours, Shard(1), 1, True),
        "dcp": state(TorchDTensor, theirs, TorchShard(1), 1, True),
    }

    def copy_loaded() -> None:
        loaded = load_file(base / f"plain-{rank}.safetensors")
        for name, value in same["dcp"].items():
            value.to_local().copy_(loaded[name])

    cases: dict[str, Callable[[], Any]] = {
        "save: ours, with fsync and checksums": lambda: save({"model": saved["ours"]}, checkpoint_id=base / "ours"),
        "save: DCP": lambda: dcp.save(saved["dcp"], checkpoint_id=base / "dcp"),
        "save: safetensors, a file each": lambda: save_file(plain, base / f"plain-{rank}.safetensors"),
        "save Shard(1): ours": lambda: save({"model": other["ours"]}, checkpoint_id=base / "ours-1"),
        "save Shard(1): ours, a file each": lambda: save(
            {"model": other["ours"]}, checkpoint_id=base / "ours-1s", layout="shards"
        ),
        "save Shard(1): DCP": lambda: dcp.save(other["dcp"], checkpoint_id=base / "dcp-1"),
        "load: ours": lambda: load({"model": same["ours"]}, checkpoint_id=base / "ours"),
        "load: DCP": lambda: dcp.load(same["dcp"], checkpoint_id=base / "dcp"),
        "load: safetensors, a file each": copy_loaded,
        "load as Shard(1): ours": lambda: load({"model": other["ours"]}, checkpoint_id=base / "ours"),
        "load as Shard(1): DCP": lambda: dcp.load(other["dcp"], checkpoint_id=base / "dcp"),
    }
    places = {
        "save: ours, with fsync and checksums": "ours",
        "save: DCP": "dcp",
        "save Shard(1): ours": "ours-1",
        "save Shard(1): ours, a file each": "ours-1s",
        "save Shard(1): DCP": "dcp-1",
    }
    seconds: dict[str, float] = {}
    reads: dict[str, int] = {}
    for round_ in range(ROUNDS):
        for name, action in cases.items():
            if rank == 0 and name in places:
                shutil.rmtree(base / places[name], ignore_errors=True)
            took, reads[name] = measured(action)
            seconds[name] = took if round_ == 0 else min(seconds[name], took)
    for name, value in other["ours"].items():
        assert torch.equal(value.to_local(), other["dcp"][name].to_local()), name
    if rank == 0:
        total = mib * 2**20
        for name, took in seconds.items():
            peer = name.split(":")[0] + ": DCP"
            read = f", {reads[name] / total:.2f} x read" if "load" in name else ""
            note_figure("CPU over DCP's", name, took / seconds[peer])
            print(f"{name}: {took:.3f} s CPU, {took / seconds[peer]:.2f} of DCP's{read}")
    streams(full, ours)
    stall(base, rank, full)
    steps_beside(base, rank, full)


def streams(full: list[torch.Tensor], mesh: Any) -> None:
    """Print the bytes a second of whole weights on all ranks and on one, of the same model under both libraries."""

    def model() -> torch.nn.Module:
        built = torch.nn.Module()
        for number, tensor in enumerate(full):
            setattr(built, f"t{number}", torch.nn.Parameter(tensor.clone()))
        return built

    ours: Any = hp_fsdp.fully_shard(model(), mesh)
    theirs: Any = fsdp2.fully_shard(model(), mesh=torch_mesh("cpu", (RANKS,)))
    whole = StateDictOptions(full_state_dict=True)

    def consumed(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    cases: dict[str, Callable[[], int]] = {
        "stream_weights": lambda: consumed(tensor for _, tensor in stream_weights(ours, bucket="64MiB")),
        "stream_weights, rank 0": lambda: consumed(t for _, t in stream_weights(ours, bucket="64MiB", ranks=0)),
        "full_tensor, one by one": lambda: consumed(each.full_tensor() for each in ours.state_dict().values()),
        "get_model_state_dict of FSDP2": lambda: consumed(get_model_state_dict(theirs, options=whole).values()),
    }
    total = sum(each.nbytes for each in full)
    best = {name: (float("inf"), float("inf")) for name in cases}
    for _ in range(ROUNDS):
        for name, action in cases.items():
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            assert action() in (0, total)
            used = time.process_time() - used
            dist.barrier()
            best[name] = min(best[name][0], time.perf_counter() - begin), min(best[name][1], used)
    for name, (took, used) in best.items() if dist.get_rank() == 0 else ():
        of_theirs = total / took / (total / best["get_model_state_dict of FSDP2"][0])
        print(f"{name}: {total / took / 1e9:.2f} GB/s, {of_theirs:.2f} of FSDP2's, {used:.3f} s CPU on rank 0")


def stall(base: Path, rank: int, full: list[torch.Tensor]) -> None:
    """Print what a background save stops the training for, beside a copy of the same bytes."""
    model = torch.nn.Module()
    for number, tensor in enumerate(full):
        part = torch.nn.Parameter(tensor.chunk(RANKS)[rank].clone())
        setattr(model, f"t{number}_{rank}", part)
    buffers = [torch.empty_like(each) for each in model.parameters()]
    best = {"stall": float("inf"), "copy": float("inf")}
    with Checkpointer(base / "run") as checkpoints:
        for step in range(ROUNDS):
            begin = time.process_time()
            pending = checkpoints.save(step, model)
            best["stall"] = min(best["stall"], time.process_time() - begin)
            pending.wait()
            begin = time.process_time()
            for buffer, parameter in zip(buffers, model.parameters(), strict=True):
                buffer.copy_(parameter.detach())
            best["copy"] = min(best["copy"], time.process_time() - begin)
    if rank == 0:
        print(
            f"background save: stops for {best['stall']:.3f} s CPU, a copy of the state takes {best['copy']:.3f} s:"
            f" {best['stall'] / best['copy']:.2f}"
        )


def steps_beside(base: Path, rank: int, full: list[torch.Tensor]) -> None:
    """Print how long steps take while a writer writes, beside those before."""
    model = torch.nn.Module()
    for number, tensor in enumerate(full):
        setattr(model, f"t{number}_{rank}", torch.nn.Parameter(tensor.chunk(RANKS)[rank].clone()))
    matrix = torch.randn(768, 768)
    alone: list[float] = []
    beside: list[float] = []

    def step(times: list[float]) -> None:
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - begin)

    with Checkpointer(base / "beside") as checkpoints:
        for number in range(ROUNDS):
            dist.barrier()
            for _ in range(20):
                step(alone)
            pending = checkpoints.save(number, model)
            while not pending.done():
                step(beside)
            pending.wait()
    if rank == 0:
        before, while_written = statistics.mean(alone), statistics.mean(beside)
        print(
            f"steps beside the writer: {len(beside)} of {while_written * 1e3:.1f} ms on average, {before * 1e3:.1f} ms"
            f" without it: {while_written / before:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tempfile.TemporaryDirectory() as store:
        mp.spawn(rank_main, (folder, options.mib, f"{store}/store"), RANKS)


if __name__ == "__main__":
    main()
