"""Text as bytes: the files that are trained on."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.errors import DataError

VOCABULARY = 256
_GIVE = "give files or folders of text"
# Its tests are not installed everywhere, and some are not UTF-8 on purpose, which no tokenizer reads.
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def find_files(paths: Sequence[str]) -> list[Path]:
    """List the files to read, sorted, so that every rank reads the same text.

    Args:
        paths: files and folders (all files inside, hidden ones left out); none means the Python sources of the
            running interpreter's standard library, without its tests.

    Raises:
        DataError: a path doesn't exist, a file is empty, a folder has no files.
    """
    if not paths:
        return list(_standard_library())
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            if not inside:
                raise DataError(f"the data folder {path} has no files", _GIVE)
            files += inside
        elif not path.exists():
            tokens = path.with_name(f"{path.name}.bin")
            fix = f"name {tokens} for the tokens there" if tokens.exists() else _GIVE
            raise DataError(f"the data file {path} does not exist", fix)
        elif path.stat().st_size == 0:
            raise DataError(f"the data file {path} is empty (0 bytes)", "leave it out, or give another")
        else:
            files.append(path)
    return files


@cache
def _standard_library() -> tuple[Path, ...]:
    found: list[Path] = []
    for folder, inside, files in os.walk(sysconfig.get_paths()["stdlib"]):
        # Other packages are in there too, often many more files than the library's own.
        inside[:] = [name for name in inside if name not in _NOT_STANDARD_LIBRARY]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return tuple(sorted(path for path in found if path.is_file()))


def check_text(paths: Sequence[str], *, sequence_length: int, max_bytes: int) -> int:
    """Count the bytes of text in `paths`, up to `max_bytes`; at least one sample's.

    Raises:
        DataError: nothing to read, a file can't be read, or less text than one sample.
    """
    files = find_files(paths)
    for file in files:
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise DataError(f"the data file {file} can't be read: {error.strerror}", "leave it out") from error
    size = min(max_bytes, sum(file.stat().st_size for file in files))
    if size < sequence_length:
        shown = ", ".join(paths) if paths else "the standard library's sources"
        message = f"{shown} has {size} bytes of text, but one sample takes {sequence_length}"
        raise DataError(message, f"give more, or make data.sequence_length at most {size}")
    return size


def read_text(paths: Sequence[str], *, max_bytes: int) -> NDArray[np.uint8]:
    """Read all the text, a token a byte.

    Args:
        paths: as for `find_files`.
        max_bytes: read no more than this.
    """
    return np.frombuffer(_read(find_files(paths), max_bytes), dtype=np.uint8)


def _read(files: Iterable[Path], max_bytes: int) -> bytes:
    text = bytearray()
    for file in files:
        with open(file, "rb") as source:
            text += source.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
    return bytes(text)
