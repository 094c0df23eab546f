"""Tied tensors: one tensor under several names, which a checkpoint may have as one or as several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.disk.files import Entry
from hp_checkpoint.disk.manifest import Manifest, entry_of
from hp_checkpoint.layout.state import Address, State
from hp_checkpoint.loading.reads import read_range
from hp_checkpoint.recovery.ranks import Ranks

_CHUNK = 8 << 20


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
    for at in range(ranks.rank * _CHUNK, entry.kind.nbytes, ranks.size * _CHUNK):
        yield read_range(entry, folder, at, min(at + _CHUNK, entry.kind.nbytes))
