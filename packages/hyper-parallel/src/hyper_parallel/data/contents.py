"""What the data of a run is, so that another under the same name is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_plan import DataSection
from hyper_parallel.data.opening import Opened, open_data

_BLOCK, _BLOCKS = 4096, 256


@dataclass(frozen=True)
class Content:
    """What a path of the data holds.

    Attributes:
        path: as the plan names it; empty for all text together.
        tokens: how many.
        documents: of a token file; None for text.
        digest: differs where the tokens or documents do. Of tokens that take more than 1 MiB, 256 blocks of 4 KiB are
            looked at, the first, the last and those evenly between, so a change to a few tokens in place may be missed.
    """

    path: str
    tokens: int
    documents: int | None
    digest: str


def contents(section: DataSection, data: Opened | None = None) -> tuple[Content, ...]:
    """Describe the data of a plan.

    Args:
        section: of the plan.
        data: what `open_data` has opened of it; None opens it.

    Raises:
        DataError: as `check_data`.
    """
    opened = open_data(section) if data is None else data
    if not isinstance(opened, list):
        return (Content("", len(opened), None, _digest([opened])),)
    described = []
    for path, file in zip(section.paths, opened, strict=True):
        starts = np.ascontiguousarray(file.starts, "<i8")
        masks = [] if file.mask is None else _blocks(file.mask)
        digest = _digest([np.asarray([file.tokens.itemsize], "<i8"), starts, *_blocks(file.tokens), *masks])
        described.append(Content(str(Path(path)), len(file.tokens), len(file), digest))
    return tuple(described)


def _blocks(tokens: Any) -> Iterable[Any]:
    """Return the tokens, or evenly spaced blocks of them where there are many."""
    size = _BLOCK // tokens.itemsize
    if len(tokens) <= _BLOCKS * size:
        return [tokens]
    return [tokens[start : start + size] for start in np.linspace(0, len(tokens) - size, _BLOCKS).astype(np.int64)]


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
