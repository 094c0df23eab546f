"""Loading: folders opened; each byte is read by one rank, verified, and sent to the ranks that want it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_checkpoint.disk.files import Entry, check_file_name, header_length, read_header
from hp_checkpoint.disk.manifest import MANIFEST, FileSums, Manifest, entry_of
from hp_checkpoint.disk.storage import local_folder, opened, read_at, read_json, strict_json
from hp_checkpoint.errors import CheckpointError, InvalidCheckpointError, Ranks, describe, shown
from hp_checkpoint.formats.dcp import dcp_manifest, is_dcp
from hp_checkpoint.formats.mindspore_files import mindspore_file
from hp_checkpoint.formats.torch_files import torch_file
from hp_checkpoint.layout.state import Address, State
from hp_checkpoint.layout.tensors import kind_of, stored_pieces
from hp_checkpoint.loading.reads import COLUMNS, Units, exchange, read_range, request_rows
from hp_checkpoint.loading.transfers import CastTarget, Request, Target, Transfers, casts
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


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
TORCH_FILES = (".pt", ".pth", ".bin")
_PICKLES = ("*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt")


def open_checkpoint(folder: Path) -> Manifest:
    """Read the manifest of a folder; that of a model's folder without one is made of its files' headers.

    Raises:
        FileNotFoundError: there is no such folder.
        InvalidCheckpointError: it is a file, no checkpoint, or a damaged one.
        ValueError: it is a URL.
    """
    local_folder(folder)
    if folder.is_file():
        raise InvalidCheckpointError(
            f"{folder} is a file, and checkpoints are folders: `hyper-parallel checkpoint convert {folder} TARGET`"
            " writes one with the tensors of a file of safetensors, torch.save or mindspore.save_checkpoint, and"
            " hp_checkpoint.convert_full_checkpoint_to_dcp one with all of its values"
        )
    if not folder.is_dir():
        beside = sorted(each.name for each in folder.parent.glob("*") if (each / MANIFEST).exists())
        has = f"; {folder.parent} has the checkpoints {', '.join(beside[-5:])}" if beside else ""
        raise FileNotFoundError(f"there is no checkpoint {folder}{has}")
    if os.path.lexists(folder / MANIFEST):
        return Manifest.from_bytes(read_json(folder / MANIFEST), str(folder / MANIFEST))
    if (folder / _INDEX).exists():
        what = str(folder / _INDEX)
        names = strict_json(read_json(folder / _INDEX), what).get("weight_map")
        if not isinstance(names, dict):
            raise InvalidCheckpointError(f"{what} has the weight_map {shown(names)}, expected files by tensors")
        files = sorted({check_file_name(name, what) for name in names.values()})
        return _of_headers(folder, files)
    if (folder / _SINGLE).exists():
        return _of_headers(folder, [_SINGLE])
    if is_dcp(folder):
        return dcp_manifest(folder)
    pickles = [each.name for pattern in _PICKLES for each in folder.glob(pattern)]
    if pickles:
        raise InvalidCheckpointError(
            f"{folder} has {', '.join(sorted(pickles)[:3])}, which are pickles: loading them would run code, so they"
            " are refused. `hyper-parallel checkpoint convert FILE TARGET` reads one of torch.save without running it;"
            " else load it with the library that wrote it, and save the state with hp_checkpoint.save or safetensors"
        )
    within = sorted(each.parent for pattern in ("*", "*/*") for each in folder.glob(f"{pattern}/{MANIFEST}"))
    has = f", but the checkpoints {', '.join(map(str, within[-5:]))}: name one of them" if within else ""
    raise InvalidCheckpointError(f"{folder} is no checkpoint: it has neither {MANIFEST} nor {_SINGLE}{has}")


def open_source(path: Path) -> tuple[Manifest, Path, Any]:
    """Return the manifest of a checkpoint's folder or of a file, the folder, and the state that a file has.

    A file is one of safetensors, of `torch.save` or of `mindspore.save_checkpoint`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        InvalidCheckpointError: it is damaged, or a file of another format.
    """
    if not path.is_file():
        return open_checkpoint(path), path, None
    if path.suffix == ".safetensors":
        return _of_headers(path.parent, [path.name]), path.parent, None
    if path.suffix in TORCH_FILES:
        manifest, state = torch_file(path)
        return manifest, path.parent, state
    if path.suffix == ".ckpt":
        return mindspore_file(path), path.parent, None
    raise InvalidCheckpointError(
        f"{path} is a file of another format; expected .safetensors, {', '.join(TORCH_FILES)} of torch.save, .ckpt of"
        " MindSpore, or a checkpoint's folder"
    )


def has_safetensors(folder: Path) -> bool:
    """Tell whether a folder has a model in safetensors, under the names of the Hugging Face hub."""
    return (folder / _INDEX).exists() or (folder / _SINGLE).exists()


def _of_headers(folder: Path, files: Iterable[str]) -> Manifest:
    entries: dict[str, Entry] = {}
    sizes: dict[str, FileSums] = {}
    for name in files:
        path = folder / name
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            prefix = np.empty(min(8, size), np.uint8)
            read_at(descriptor, prefix, 0, path)
            try:
                content = np.empty(header_length(name, size, prefix.tobytes()), np.uint8)
                read_at(descriptor, content, 8, path)
                listed = read_header(name, size, prefix.tobytes(), content.tobytes())
            except InvalidCheckpointError as error:
                raise InvalidCheckpointError(f"{folder}: {error}") from None
        for entry in listed:
            if entry.name in entries:
                raise InvalidCheckpointError(
                    f"{folder}: tensor {shown(entry.name)} is in {entries[entry.name].file} and {name}"
                )
            entries[entry.name] = entry
        sizes[name] = FileSums(size, ())
    return Manifest(None, {"model": entries}, sizes)


_COMPARED_BYTES = 8 << 20


def checked_tensors(state: State, manifest: Manifest, folder: Path, ranks: Ranks) -> dict[Address, Any]:
    """Return the tensors to load by address, each once, under a name that the checkpoint has.

    Several values for a tensor that can hold one are refused: names that are tied here, and saved with other bytes
    each. Equal bytes are one value, as in the many folders of the hub that have both names. All ranks call it together,
    and each compares some ranges of both.

    Args:
        state: of this rank, made by `flatten` to load it.
        manifest: of the checkpoint.
        folder: its folder.
        ranks: who loads.

    Raises:
        ValueError: the values differ; on all ranks.
    """
    names: dict[Address, list[Address]] = {first: [first] for first in state.tensors}
    for alias, first in state.aliases.items():
        names[first].append(alias)
    pairs: set[tuple[Address, Address]] = set()
    tensors: dict[Address, Any] = {}
    for first, addresses in names.items():
        there = [each for each in addresses if entry_of(manifest, each) is not None] or [first]
        tensors[there[0]] = state.tensors[first]
        own = entry_of(manifest, there[0])
        pairs |= {
            (min(each, there[0]), max(each, there[0])) for each in there[1:] if entry_of(manifest, each) is not own
        }
    everyones = ranks.agree(lambda: json.dumps(sorted(pairs)).encode(), "load")
    union = {tuple(map(tuple, pair)) for each in dict.fromkeys(everyones) for pair in json.loads(each)}
    if not union:
        return tensors

    def compare() -> bytes:
        entries = {each: entry_of(manifest, each) for pair in union for each in pair}
        different = [pair for pair in sorted(union) if not _equal(entries[pair[0]], entries[pair[1]], folder, ranks)]
        return json.dumps(different).encode()

    found = {
        tuple(map(tuple, pair)) for each in dict.fromkeys(ranks.agree(compare, "load")) for pair in json.loads(each)
    }
    if found:
        texts = ", ".join(f"{_named(one, other)!r} and {_named(other, one)!r}" for one, other in sorted(found)[:3])
        raise ValueError(
            f"load: {texts} are one tensor here, and have different values in the checkpoint, of which one would be"
            " lost. Untie them before the load, or save the checkpoint with one of them"
        )
    return tensors


def _named(address: Address, other: Address) -> str:
    return address[1] if address[0] == other[0] else ".".join(address)


def _equal(one: Entry | None, other: Entry | None, folder: Path, ranks: Ranks) -> bool:
    """Tell whether two tensors of a checkpoint have the same bytes, in this rank's ranges of them."""
    if one is None or other is None or one.kind != other.kind:
        return False
    return all(np.array_equal(*each) for each in zip(_ranges(one, folder, ranks), _ranges(other, folder, ranks)))


def _ranges(entry: Entry, folder: Path, ranks: Ranks) -> Iterator[np.ndarray]:
    for at in range(ranks.rank * _COMPARED_BYTES, entry.kind.nbytes, ranks.size * _COMPARED_BYTES):
        yield read_range(entry, folder, at, min(at + _COMPARED_BYTES, entry.kind.nbytes))
