"""The manifest: a checkpoint's tensors and files with checksums; the steps of a run with a checkpoint.

Note [Checksums]
    A checksum is xxh3-64 of the bytes that one rank wrote into one block of a file: strided runs, in the order of the
    file. So a rank computes it on the way to the file, and nothing is read again; and a reader that has a block can
    verify it without any other. The checksums of a file cover all of its bytes, its header's too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from hp_checkpoint.disk.files import (
    DTYPES,
    Chunk,
    Entry,
    Kind,
    all_whole,
    check_cover,
    check_file_name,
    check_overlaps,
    sizes_of,
    whole,
)
from hp_checkpoint.disk.storage import MANIFEST, new_nonce, part_folder, read_json, strict_json
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.layout.tensors import gather
from hp_platform.extend import uncollected

VERSION = 2  # the first with tensors in chunks; a manifest without them is of version 1
BLOCK = 8 << 20
_LARGEST_BLOCK = 1 << 30  # a reader has memory for one
_SMALL = 64 << 10  # checksums of fewer bytes are joined to units
_HASH = ',"hash":"'
_DIGEST = 16


def checksum(data: np.ndarray) -> int:
    """Return the xxh3-64 of bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def sealed(tree: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest's file; its last entry is the hash of what is before it."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    return text + f'{_HASH}{_digest(text)}"}}'.encode()


def as_json(metric: float | None) -> float | str | None:
    """Return a metric as JSON has it: as a text where it is not finite."""
    return metric if metric is None or isfinite(metric) else str(metric)


@dataclass(frozen=True, slots=True)
class FileSums:
    """A file's size, and its checksums: rows of (first, length, count, stride, checksum), ascending."""

    size: int
    rows: tuple[tuple[int, int, int, int, int], ...]

    def within(self, start: int, stop: int) -> tuple[tuple[int, int, int, int, int], ...]:
        """List the rows of a range of the file that doesn't cut a checksum's bytes."""
        low, high = (bisect_left(self.rows, (at,)) for at in (start, stop))
        return self.rows[low:high]

    def cuts(self, block_bytes: int) -> list[int]:
        """Return where units start: at blocks, and between contiguous checksums; see Note [Units] in `reads`."""
        blocks = range(0, self.size, block_bytes)
        result: list[int] = []
        for start in blocks:
            rows = self.within(start, start + block_bytes)
            result.append(start)
            if all(row[2] == 1 for row in rows):
                for first, length, *_ in rows:
                    if first - result[-1] >= _SMALL or length >= _SMALL and first > start:
                        result.append(first)
        return result


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        step: the training step; None if it has none.
        parts: the tensors of each part, by name.
        files: sizes and checksums of all files but the manifest.
        aliases: of each part, other names of tensors.
        block_bytes: bytes of a block.
        versions: versions of what wrote it.
        metric: of the model, as `Keep` compares them; None if it has none.
    """

    step: int | None
    parts: Mapping[str, Mapping[str, Entry]]
    files: Mapping[str, FileSums]
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    block_bytes: int = BLOCK
    versions: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return sealed(self.tree())

    def tree(self) -> dict[str, Any]:
        """Return the content as JSON values, without the hash."""
        chunked = any(not entry.file for inner in self.parts.values() for entry in inner.values())
        return {
            "version": VERSION if chunked else 1,
            "step": self.step,
            "metric": as_json(self.metric),
            "block_bytes": self.block_bytes,
            "versions": dict(self.versions),
            "parts": {part: {name: _packed(e) for name, e in inner.items()} for part, inner in self.parts.items()},
            "aliases": {part: dict(names) for part, names in self.aliases.items()},
            "files": {
                name: {"size": file.size, "sums": [[*row[:4], f"{row[4]:016x}"] for row in file.rows]}
                for name, file in self.files.items()
            },
        }

    @staticmethod
    def from_bytes(content: bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            content: of the file.
            where: its path, for errors.

        Raises:
            InvalidCheckpointError: its hash is wrong, it is of a newer version, or it contradicts itself.
        """
        text, mark, rest = content.rpartition(_HASH.encode())
        if not mark or rest != f'{_digest(text)}"}}'.encode():
            newer = _version_of(content)
            if newer is not None and newer > VERSION:
                raise _newer(where, newer)
            raise InvalidCheckpointError(
                f"{where}: its hash is wrong: the file was changed, or not written to its end. Load an older checkpoint"
            )
        try:
            with uncollected():  # it would go through the millions of values of a large manifest many times
                tree = strict_json(content, where)
                newer = tree.get("version")
                if isinstance(newer, int) and newer > VERSION:
                    raise _newer(where, newer)
                return _parsed(tree, where)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            if isinstance(error, InvalidCheckpointError):
                raise
            text = f"{where} is not a manifest: {type(error).__name__}: {str(error)[:300]}"
            raise InvalidCheckpointError(text) from None

    def verify(self, path: Path, start: int, data: np.ndarray) -> None:
        """Compare a range of a file, which doesn't cut a checksum's bytes, with its checksums.

        Args:
            path: of the file.
            start: the range's first byte.
            data: its bytes.

        Raises:
            InvalidCheckpointError: it differs; the text names file, block and tensors.
        """
        for row in self.files[path.name].within(start, start + len(data)):
            first, length, count, stride, expected = row
            if checksum(gather(data, first - start, length, count, stride)) != expected:
                raise self.changed(path, row)

    def changed(self, path: Path, row: tuple[int, int, int, int, int]) -> InvalidCheckpointError:
        """Return the error for bytes that differ from their checksum."""
        first, length, count, stride, _ = row
        stop = first + (count - 1) * stride + length
        return InvalidCheckpointError(
            f"{path}: bytes {first:,} to {stop:,} (block {first // self.block_bytes}) differ from their checksum:"
            f" {self._content(path.name, first, stop)} changed since the save. Load another checkpoint"
        )

    def _content(self, file: str, start: int, stop: int) -> str:
        """Name what a range of a file has."""
        entries = [entry for inner in self.parts.values() for entry in inner.values()]
        places = [(entry.name, *place) for entry in entries for of, *place in _places(entry) if of == file]
        names = list(dict.fromkeys(name for name, low, high in places if low < stop and high > start))
        if names:
            return f"tensor {', '.join(map(repr, names[:3]))}"
        return "the header" if places else "its content"


def entry_of(manifest: Manifest, address: tuple[str, str]) -> Entry | None:
    """Return the tensor of an address, its part and its name, which may be another name of it; None without."""
    part, name = address
    entries = manifest.parts.get(part, {})
    return entries.get(name) or entries.get(manifest.aliases.get(part, {}).get(name, ""))


def _places(entry: Entry) -> Iterator[tuple[str, int, int]]:
    """List where a tensor is: files with first byte and end."""
    if not entry.chunks:
        yield entry.file, entry.offset, entry.offset + entry.kind.nbytes
    for chunk in entry.chunks:
        last = sum((size - 1) * stride for size, stride in zip(chunk.sizes, chunk.strides, strict=True))
        yield chunk.file, chunk.offset, chunk.offset + (last + 1) * entry.kind.itemsize


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=_DIGEST).hexdigest()


