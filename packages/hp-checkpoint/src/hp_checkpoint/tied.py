"""Tied tensors: one tensor under several names, which a checkpoint may have as one or as several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hp_checkpoint.files import Entry
from hp_checkpoint.manifest import Manifest
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.state import Address
from hp_checkpoint.streams import read_range

__all__ = ["check_tied"]

_CHUNK = 8 << 20


def check_tied(aliases: Mapping[Address, Address], manifest: Manifest, folder: Path, ranks: Ranks) -> None:
    """Refuse several values for a tensor that can hold one: names that are tied here, and saved with other bytes each.

    Equal bytes are one value, as in the many folders of the hub that have both names. All ranks call it together, and
    each compares some ranges of both.

    Args:
        aliases: of this rank's state: further names of a tensor, with the one that is loaded.
        manifest: of the checkpoint.
        folder: its folder.
        ranks: who loads.

    Raises:
        ValueError: the values differ; on all ranks.
    """
    pairs = {
        (part, *sorted((name, first)))
        for (part, name), (_, first) in aliases.items()
        if {name, first} <= manifest.parts.get(part, {}).keys()
    }
    everyones = ranks.agree(lambda: json.dumps(sorted(pairs)).encode(), "load")
    different: set[tuple[str, str, str]] = set()
    union = {tuple(pair) for each in dict.fromkeys(everyones) for pair in json.loads(each)}
    if not union:
        return

    def compare() -> bytes:
        for part, one, other in sorted(union):
            entries = manifest.parts[part]
            if not _equal(entries[one], entries[other], folder, ranks):
                different.add((part, one, other))
        return json.dumps(sorted(different)).encode()

    found = {tuple(pair) for each in dict.fromkeys(ranks.agree(compare, "load")) for pair in json.loads(each)}
    if found:
        names = ", ".join(f"{one!r} and {other!r}" for _, one, other in sorted(found)[:3])
        raise ValueError(
            f"load: {names} are one tensor here, and have different values in the checkpoint, of which one would be"
            " lost. Untie them before the load, or save the checkpoint with one of them"
        )


def _equal(one: Entry, other: Entry, folder: Path, ranks: Ranks) -> bool:
    """Tell whether two tensors of a checkpoint have the same bytes, in this rank's ranges of them."""
    if one.kind != other.kind:
        return False
    return all(np.array_equal(*each) for each in zip(_ranges(one, folder, ranks), _ranges(other, folder, ranks)))


def _ranges(entry: Entry, folder: Path, ranks: Ranks) -> Iterator[np.ndarray]:
    for at in range(ranks.rank * _CHUNK, entry.kind.nbytes, ranks.size * _CHUNK):
        yield read_range(entry, folder, at, min(at + _CHUNK, entry.kind.nbytes))
