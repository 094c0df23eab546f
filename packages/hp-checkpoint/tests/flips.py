"""Flipped bits of a checkpoint: what a load says of each, with and without the bytes that it did not read."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load
from hp_checkpoint.disk.manifest import Manifest, _places
from hp_checkpoint.layout.tensors import array_of


def arrays(folder: Path) -> dict[str, Any]:
    """Return a state of arrays for all tensors of a checkpoint, by part."""
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), "m")
    return {
        part: {name: array_of(name, entry.kind) for name, entry in inner.items()}
        for part, inner in manifest.parts.items()
    }


class Reads:
    """The ranges of files that were read while it is entered."""

    def __enter__(self) -> Reads:
        self._own, self._ranges = os.preadv, []

        def preadv(descriptor: int, buffers: Any, offset: int) -> int:
            count = self._own(descriptor, buffers, offset)
            self._ranges.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), offset, offset + count))
            return count

        os.preadv = preadv
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._own

    def has(self, file: str, at: int) -> bool:
        """Tell whether a byte was read."""
        return any(name == file and start <= at < stop for name, start, stop in self._ranges)


def flip(folder: Path, choice: random.Random) -> tuple[bool, bool]:
    """Flip a bit anywhere, load some of the tensors and then all, and put the bit back.

    Returns:
        Whether the partial load has read the byte, and whether the byte is a tensor's.

    Raises:
        AssertionError: a load took a byte that it had read, or its error does not name file, block and tensor.
    """
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), "m")
    path = choice.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    at = choice.randrange(len(content))
    changed = bytearray(content)
    changed[at] ^= 1 << choice.randrange(8)
    entries = [e for inner in manifest.parts.values() for e in inner.values()]
    inside = [e.name for e in entries for file, low, high in _places(e) if file == path.name and low <= at < high]
    truth, complete = arrays(folder), arrays(folder)
    assert _error_of(truth, folder, "read") is None
    part = {key: dict(choice.sample(sorted(inner.items()), 1)) for key, inner in arrays(folder).items()}
    path.write_bytes(changed)
    try:
        with Reads() as reads:
            said = _error_of(part, folder, "read")
        was_read = reads.has(path.name, at)
        if was_read:
            _check(said, path.name, inside, at, manifest)
        else:
            assert said is None, said
            for key, inner in part.items():
                for name, array in inner.items():
                    assert array.tobytes() == truth[key][name].tobytes(), name
        _check(_error_of(complete, folder, "all"), path.name, inside, at, manifest)
    finally:
        path.write_bytes(content)
    return was_read, bool(inside)


def _error_of(parts: dict[str, Any], folder: Path, verify: Any) -> str | None:
    state = {part: _nested(inner) for part, inner in parts.items()}
    try:
        load(state, checkpoint_id=folder, no_dist=True, verify=verify)
    except (CheckpointError, InvalidCheckpointError) as error:
        return str(error)
    return None


def _nested(inner: dict[str, Any]) -> dict[str, Any]:
    """Return the dictionaries that names with dots are of."""
    result: dict[str, Any] = {}
    for name, array in inner.items():
        *path, last = name.split(".")
        node = result
        for key in path:
            node = node.setdefault(key, {})
        node[last] = array
    return result


def _check(said: str | None, file: str, inside: list[str], at: int, manifest: Manifest) -> None:
    assert said is not None, f"a flip of byte {at} of {file} was not seen"
    assert file in said, said
    if file == "manifest.json":
        assert "its hash is wrong" in said or "format version" in said, said
        return
    assert f"(block {at // manifest.block_bytes}) differ from their checksum" in said, said
    if file.endswith(".safetensors"):
        content = f"tensor {inside[0]!r}" if inside else "the header"
        assert f"{content} changed since the save" in said, said
