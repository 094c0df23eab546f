"""CPU seconds for 1,024 ranks: plans of 2,000 tensors, and the reading of a manifest of files of each rank."""

from __future__ import annotations

import gc
import json
import time

import numpy as np

from hp_checkpoint.disk.files import PAGE, Chunk, Entry, Kind, lay_out
from hp_checkpoint.disk.manifest import BLOCK, FileSums, Manifest
from hp_checkpoint.layout.tensors import Holding, pieces, scale
from hp_checkpoint.loading.reads import Units, exchange, request_rows
from hp_checkpoint.saving.arrangements import shard_file
from hp_checkpoint.saving.save_plan import Tensor, writers
from hp_dtensor import RaggedShard, Replicate, Shard

LAYERS, WORLD = 222, 1024
SHAPES = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2


def flat_buffer(shapes: list[tuple[int, ...]], ranks: int) -> list[tuple[int, ...]]:
    """Return each parameter's units where a group's buffer is divided into equal parts, as by fully_shard."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    part = -(-sum(sizes) // ranks)
    bounds = np.arange(ranks + 1) * part
    starts = np.cumsum([0, *sizes])
    return [
        tuple(np.clip(np.minimum(bounds[1:], end) - np.maximum(bounds[:-1], start), 0, None).tolist())
        for start, end in zip(starts, starts[1:])
    ]


def layouts(kind: str) -> tuple[tuple[int, ...], list[tuple]]:
    if kind == "Shard(0)":
        return (WORLD,), [(Shard(0),)] * len(SHAPES)
    if kind == "ragged":
        return (WORLD,), [
            (RaggedShard(tuple(range(len(shape))), units),) for shape, units in zip(SHAPES, flat_buffer(SHAPES, WORLD))
        ]
    if kind == "HSDP x TP":
        return (16, 8, 8), [(Replicate(), Shard(0), Shard(len(shape) - 1)) for shape in SHAPES]
    raise ValueError(kind)


def manifest(tensors: int) -> bytes:
    """Return the manifest of files of each rank that have four rows of each tensor, and a checksum of each box."""
    names, rows = [f"layers.{n}.weight" for n in range(tensors)], 4
    files, size = [shard_file("model", rank) for rank in range(WORLD)], rows * 4096 * 4
    starts = [PAGE + number * size for number in range(tensors)]
    entries = {
        name: Entry(
            name,
            Kind("F32", (rows * WORLD, 4096)),
            "",
            0,
            tuple(Chunk.dense((rank * rows, 0), (rows, 4096), file, start) for rank, file in enumerate(files)),
        )
        for name, start in zip(names, starts)
    }
    pieces = [(0, PAGE), *((start, size) for start in starts)]
    ranges = [(at, min(at + length, end)) for at, length in pieces for end in [(at // BLOCK + 1) * BLOCK]]
    ranges += [(end, at + length) for (at, length), (_, end) in zip(pieces, ranges) if end < at + length]
    sums = tuple(sorted((at, end - at, 1, end - at, at * 2654435761 % 2**64) for at, end in ranges))
    sizes = {file: FileSums(PAGE + tensors * size, sums) for file in files}
    return Manifest(1, {"model": entries}, sizes).to_bytes()


def main() -> None:
    for kind in ("Shard(0)", "ragged", "HSDP x TP"):
        start = time.process_time()
        kinds = {f"layers.{n}.{i}": Kind("F32", shape) for n in range(LAYERS) for i, shape in enumerate(SHAPES)}
        (mesh_shape, placements), ranks = layouts(kind), tuple(range(WORLD))
        files = lay_out("model", kinds)
        entries = {entry.name: (number, entry) for number, file in enumerate(files) for entry in file.entries}
        laid_out = time.process_time()
        placed = {name: placements[int(name.rpartition(".")[2])] for name in kinds}
        chosen = writers(
            {n: Tensor(kind.shape, 4, (Holding(ranks, mesh_shape, placed[n]),)) for n, kind in kinds.items()}, WORLD
        )
        assigned = time.process_time()
        own = [
            (entries[name][0], scale(piece, 4, entries[name][1].offset))
            for name, kind in kinds.items()
            if 5 in chosen[name]
            for piece in pieces(kind.shape, placed[name], mesh_shape, tuple(np.unravel_index(5, mesh_shape)))
        ]
        planned = time.process_time()
        print(
            f"{len(kinds):,} tensors, {WORLD:,} ranks, {kind}: files {laid_out - start:.2f} s, writers"
            f" {assigned - laid_out:.2f} s, one rank's {len(own):,} pieces {planned - assigned:.2f} s,"
            f" all {planned - start:.2f} s"
        )
    mesh_shape, placements = layouts("Shard(0)")
    rows = []
    for rank in range(WORLD):
        of_shape = [pieces(shape, (Shard(0),), mesh_shape, (rank,)) for shape in SHAPES]
        own = [(entries[name], piece) for name in kinds for piece in of_shape[int(name.rpartition(".")[2])]]
        rows.append(request_rows((file, scale(piece, 4, entry.offset)) for (file, entry), piece in own))
    start = time.process_time()
    units = Units([file.size for file in files], [range(0, file.size, 8 << 20) for file in files])
    plan = exchange(rows, 3, units)
    print(
        f"exchange of {len(rows[0]):,} requests on each of {WORLD:,} ranks: {len(plan.units):,} units to read on one,"
        f" {time.process_time() - start:.2f} s"
    )
    for tensors in (100, 400):
        content = manifest(tensors)
        start = time.process_time()
        Manifest.from_bytes(content, "a manifest")
        seconds = time.process_time() - start
        gc.disable()  # as while a manifest is read
        start = time.process_time()
        json.loads(content)
        text = time.process_time() - start
        gc.enable()
        print(
            f"a manifest of shards, {WORLD:,} ranks, {tensors} tensors, {len(content) / 1e6:.0f} MB: {seconds:.2f} s,"
            f" of 6,000 tensors {seconds * 6000 / tensors:.0f} s; json.loads alone {text:.2f} s"
        )


if __name__ == "__main__":
    main()