def _newer(where: str, version: Any) -> InvalidCheckpointError:
    return InvalidCheckpointError(
        f"{where}: it has format version {version}, this hp-checkpoint reads up to {VERSION}. Update hp-checkpoint"
    )


def _version_of(content: bytes) -> int | None:
    try:
        version = strict_json(content, "").get("version")
    except InvalidCheckpointError:
        return None
    return version if isinstance(version, int) else None


def _packed(entry: Entry) -> list[Any]:
    kind: list[Any] = [entry.kind.dtype, list(entry.kind.shape)]
    if entry.file:
        return [*kind, entry.file, entry.offset]
    return [*kind, [[each.file, each.offset, list(each.offsets), list(each.sizes)] for each in entry.chunks]]


def _parsed(tree: dict[str, Any], where: str) -> Manifest:
    block_bytes = whole(tree["block_bytes"])
    if not 0 < block_bytes <= _LARGEST_BLOCK:
        raise InvalidCheckpointError(f"{where}: its blocks have {block_bytes} bytes, expected 1 to {_LARGEST_BLOCK}")
    files = {
        check_file_name(name, where): FileSums(whole(file["size"]), _rows(file["sums"]))
        for name, file in tree["files"].items()
    }
    for name, file in files.items():
        _check_cover(name, file, block_bytes, where)
    parts: dict[str, dict[str, Entry]] = {}
    by_file: dict[str, list[tuple[int, int, str]]] = {file: [] for file in files}
    for part, inner in tree["parts"].items():
        parts[part] = {}
        for name, (dtype, shape, *place) in inner.items():
            chunked = len(place) == 1
            ranges = [(file, at, tuple(box)) for file, at, _, box in place[0]] if chunked else [(*place, tuple(shape))]
            all_whole([offset for _, offset, _ in ranges])
            counts: dict[tuple[int, ...], int] = {}  # most chunks have the same sizes
            for file, offset, sizes in ranges:
                if sizes not in counts:
                    all_whole(sizes)
                    counts[sizes] = prod(sizes) * DTYPES.get(dtype, 0)
                if dtype not in DTYPES or file not in files or offset + counts[sizes] > files[file].size:
                    raise InvalidCheckpointError(
                        f"{where}: tensor {shown(name)}, {shown(dtype)} of shape {shown(list(sizes))} at"
                        f" {shown(offset)} of {shown(file)}, is in no file of it"
                    )
                by_file[file].append((offset, counts[sizes], name))
            kind = Kind(dtype, sizes_of(shape))
            parts[part][name] = _in_chunks(name, kind, place[0], where) if chunked else Entry(name, kind, *place)
    for file, stored in by_file.items():
        check_overlaps(f"{where}: {file}", stored)
    step, versions, aliases = tree["step"], tree["versions"], tree["aliases"]
    if step is not None:
        whole(step)
    for names in (versions, *aliases.values()):
        if not isinstance(names, dict) or not all(isinstance(text, str) for text in names.values()):
            raise ValueError(f"{shown(names)}, expected texts by name")
    return Manifest(step, parts, files, aliases, block_bytes, versions, _metric(tree))


