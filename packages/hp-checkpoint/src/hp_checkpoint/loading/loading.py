"""Loading: each byte is read by one rank, verified, and sent to the ranks that want it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_checkpoint.disk.files import Entry
from hp_checkpoint.disk.json_texts import strict_json
from hp_checkpoint.disk.manifest import Manifest, entry_of
from hp_checkpoint.disk.storage import opened, read_at, read_json
from hp_checkpoint.errors import CheckpointError, InvalidCheckpointError, shown
from hp_checkpoint.layout.state import Address
from hp_checkpoint.layout.tensors import kind_of, stored_pieces
from hp_checkpoint.loading.reads import COLUMNS, Units, exchange, request_rows
from hp_checkpoint.loading.transfers import CastTarget, Request, Target, Transfers, casts
from hp_checkpoint.recovery.ranks import Ranks, describe
from hp_checkpoint.saving.saving import STATE

Verify = Literal["read", "all"]


def check_entries(
    wanted: Mapping[Address, Any], manifest: Manifest, *, cast: bool = False, partial: bool = False
) -> dict[Address, Entry]:
    """Find the entry of each wanted tensor.

    Args:
        wanted: tensors by address.
        manifest: of the checkpoint.
        cast: let floating-point dtypes differ.
        partial: leave out those that the checkpoint lacks.

    Raises:
        ValueError: names that the checkpoint lacks, with near misses; another shape or dtype.
    """
    result: dict[Address, Entry] = {}
    missing, faults, convertible = [], [], False
    for (part, name), value in wanted.items():
        entry = entry_of(manifest, (part, name))
        kind = kind_of(name, value)
        if entry is None:
            missing.append((part, name))
        elif entry.kind != kind and not (cast and casts(kind, entry.kind)):
            convertible |= part == "model" and casts(kind, entry.kind)
            faults.append(
                f"{name!r} is {kind.dtype} of shape {list(kind.shape)}, in the checkpoint {entry.kind.dtype} of shape"
                f" {list(entry.kind.shape)}"
            )
        elif isinstance(value, np.ndarray) and not value.flags.writeable:
            faults.append(f"{name!r} is an array that can't be written; load into a copy of it")
        else:
            result[part, name] = entry
    if missing and not partial:
        texts = [repr(name) + _near(name, manifest.parts.get(part, {})) for part, name in missing[:5]]
        raise ValueError(f"load: the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {', '.join(texts)}")
    if faults:
        hint = ". load_model(..., cast=True) converts floating-point dtypes" if convertible else ""
        raise ValueError(f"load: {len(faults)} of {len(wanted)} tensors do not fit: {'; '.join(faults[:3])}{hint}")
    return result


def load_tensors(
    wanted: Mapping[Address, Any],
    manifest: Manifest,
    folder: Path,
    ranks: Ranks,
    *,
    verify: Verify = "read",
    cast: bool = False,
    partial: bool = False,
    share: bool = True,
) -> None:
    """Load tensors in place; all ranks call it together, each with its own.

    Args:
        wanted: tensors by address.
        manifest: of the checkpoint.
        folder: its folder.
        ranks: who loads.
        verify: "read" compares each block that is read with its checksums, "all" first compares all of the checkpoint.
        cast: convert floating-point tensors of another dtype.
        partial: leave tensors as they are that the checkpoint lacks.
        share: read each byte on one rank, which sends it to the others that want it. Default True; with False each rank
            reads what it wants.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
    """
    if verify == "all":
        ranks.agree(lambda: verify_files(manifest, folder, ranks.rank, ranks.size), "load")
    names = sorted(manifest.files)
    numbers = {name: number for number, name in enumerate(names)}
    requests: list[Request] = []

    def rows_of(own: list[Request]) -> bytes:
        return request_rows((each.file, each.piece) for each in own).tobytes()

    def request() -> bytes:
        for address, entry in check_entries(wanted, manifest, cast=cast, partial=partial).items():
            value = wanted[address]
            own = list(stored_pieces(entry, value))
            size = sum(piece.size for _, piece in own)
            alike = entry.kind == kind_of(address[1], value)
            target = Target(value, size) if alike else CastTarget(address[1], value, size, entry.kind.dtype)
            requests.extend(Request(numbers[file], piece, target) for file, piece in own)
        requests.sort(key=lambda each: (each.file, each.piece.first))
        return rows_of(requests) if share else b""

    rows = ranks.agree(request, "load")
    readers = ranks if share else Ranks(alone=True)
    if not share:
        rows = [rows_of(requests)]
    arrays = [np.frombuffer(each, np.int64).reshape(-1, COLUMNS) for each in rows]
    files = [manifest.files[name] for name in names]
    units = Units([file.size for file in files], [file.cuts(manifest.block_bytes) for file in files])
    plan = exchange(arrays, readers.rank, units)
    failure = Transfers(plan, units, requests, manifest, [folder / name for name in names], readers).run()
    ranks.agree(lambda: _raised(failure), "load")


def _near(name: str, names: Iterable[str]) -> str:
    """Return a near miss for an error; it compares with each name, so it is for the few that are shown."""
    near = difflib.get_close_matches(name, names, 1)
    return f" (it has {shown(near[0])})" if near else ""


def _raised(failure: Exception | None) -> bytes:
    if failure is not None:
        raise CheckpointError(f"{describe(failure)}. Tensors may have been changed in part") from failure
    return b""


def read_tree(manifest: Manifest, folder: Path) -> Any:
    """Read the state's JSON values.

    Raises:
        InvalidCheckpointError: the file was changed.
    """
    path = folder / STATE
    content = read_json(path)
    data = np.frombuffer(content, np.uint8)
    if len(data) != manifest.files[STATE].size:
        raise InvalidCheckpointError(f"{path} has {len(data):,} bytes, expected {manifest.files[STATE].size:,}")
    manifest.verify(path, 0, data)
    return strict_json(content, str(path))


def verify_files(manifest: Manifest, folder: Path, rank: int = 0, size: int = 1) -> bytes:
    """Compare all files with their sizes and checksums; of several ranks each compares some blocks.

    Returns:
        Nothing.

    Raises:
        InvalidCheckpointError: naming the first one that differs.
    """
    number = 0
    for name, file in manifest.files.items():
        path = folder / name
        with opened(path) as descriptor:
            found = os.fstat(descriptor).st_size
            if found != file.size:
                raise InvalidCheckpointError(
                    f"{path} has {found:,} bytes, expected {file.size:,}: it was cut off or changed"
                )
            for start in range(0, file.size, manifest.block_bytes):
                number += 1
                if number % size == rank:
                    data = np.empty(min(manifest.block_bytes, file.size - start), np.uint8)
                    read_at(descriptor, data, start, path)
                    manifest.verify(path, start, data)
    return b""
