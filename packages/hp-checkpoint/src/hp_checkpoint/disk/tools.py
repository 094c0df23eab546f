"""Tools for checkpoints on disk: what is in one, whether it is whole, how two differ. No framework."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.api import read_values
from hp_checkpoint.disk.files import FLOATS, Entry
from hp_checkpoint.disk.manifest import MANIFEST, Manifest, as_json
from hp_checkpoint.errors import InvalidCheckpointError
from hp_checkpoint.layout.state import Unreadable
from hp_checkpoint.loading.loading import open_checkpoint, verify_files
from hp_checkpoint.loading.reads import stream


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints: the tensor's or value's name, and how it differs."""

    name: str
    text: str


def summary(folder: Path) -> dict[str, object]:
    """Describe a checkpoint: step, metric, layout, parts with their tensors and bytes, files, versions."""
    manifest = open_checkpoint(folder)
    parts = {
        part: {
            "tensors": {name: [entry.kind.dtype, *entry.kind.shape] for name, entry in entries.items()},
            "bytes": sum(entry.kind.nbytes for entry in entries.values()),
        }
        for part, entries in manifest.parts.items()
    }
    files = {name: file.size for name, file in manifest.files.items()}
    return {
        "step": manifest.step,
        "metric": as_json(manifest.metric),
        "layout": "shards" if any(e.chunks for inner in manifest.parts.values() for e in inner.values()) else "files",
        "parts": parts,
        "files": files,
        "versions": dict(manifest.versions),
    }


def faults(folder: Path) -> list[str]:
    """Compare a complete checkpoint with its checksums; list what is wrong, file by file.

    Raises:
        InvalidCheckpointError: the folder is no checkpoint, or one of a model without checksums.
    """
    manifest = open_checkpoint(folder)
    if not (folder / MANIFEST).exists():
        raise InvalidCheckpointError(f"{folder} has no {MANIFEST}, and so no checksums; its headers are right")
    result = []
    for name, file in manifest.files.items():
        alone = Manifest(None, manifest.parts, {name: file}, {}, manifest.block_bytes)
        try:
            verify_files(alone, folder)
        except FileNotFoundError:
            result.append(f"{folder / name} is missing")
        except (InvalidCheckpointError, OSError) as error:
            result.append(str(error))
    return result


def diff(one: Path, other: Path, *, tolerance: float = 0.0) -> list[Difference]:
    """List the differences of two checkpoints, tensor by tensor, in bounded memory.

    Args:
        one: a checkpoint.
        other: another.
        tolerance: the largest absolute difference of floating-point numbers that counts as none; bfloat16 and 8-bit
            floats are compared bit by bit.
    """
    manifests = open_checkpoint(one), open_checkpoint(other)
    result: list[Difference] = []
    for part in sorted({*manifests[0].parts, *manifests[1].parts}):
        entries = [manifest.parts.get(part, {}) for manifest in manifests]
        for name in sorted({*entries[0], *entries[1]}):
            full = f"{part}: {name}"
            if name not in entries[0] or name not in entries[1]:
                where = one if name in entries[0] else other
                result.append(Difference(full, f"only in {where}"))
                continue
            pair = entries[0][name], entries[1][name]
            if pair[0].kind != pair[1].kind:
                kinds = [f"{entry.kind.dtype} {list(entry.kind.shape)}" for entry in pair]
                result.append(Difference(full, f"{kinds[0]} and {kinds[1]}"))
                continue
            text = _compared(pair, (one, other), tolerance)
            if text is not None:
                result.append(Difference(full, text))
    values = [
        read_values(manifest, folder, lambda address: None)
        for manifest, folder in zip(manifests, (one, other), strict=True)
    ]
    return result + list(_differing(values[0], values[1], "state"))


def _compared(entries: tuple[Entry, Entry], folders: tuple[Path, Path], tolerance: float) -> str | None:
    dtype = FLOATS.get(entries[0].kind.dtype)
    unequal, largest = 0, 0.0
    chunks = [stream(entry, folder) for entry, folder in zip(entries, folders, strict=True)]
    for a, b in zip(*chunks, strict=True):
        if np.array_equal(a, b):
            continue
        if dtype is None:
            unequal += int((a != b).reshape(-1, entries[0].kind.itemsize).any(axis=1).sum())
            continue
        x, y = a.view(dtype).astype(np.float64), b.view(dtype).astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        distance = np.where(same, 0.0, np.abs(x - y))
        distance = np.where(np.isnan(distance), np.inf, distance)
        unequal += int((distance > tolerance).sum())
        largest = max(largest, float(distance.max()))
    if not unequal:
        return None
    text = f"{unequal:,} of {entries[0].kind.nbytes // entries[0].kind.itemsize:,} elements differ"
    return text if dtype is None else f"{text}, by up to {largest:.3g}"


def _differing(one: Any, other: Any, path: str) -> Iterator[Difference]:
    """List the values that differ; one that a side lacks is None there, as a tensor is in both."""
    inner = [{} if each is None else each for each in (one, other)]
    unreadable = [each for each in (one, other) if isinstance(each, Unreadable)]
    if unreadable:
        yield Difference(path, f"can't be read: {unreadable[0].text}")
    elif all(isinstance(each, dict) for each in inner):
        named = [{str(key): value for key, value in each.items()} for each in inner]
        for key in sorted({*named[0], *named[1]}):
            yield from _differing(named[0].get(key), named[1].get(key), f"{path}.{key}")
    else:
        texts = [json.dumps(each, default=repr) for each in (one, other)]
        if texts[0] != texts[1]:
            yield Difference(path, f"{texts[0][:60]} and {texts[1][:60]}")