def _in_chunks(name: str, kind: Kind, boxes: Sequence[Sequence[Any]], where: str) -> Entry:
    """Return a tensor that is stored in chunks, after a check that they are all of it."""
    if kind.dtype not in DTYPES:
        raise InvalidCheckpointError(f"{where}: tensor {shown(name)} has dtype {shown(kind.dtype)}, which is not known")
    chunks = tuple([Chunk.dense(tuple(start), tuple(sizes), file, offset) for file, offset, start, sizes in boxes])
    all_whole([at for chunk in chunks for at in chunk.offsets])
    entry = Entry(name, kind, "", 0, chunks)
    check_cover(where, entry, chunks)
    return entry


def _metric(tree: Mapping[str, Any]) -> float | None:
    """Return the metric of a manifest; those of older versions have none."""
    value = tree.get("metric")
    if isinstance(value, bool):
        raise ValueError(f"the metric is {value}, expected a number")
    return None if value is None else float(value)


def _rows(sums: Sequence[Sequence[Any]]) -> tuple[tuple[int, int, int, int, int], ...]:
    rows = sorted([(f, n, c, s, int(value, 16)) for f, n, c, s, value in sums])
    for column in (*zip(*rows, strict=True),)[:4]:
        all_whole(column)
    return tuple(rows)


