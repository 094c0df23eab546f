"""Saving: every rank writes its pieces into the files, then rank 0 commits; a folder's next save waits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hp_checkpoint.disk.files import LIMIT, index_of
from hp_checkpoint.disk.manifest import BLOCK, MANIFEST, FileSums, Manifest, checksum, sealed
from hp_checkpoint.disk.storage import (
    check_space,
    check_values,
    commit,
    followed,
    in_progress,
    make_folder,
    new_nonce,
    opened,
    part_folder,
    remove_rests,
    sync,
    write_at,
    write_small,
)
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import State
from hp_checkpoint.layout.tensors import Piece, clip, gather
from hp_checkpoint.saving.arrangements import Files, Layout, Output, agreed_layout, in_files, in_shards
from hp_checkpoint.saving.save_plan import SavePlan, plan_save

_POLL = 0.01
_saves: dict[str, list[Callable[[], bool]]] = {}


def begun(target: Path, ended: Callable[[], bool]) -> None:
    """Take note of a save.

    Args:
        target: the checkpoint's folder.
        ended: tells whether the save is complete or has failed.
    """
    for place in list(_saves):
        _saves[place] = [each for each in _saves[place] if not each()]
        if not _saves[place]:
            del _saves[place]
    _saves.setdefault(os.path.realpath(target), []).append(ended)


def wait_for_saves(target: Path) -> None:
    """Wait until this process has no save of a folder under way."""
    for ended in _saves.pop(os.path.realpath(target), ()):
        while not ended():
            time.sleep(_POLL)


STATE = "state.json"
_HASHED_BYTES = 1 << 20
_COLUMNS = 6  # number of the file, first, length, count, stride, checksum


@dataclass(frozen=True)
class Prepared:
    """A save that is planned, and whose folder is there.

    Attributes:
        outputs: of this rank.
        names: of all files.
        tree: the manifest without checksums, see `manifest.sealed`; of use on the leader.
        target: the checkpoint's folder.
        part: the folder until the commit.
        block_bytes: bytes of a checksum's block.
        run: the folder that has the checkpoint's name; another one than the target's where that name is a link.
    """

    outputs: tuple[Output, ...]
    names: tuple[str, ...]
    tree: dict[str, Any]
    target: Path
    part: Path
    block_bytes: int
    run: Path


def save_state(
    state: State,
    target: Path,
    ranks: Ranks,
    *,
    step: int | None = None,
    metric: float | None = None,
    texts: Mapping[str, bytes] | None = None,
    versions: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK,
    limit: int = LIMIT,
    overwrite: bool = True,
    layout: Layout = "auto",
) -> Manifest:
    """Write a checkpoint; all ranks call it together. See Note [Commit] in `storage`.

    Args:
        state: of this rank.
        target: the checkpoint's folder.
        ranks: who saves.
        step: of the training.
        metric: of the model, the same on all ranks.
        texts: further files' contents by name, as config.json; rank 0's are written.
        versions: of the libraries, for the manifest.
        block_bytes: bytes of a checksum's block.
        limit: bytes of a shared file, unless one tensor alone has more.
        overwrite: replace a checkpoint that is there. Default True.
        layout: of the files, see `probe.agreed_layout`. Default "auto".

    Raises:
        CheckpointError: it failed on some rank, on all ranks; nothing is left of it.
    """
    options: Any = {"metric": metric, "block_bytes": block_bytes, "limit": limit, "overwrite": overwrite}
    own = prepare_save(state, target, ranks, step=step, texts=texts, versions=versions, layout=layout, **options)
    rows: list[bytes] = []
    manifests: list[Manifest] = []

    def write() -> bytes:
        rows.append(write_outputs(own.part, own.outputs, own.names, own.block_bytes).tobytes())
        return b""

    def end() -> bytes:
        content, manifest = finish(own.part, own.target, own.tree, own.names, of_all)
        manifests.append(manifest)
        return content

    with in_progress(own.part) if ranks.rank == ranks.leader else nullcontext():
        ranks.agree(write, "save")
        of_all = ranks.collect(rows[0])
        content = ranks.first(end, "save")
    return manifests[0] if manifests else Manifest.from_bytes(content, str(target / MANIFEST))


def prepare_save(
    state: State,
    target: Path,
    ranks: Ranks,
    *,
    step: int | None = None,
    metric: float | None = None,
    texts: Mapping[str, bytes] | None = None,
    versions: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK,
    limit: int = LIMIT,
    overwrite: bool = True,
    layout: Layout = "auto",
) -> Prepared:
    """Plan a save and create its folder; the arguments are those of `save_state`."""
    run, target = target.parent, followed(target)
    wait_for_saves(target)
    plan = plan_save(state, str(target), step, ranks, metric=metric, limit=limit, layout=layout)
    agreed = agreed_layout(layout, target, ranks)
    arranged = (in_shards if agreed == "shards" else in_files)(plan, state, ranks)
    small = {**_own_texts(plan, agreed), **(texts or {})}
    check_values(small[STATE], sum(arranged.sizes.values()), f"save: {target / STATE}")
    nonce = ranks.first(lambda: _prepare(target, arranged.needed, overwrite), "save").decode()
    aliases: dict[str, dict[str, str]] = {}
    for (part, name), (_, first) in plan.aliases.items():
        aliases.setdefault(part, {})[name] = first
    sizes = {**arranged.sizes, **{name: len(content) for name, content in small.items()}}
    files = {name: FileSums(size, ()) for name, size in sizes.items()}
    tree = Manifest(step, arranged.parts, files, aliases, block_bytes, dict(versions or {}), metric).tree()
    leads = ranks.rank == ranks.leader
    beside = [_small(name, content) for name, content in small.items()] if leads else []
    own, names = (*arranged.outputs, *beside), (*arranged.names, *small)
    return Prepared(own, names, tree, target, part_folder(target, nonce), block_bytes, run)


def finish(
    part: Path, target: Path, tree: dict[str, Any], names: Sequence[str], rows: Iterable[bytes]
) -> tuple[bytes, Manifest]:
    """Write the manifest with all ranks' checksums, and commit.

    Args:
        part: the folder that has all files.
        target: the checkpoint's folder.
        tree: the manifest without checksums.
        names: of all files.
        rows: of each rank, as `write_outputs` gives them.

    Returns:
        The manifest's content, and what a load takes it for.

    Raises:
        InvalidCheckpointError: what the ranks wrote is not all of the files; nothing is committed.
    """
    for each in rows:
        array = np.frombuffer(each, dtype=np.int64).reshape(-1, _COLUMNS)
        for number, first, length, count, stride, value in array.tolist():
            tree["files"][names[number]]["sums"].append([first, length, count, stride, f"{value % 2**64:016x}"])
    for file in tree["files"].values():
        file["sums"].sort()
    content = sealed(tree)
    manifest = Manifest.from_bytes(content, str(target / MANIFEST))  # a load takes it
    write_small(part / MANIFEST, content)
    commit(part, target)
    return content, manifest


def write_outputs(folder: Path, listed: Iterable[Output], names: Sequence[str], block_bytes: int) -> np.ndarray:
    """Write and sync pieces, and return their checksums' rows; one file is open at a time.

    Args:
        folder: that of the save.
        listed: sorted by file.
        names: of all files; a row has the number of its file among them.
        block_bytes: bytes of a checksum's block.
    """
    rows: list[tuple[int, ...]] = []
    pending: dict[str, list[Output]] = {}
    for output in listed:
        pending.setdefault(output.file, []).append(output)
    for name, group in pending.items():
        path, number = folder / name, names.index(name)
        with opened(path, write=True) as descriptor:
            for output in group:
                data = output.source()
                for piece in output.pieces:
                    for part in _by_block(piece, block_bytes):
                        value = _write(descriptor, part, data, path)
                        rows.append((number, part.first, part.length, part.count, part.stride, value))
                del data
            sync(descriptor, path)
    array = np.array([row[:-1] for row in rows], dtype=np.int64).reshape(-1, _COLUMNS - 1)
    sums = np.array([row[-1] for row in rows], dtype=np.uint64).view(np.int64)
    return np.column_stack([array, sums])


def _by_block(piece: Piece, block_bytes: int) -> Iterator[Piece]:
    for block in range(piece.first // block_bytes, (piece.end - 1) // block_bytes + 1):
        yield from clip(piece, block * block_bytes, (block + 1) * block_bytes)


def _write(descriptor: int, piece: Piece, data: np.ndarray, path: Path) -> int:
    """Write a piece that lies in one block, and return its checksum, computed while the bytes are in the cache."""
    if piece.count > 1 and piece.stride != piece.length:
        values = gather(data, piece.local, piece.length, piece.count, piece.local_stride)
        view, length, at = values.data, piece.length, piece.first
        for start in range(0, len(view), length):
            write_at(descriptor, view[start : start + length], at, path)
            at += piece.stride
        return checksum(values)
    values = gather(data, piece.local, piece.length, piece.count, piece.local_stride)
    hasher = xxhash.xxh3_64()
    for at in range(0, len(values), _HASHED_BYTES):
        chunk = values[at : at + _HASHED_BYTES]
        hasher.update(chunk.data)
        write_at(descriptor, chunk, piece.first + at, path)
    return hasher.intdigest()


def _own_texts(plan: SavePlan, layout: Files) -> dict[str, bytes]:
    texts = {STATE: json.dumps(plan.tree, ensure_ascii=False).encode()}
    for part, files in plan.files.items():
        if len(files) > 1 and layout == "files":
            texts[f"{part}.safetensors.index.json"] = json.dumps(index_of(files), indent=2).encode()
    return texts


def _prepare(target: Path, needed: int, overwrite: bool) -> bytes:
    if target.exists() and not overwrite:
        raise FileExistsError(f"save: {target} exists, and overwrite is False")
    if target.exists() and not (target.is_dir() and ((target / MANIFEST).exists() or not any(target.iterdir()))):
        raise FileExistsError(
            f"save: {target} exists and is no checkpoint; only a checkpoint is replaced. Save under another name"
        )
    make_folder(target.parent)
    nonce = new_nonce()
    part = part_folder(target, nonce)
    part.mkdir()
    try:
        remove_rests(part)  # which may make space
        check_space(target.parent, needed)
    except BaseException:
        part.rmdir()
        raise
    return nonce.encode()


def _small(name: str, content: bytes) -> Output:
    return Output(name, lambda: np.frombuffer(content, np.uint8), (Piece(0, len(content)),))
