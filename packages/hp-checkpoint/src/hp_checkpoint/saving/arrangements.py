"""Places of a save's tensors: in files that all ranks write together, where a probe allows it, or files of each.

Note [Layouts of files]
    "files": a file holds complete tensors, and the ranks write their pieces into it side by side. Its content follows
    from the tensors' names, shapes and dtypes alone, so the folder is a Hugging Face model.

    "shards": a rank that writes has a file of its own for each part, with the boxes that it has of the part's tensors,
    each a tensor of that file. The manifest says which boxes a tensor has. A file has one writer, which a file system
    without shared writes can take, and a run of it is a whole box, however narrow the shards are.

Note [Probe of shared writes]
    Two ranks, the first and the last, which are most likely on different hosts, write every other stripe of one file at
    the same time, sync it, and then read all of it. The stripes end within pages: a client that writes back whole pages
    loses the other's bytes there. What fails, as with an error about locks, or differs means that the file system does
    not take shared files. The answer is kept for each file system, so a program asks once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from hp_checkpoint.disk.files import PAGE, Chunk, Entry, File, Kind, packed_file
from hp_checkpoint.disk.storage import make_folder, new_nonce, opened, part_folder, read_at, sync, write_at
from hp_checkpoint.errors import InvalidCheckpointError, Ranks, describe
from hp_checkpoint.layout.state import State
from hp_checkpoint.layout.tensors import Piece, local_boxes, local_pieces, read_bytes, scale
from hp_checkpoint.saving.save_plan import SavePlan

Files = Literal["files", "shards"]
"""Where a checkpoint's tensors are; see Note [Layouts of files]."""

Layout = Literal["auto", "files", "shards"]
"""What a save is asked for: "auto" is "files" where two ranks can write one file, else "shards"."""

_BOXED = re.compile(r"\[[\d:,]*\]$")


@dataclass(frozen=True)
class Output:
    """Bytes that this rank writes into a file: where their source is, and its pieces in bytes of the file."""

    file: str
    source: Callable[[], np.ndarray]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Arrangement:
    """The files of a save that hold tensors.

    Attributes:
        names: of the files, the same on all ranks.
        needed: bytes of all of them, about.
        outputs: what this rank writes, file by file.
        sizes: of the files in bytes; in the layout "shards" on the leader alone.
        parts: the entries of each part, by name; likewise.
    """

    names: tuple[str, ...]
    needed: int
    outputs: tuple[Output, ...]
    sizes: Mapping[str, int]
    parts: Mapping[str, Mapping[str, Entry]]


def check_layout(layout: object, what: str) -> None:
    """Refuse a name that is no layout of files.

    Args:
        layout: the name.
        what: who was called with it, for the error.

    Raises:
        ValueError: it is none.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"{what}: layout must be 'auto', 'files' or 'shards', got {layout!r}")


def in_files(plan: SavePlan, state: State, ranks: Ranks) -> Arrangement:
    """Arrange tensors in shared files; see Note [Layouts of files].

    Args:
        plan: of the save.
        state: of this rank.
        ranks: who saves.
    """
    sizes = {file.name: file.size for files in plan.files.values() for file in files}
    parts = {part: {e.name: e for file in files for e in file.entries} for part, files in plan.files.items()}
    return Arrangement(tuple(sizes), sum(sizes.values()), tuple(_shared(plan, state, ranks)), sizes, parts)


def _shared(plan: SavePlan, state: State, ranks: Ranks) -> Iterator[Output]:
    for part, files in plan.files.items():
        for file in files:
            if ranks.rank == ranks.leader:
                yield _header(file)
            for entry in file.entries:
                value = state.tensors.get((part, entry.name))
                if value is not None and ranks.rank in plan.writers[part, entry.name]:
                    own = tuple(scale(piece, entry.kind.itemsize, entry.offset) for piece in local_pieces(value))
                    yield Output(file.name, lambda value=value: read_bytes(value), own)


def in_shards(plan: SavePlan, state: State, ranks: Ranks) -> Arrangement:
    """Arrange tensors in files of each rank that writes; all ranks call it together. See Note [Layouts of files].

    Args:
        plan: of the save.
        state: of this rank.
        ranks: who saves.

    Raises:
        CheckpointError: the header of a rank's file would be longer than readers take; on all ranks.
    """
    kinds = {part: {e.name: e.kind for file in files for e in file.entries} for part, files in plan.files.items()}
    names = tuple(
        shard_file(part, rank)
        for part, inner in kinds.items()
        for rank in sorted({rank for name in inner for rank in plan.writers[part, name]})
    )
    outputs: list[Output] = []
    own: dict[str, Any] = {}

    def arrange() -> bytes:
        for part, inner in kinds.items():
            file, places = _own_shard(part, inner, plan, state, ranks.rank, outputs)
            if file is not None:
                own[part] = {"file": file.name, "size": file.size, "boxes": places}
        return b""

    ranks.agree(arrange, "save")
    sizes: dict[str, int] = {}
    chunks: dict[tuple[str, str], list[Chunk]] = {}
    for text in filter(None, ranks.collect(json.dumps(own).encode())):
        for part, described in json.loads(text).items():
            sizes[described["file"]] = described["size"]
            for name, boxes in described["boxes"].items():
                chunks.setdefault((part, name), []).extend(
                    Chunk.dense(tuple(start), tuple(box), described["file"], offset) for offset, start, box in boxes
                )
    parts = {
        part: {name: Entry(name, kind, "", 0, tuple(chunks.get((part, name), ()))) for name, kind in inner.items()}
        for part, inner in kinds.items()
    }
    needed = sum(kind.nbytes for inner in kinds.values() for kind in inner.values()) + PAGE * len(names)
    return Arrangement(names, needed, tuple(outputs), sizes, parts)


def shard_file(part: str, rank: int) -> str:
    """Return the name of a rank's file.

    >>> shard_file("model", 3)
    'model-rank-00003.safetensors'
    """
    return f"{part}-rank-{rank:05d}.safetensors"


def box_name(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the name of a box of a tensor in a rank's file: the tensor's own where the box is all of it.

    >>> box_name("w", (4, 6), (0, 3), (4, 3))
    'w[0:4,3:6]'

    Args:
        name: of the tensor. One that looks like that of a box is always followed by its box.
        shape: of the tensor.
        offsets: the box's start in the tensor.
        sizes: its length along each dim.
    """
    if tuple(sizes) == tuple(shape) and not _BOXED.search(name):
        return name
    return f"{name}[{','.join(f'{at}:{at + size}' for at, size in zip(offsets, sizes, strict=True))}]"