def _check_cover(name: str, file: FileSums, block_bytes: int, where: str) -> None:
    """Check that the checksums of each block are of as many bytes as it has."""
    covered: Counter[int] = Counter()
    for first, length, count, stride, _ in file.rows:
        block, end = first // block_bytes, first + (count - 1) * stride + length
        if not length or not count or end > min((block + 1) * block_bytes, file.size):
            raise InvalidCheckpointError(
                f"{where}: a checksum of {name} is of bytes {first} to {end}, in no block of it"
            )
        covered[block] += length * count
    for block in range(-(-file.size // block_bytes)):
        count = covered[block]
        if count != min(block_bytes, file.size - block * block_bytes):
            raise InvalidCheckpointError(f"{where}: the checksums of {name} are of {count} bytes of block {block}")


_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints that stay when a new one is complete; later steps than its own are left alone.

    Those are of a training that went on from an older checkpoint: because they can't be read, or to try something else.

    Attributes:
        last: so many of the newest up to the new one. Default 2.
        every: those whose step is a multiple of it as well. Default None: no others.
        best: so many with the best metrics as well, of equal ones the older; one without a metric, or with NaN, is
            never among them. Default None: none.
        better: whether "smaller" metrics are better, as of a loss, or "larger" ones.

    Raises:
        TypeError: what is no number.
        ValueError: a number below 1, or another word.
    """

    last: int = 2
    every: int | None = None
    best: int | None = None
    better: Literal["smaller", "larger"] = "smaller"

    def __post_init__(self) -> None:
        given = (number for number in (self.last, self.every, self.best) if number is not None)
        if not all(isinstance(number, int) for number in given) or self.last is None:
            raise TypeError(f"{self}: last, every and best must be whole numbers")
        if any(number is not None and number < 1 for number in (self.last, self.every, self.best)):
            raise ValueError(f"{self}: last, every and best must be at least 1")
        if self.better not in ("smaller", "larger"):
            raise ValueError(f"{self}: better must be 'smaller' or 'larger'")

    def removed(
        self, steps: Iterable[int], saved: int | None = None, metrics: Mapping[int, float | None] | None = None
    ) -> list[int]:
        """Return the steps that don't stay.

        >>> Keep(last=1, every=100).removed([100, 150, 200, 250])
        [150]
        >>> Keep(last=1).removed([100, 150, 200, 250], saved=150)
        [100]
        >>> Keep(last=1, best=1).removed([100, 150, 200], metrics={100: 2.5, 150: 2.0, 200: 2.25})
        [100]

        Args:
            steps: that have a checkpoint.
            saved: the step that was saved just now. Default None: the newest.
            metrics: of the steps that have one, for ``best``. Default None: of none.
        """
        ordered = sorted(step for step in steps if saved is None or step <= saved)
        best = self._best(ordered, metrics or {})
        return [step for step in ordered[: -self.last] if step not in best and (not self.every or step % self.every)]

    def _best(self, steps: list[int], metrics: Mapping[int, float | None]) -> set[int]:
        known = {step: value for step in steps if (value := metrics.get(step)) is not None and not isnan(value)}
        sign = 1 if self.better == "smaller" else -1
        return set(sorted(known, key=lambda step: sign * known[step])[: self.best or 0])


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in that of a run."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """List the steps that have a checkpoint in a run's folder, ascending."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*") if (path / MANIFEST).exists())
    return sorted(int(match[1]) for match in matches if match)


def prune(folder: Path, keep: Keep, saved: int | None = None) -> list[int]:
    """Remove the checkpoints of a run that don't stay, and return their steps.

    Where metrics are compared, a checkpoint whose manifest is damaged or of a newer version stays: it may be the best.

    Args:
        folder: of the run.
        keep: what stays.
        saved: the step that was saved just now. Default None: the newest.
    """
    steps = steps_in(folder)
    metrics, unknown = ({}, set()) if keep.best is None else metrics_in(folder, steps)
    removed = [step for step in keep.removed(steps, saved, metrics) if step not in unknown]
    for step in removed:
        remove(step_folder(folder, step))
    return removed


def metrics_in(folder: Path, steps: Iterable[int]) -> tuple[dict[int, float | None], set[int]]:
    """Return the metrics of checkpoints, None where one has none, and the steps whose manifest can't be read."""
    metrics: dict[int, float | None] = {}
    unknown: set[int] = set()
    for step in steps:
        path = step_folder(folder, step) / MANIFEST
        try:
            metrics[step] = Manifest.from_bytes(read_json(path), str(path)).metric
        except FileNotFoundError:  # another process removed it
            metrics[step] = None
        except InvalidCheckpointError:
            unknown.add(step)
    return metrics, unknown


def remove(folder: Path) -> None:
    """Remove a checkpoint; what an interruption leaves is none, and the next save removes it.

    Of a link, what it leads to stays. Another process may have removed it just before: the command ``prune`` beside a
    training.
    """
    rest = part_folder(folder, new_nonce())
    with suppress(FileNotFoundError):
        if folder.is_symlink():
            folder.unlink()
            return
        os.rename(folder, rest)
    shutil.rmtree(rest, ignore_errors=True)
