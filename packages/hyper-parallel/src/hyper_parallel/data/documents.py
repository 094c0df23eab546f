"""Text and documents: files of bytes, text, JSON lines, Parquet and Arrow, and the error of data that can't be used."""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DataError(ValueError):
    """Data that can't be trained on.

    Attributes:
        message: what is wrong with it.
        fix: what to do.
        key: of a plan's `[data]` that is wrong, "paths" for what the files hold.
    """

    def __init__(self, message: str, fix: str, *, key: str = "paths") -> None:
        self.message, self.fix, self.key = message, fix, key
        super().__init__(f"{message}; {fix}")


DOCUMENTS_IN_A_FIELD = (".jsonl", ".parquet", ".arrow")


def read_documents(file: Path, *, field: str) -> Iterator[str]:
    """Read a file's documents one by one.

    `.jsonl` has one a line, `.parquet` and `.arrow` (a stream, as datasets saves to disk) have one a row, in the column
    `field`; any other file is one document.

    Args:
        file: where they are.
        field: the name of the text in a line or row.

    Raises:
        DataError: a line or the file can't be read, or has no such text.
        ImportError: the file is Parquet or Arrow and pyarrow isn't installed.
    """
    if file.suffix == ".jsonl":
        yield from _lines(file, field)
    elif file.suffix in (".parquet", ".arrow"):
        yield from _rows(file, field)
    else:
        # Bytes that are no UTF-8 come back as they were when the tokens are bytes.
        yield file.read_bytes().decode("utf-8", "surrogateescape")


def text_files(files: Sequence[Path]) -> list[Path]:
    """Leave out the descriptions that datasets saves beside its Arrow files."""
    arrows = {file.parent for file in files if file.suffix == ".arrow"}
    return [file for file in files if file.suffix != ".json" or file.parent not in arrows]


def several_documents(files: Sequence[Path]) -> bool:
    """Return True if files may have more than one document."""
    return len(files) > 1 or any(file.suffix in DOCUMENTS_IN_A_FIELD for file in files)


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the objects of JSON lines, or the rows of a Parquet or Arrow file, each with its place for an error.

    Args:
        file: where they are.

    Raises:
        DataError: the file can't be read, a line is no object, or the file is of another kind.
        ImportError: the file is Parquet or Arrow and pyarrow isn't installed.
    """
    if file.suffix == ".jsonl":
        yield from _objects(file)
    elif file.suffix in (".parquet", ".arrow"):
        with _table(file) as (_, batches):
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{file}, row {number},", row) for number, row in enumerate(rows))
    else:
        kinds = ", ".join(DOCUMENTS_IN_A_FIELD)
        raise DataError(f"{file} is text, which has no rows", f"give files that have: {kinds}")


def _lines(file: Path, field: str) -> Iterator[str]:
    for where, value in _objects(file):
        text = value.get(field)
        if not isinstance(text, str):
            has = ", ".join(map(repr, value)) or "nothing"
            message = (
                f"{where} has {type(text).__name__} in {field!r}, not text"
                if field in value
                else f"{where} has no {field!r}; it has {has}"
            )
            raise DataError(message, "name the text's key with --field, or data.field in a plan")
        yield text


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(file, encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                where = f"{file}, line {number},"
                try:
                    value: Any = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{where} is not JSON: {error}", "mend the line, or leave the file out") from error
                if not isinstance(value, dict):
                    message = f"{where} is a {type(value).__name__}, not an object"
                    raise DataError(message, 'write {"text": ...}, or the keys of data.format')
                yield where, value
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8: {error}", "convert it, or leave it out") from error


def _rows(file: Path, field: str) -> Iterator[str]:
    with _table(file) as (names, batches):
        if field not in names:
            message = f"{file} has no column {field!r}; it has {', '.join(names)}"
            raise DataError(message, "name the text's column with --field, or data.field in a plan")
        values = chain.from_iterable(batch.column(field).to_pylist() for batch in batches)
        for number, value in enumerate(values):
            if not isinstance(value, str):
                message = f"{file}, row {number}, has {type(value).__name__} in {field!r}, not text"
                raise DataError(message, "name a column of strings with --field, or data.field in a plan")
            yield value


@contextmanager
def _table(file: Path) -> Iterator[tuple[Sequence[str], Iterable[Any]]]:
    """Open a Parquet or Arrow file; yield the names of its columns, and its batches."""
    try:
        names = ("pyarrow", "pyarrow.ipc", "pyarrow.parquet")
        pyarrow, ipc, parquet = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow: pip install 'hyper-parallel[data]'") from error
    try:
        with pyarrow.memory_map(str(file)) as source:
            if file.suffix == ".parquet":
                table = parquet.ParquetFile(source)
                yield table.schema_arrow.names, table.iter_batches()
            else:
                batches = ipc.open_stream(source)
                yield batches.schema.names, batches
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} can't be read: {error}", "leave it out, or write it again") from error


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