def _own_shard(
    part: str, kinds: Mapping[str, Kind], plan: SavePlan, state: State, rank: int, outputs: list[Output]
) -> tuple[File | None, dict[str, list[Any]]]:
    """Return a rank's file of a part, and of each tensor in it the boxes, as (offset in the file, start, sizes)."""
    boxes = {
        name: local_boxes(state.tensors[part, name])
        for name in kinds
        if rank in plan.writers[part, name] and (part, name) in state.tensors
    }
    keys = {
        box_name(name, kinds[name].shape, start, sizes): Kind(kinds[name].dtype, sizes)
        for name, own in boxes.items()
        for start, sizes, _ in own
    }
    if not keys:
        return None, {}
    file = packed_file(shard_file(part, rank), sorted(keys), keys)
    offsets = {entry.name: entry.offset for entry in file.entries}
    outputs.append(_header(file))
    places: dict[str, list[Any]] = {}
    for name, own in boxes.items():
        value, kind = state.tensors[part, name], kinds[name]
        at = [offsets[box_name(name, kind.shape, start, sizes)] for start, sizes, _ in own]
        places[name] = [[offset, start, sizes] for offset, (start, sizes, _) in zip(at, own, strict=True)]
        placed = [
            scale(piece, kind.itemsize, offset)
            for offset, (_, _, pieces) in zip(at, own, strict=True)
            for piece in pieces
        ]
        outputs.append(Output(file.name, lambda value=value: read_bytes(value), tuple(placed)))
    return file, places


def _header(file: File) -> Output:
    return Output(file.name, lambda: np.frombuffer(file.header, np.uint8), (Piece(0, len(file.header)),))


_STRIPES, _STRIPE = 64, 3000  # number, and bytes of each
_known: dict[int, str] = {}
"""Why shared files fail on a file system, by its device number; "" where they don't."""


def agreed_layout(layout: Layout, target: Path, ranks: Ranks) -> Files:
    """Return the layout of files that a save has; all ranks call it together and get the same.

    With "auto" that is "files", or "shards" where two ranks can't write one file; see Note [Probe of shared writes].
    The first such save of a program warns, on the leader.

    Args:
        layout: that was asked for, the same on all ranks.
        target: the checkpoint's folder.
        ranks: who saves.

    Raises:
        CheckpointError: the folder above the target can't be written; on all ranks.
    """
    if layout != "auto":
        return layout
    if ranks.last == ranks.leader:
        return "files"
    said = ranks.first(lambda: _prepared(target), "save").decode()
    if said.startswith("="):
        return "shards" if said[1:] else "files"
    part = part_folder(target, said)

    def attempt(action: Callable[[], None]) -> bytes:
        try:
            if ranks.rank in (ranks.leader, ranks.last):
                action()
        except (OSError, InvalidCheckpointError) as error:
            return describe(error).encode()
        return b""

    first = int(ranks.rank == ranks.last)
    texts = ranks.agree(lambda: attempt(lambda: _write(part / "probe", first)), "save")
    texts += ranks.agree(lambda: attempt(lambda: _read(part / "probe")), "save")
    reason = next((text.decode() for text in texts if text), "")
    ranks.first(lambda: _ended(part, reason), "save")
    return "shards" if reason else "files"


def _prepared(target: Path) -> bytes:
    """Return what is known, after "="; else the nonce of a folder that was made for the probe."""
    make_folder(target.parent)
    known = _known.get(os.stat(target.parent).st_dev)
    if known is not None:
        return f"={known}".encode()
    nonce = new_nonce()
    part_folder(target, nonce).mkdir()
    return nonce.encode()


def _ended(part: Path, reason: str) -> bytes:
    _known[os.stat(part.parent).st_dev] = reason
    shutil.rmtree(part, ignore_errors=True)
    if reason:
        warnings.warn(
            f"{part.parent}: two ranks can't write one file here: {reason}. Checkpoints are saved with"
            " layout='shards', in files of each rank; `hyper-parallel checkpoint convert` joins them",
            RuntimeWarning,
            stacklevel=2,
        )
    return b""


def _content() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (_STRIPES, _STRIPE), np.uint8)  # no zeros, as holes are


def _write(path: Path, first: int) -> None:
    content = _content()
    with opened(path, write=True) as descriptor:
        for number in range(first, _STRIPES, 2):
            write_at(descriptor, content[number], number * _STRIPE, path)
        sync(descriptor, path)


def _read(path: Path) -> None:
    """Compare the file with what both ranks wrote.

    Raises:
        InvalidCheckpointError: it differs.
    """
    found, expected = np.empty((_STRIPES, _STRIPE), np.uint8), _content()
    with opened(path) as descriptor:
        read_at(descriptor, found.reshape(-1), 0, path)
    lost = int((found != expected).sum())
    if lost:
        raise InvalidCheckpointError(f"{lost:,} of {expected.size:,} bytes that two ranks wrote and synced were lost")
