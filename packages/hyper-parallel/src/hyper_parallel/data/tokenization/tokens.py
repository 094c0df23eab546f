"""Tokens: tokenizers, and memory-mapped files in Megatron's format, `name.bin` with an index, `name.idx`.

Beside them `name.mask` may have a byte for each token: 1 where a loss is taken of it, else 0.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.documents import VOCABULARY, DataError

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
MASK = ".mask"
_CODES = {np.dtype(kind): code for code, kind in _TYPES.items()}


class TokenFile:
    """Documents of a pair of files, read where they lie.

    Args:
        path: of either file, or without the suffix.

    Attributes:
        tokens: all tokens, one document after the other; a memory map.
        starts: of each document in `tokens`, and the end of the last; int64 of shape (documents + 1,).
        mask: for each token whether a loss is taken of it, uint8; None where one is taken of all.

    Raises:
        DataError: a file is missing, or one does not fit the other.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        stem = Path(path)
        self.path = stem.with_suffix("") if stem.suffix in (".bin", ".idx") else stem
        data, index = _named(self.path, ".bin"), _named(self.path, ".idx")
        kind, lengths, ends = _read_index(index)
        self._file, self._state = data, _state(data)
        total = int(lengths.sum(dtype=np.int64))
        wanted, size = total * kind.itemsize, data.stat().st_size
        if wanted != size:
            message = f"{data} has {size} bytes, but {index.name} lists {total} tokens of {kind}, {wanted} bytes"
            raise DataError(message, "write both again: one of them is cut off, or of another data set")
        if not total:
            raise DataError(f"{data} has no tokens", "leave it out")
        self.tokens = np.memmap(data, dtype=kind, mode="r", shape=(total,))
        starts = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        self.starts: NDArray[np.int64] = starts[ends]
        self.mask: NDArray[np.uint8] | None = self._read_mask(total)

    def _read_mask(self, total: int) -> NDArray[np.uint8] | None:
        file = self.path.with_name(self.path.name + MASK)
        if not file.is_file():
            return None
        size = file.stat().st_size
        if size != total:
            message = f"{file} has {size} bytes, but {self._file.name} has {total} tokens"
            raise DataError(message, "prepare the data again: one of them is cut off, or of another data set")
        return np.memmap(file, dtype=np.uint8, mode="r", shape=(total,))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of a document."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    def trained(self, number: int) -> NDArray[np.uint8] | None:
        """Return the mask of a document; None where a loss is taken of all its tokens."""
        return None if self.mask is None else self.mask[self.starts[number] : self.starts[number + 1]]

    def check_unchanged(self) -> None:
        """Raise a DataError if the tokens have been written to since they were opened; another file may have the name.

        What is read would be neither the data that the run has begun with nor that of the new file, and beyond the end
        of a file that was cut off nothing can be read.
        """
        now = _state(self._file)
        if now != self._state and now[0] == self._state[0]:
            message = f"{self._file} has been written to since the run began, from {self._state[1]} bytes to {now[1]}"
            raise DataError(message, "go on with --resume auto once it is as it was; write new data under another name")

    def check(self, tokens: NDArray[np.int64], vocabulary: int) -> None:
        """Raise a DataError that names the first token of the file that the vocabulary lacks, if `tokens` has such."""
        if not beyond(tokens, vocabulary):
            return
        for start in range(0, len(self.tokens), 1 << 24):
            part = self.tokens[start : start + (1 << 24)].astype(np.int64)
            wrong = np.flatnonzero((part >= vocabulary) | (part < 0))
            if wrong.size:
                message = (
                    f"{self.path}.bin has token {part[wrong[0]]} at place {start + wrong[0]}, but the model's "
                    f"vocabulary has {vocabulary}"
                )
                raise DataError(message, "take the tokenizer's model, or tokenize the data with the model's tokenizer")


def _state(file: Path) -> tuple[int, int, int]:
    """Return which file has a name, and what differs once it has been written to."""
    try:
        state = os.stat(file)
    except FileNotFoundError:  # what is mapped stays
        return -1, 0, 0
    return state.st_ino, state.st_size, state.st_mtime_ns


def beyond(tokens: NDArray[np.int64], vocabulary: int) -> bool:
    """Return True if a token is not in a vocabulary of this size."""
    return bool(tokens.size) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocabulary)


def write_tokens(
    path: str | os.PathLike[str], documents: Iterable[Any], *, vocabulary: int, masked: bool = False
) -> int:
    """Write documents as a pair of files that `TokenFile`, and Megatron, read; return the number of tokens.

    The files get their names once they are complete, the index last.

    Args:
        path: of the files, without the suffix.
        documents: each a sequence of tokens; empty ones are left out.
        vocabulary: tokens take two bytes up to 65,536, four beyond.
        masked: documents are pairs of tokens and, for each, whether a loss is taken of it; a third file has the latter.

    Raises:
        DataError: a token is not in the vocabulary, or there is none.
    """
    stem = Path(path)
    kind = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
    lengths: list[int] = []
    files = [stem.with_name(stem.name + suffix) for suffix in (".bin", *([MASK] if masked else []), ".idx")]
    parts = [file.with_name(f".{file.name}.{os.getpid()}") for file in files]
    try:
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(open(part, "wb")) for part in parts[:-1]]
            for document in documents:
                tokens = np.asarray(document[0] if masked else document, dtype=np.int64)
                if beyond(tokens, vocabulary):
                    wrong = next(int(token) for token in tokens if not 0 <= token < vocabulary)
                    message = f"document {len(lengths)} has token {wrong}, but the vocabulary has {vocabulary}"
                    raise DataError(message, "give the vocabulary of the tokenizer")
                if tokens.size:
                    outputs[0].write(tokens.astype(kind).tobytes())
                    if masked:
                        outputs[1].write(np.asarray(document[1], dtype=np.uint8).tobytes())
                    lengths.append(tokens.size)
        if not lengths:
            raise DataError(f"there are no tokens to write to {files[0]}", "give files with text")
        _write_index(parts[-1], kind, np.array(lengths, dtype=np.int64))
        if not masked:
            stem.with_name(stem.name + MASK).unlink(missing_ok=True)  # of other data that had this name
        for part, file in zip(parts, files, strict=True):
            os.replace(part, file)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return sum(lengths)


def _write_index(path: Path, kind: np.dtype[Any], lengths: NDArray[np.int64]) -> None:
    if int(lengths.max()) > np.iinfo(np.int32).max:
        message = f"a document has {int(lengths.max())} tokens, more than the format's {np.iinfo(np.int32).max}"
        raise DataError(message, "cut it into several")
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * kind.itemsize
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[kind], len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(starts.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def _named(stem: Path, suffix: str) -> Path:
    path = stem.with_name(stem.name + suffix)
    if not path.is_file():
        raise DataError(
            f"the token file {path} does not exist", "hyper-parallel data prepare writes a .bin and an .idx"
        )
    return path


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens' type, the length of each sequence, and where documents begin and end, counted in sequences."""
    fix = "write it again with hyper-parallel data prepare"
    raw = path.read_bytes()
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise DataError(f"{path} is not an index of tokens: it doesn't begin with {_MAGIC!r}", fix)
    _, version, code, sequences, bounds = _HEADER.unpack_from(raw)
    if version != _VERSION or code not in _TYPES:
        message = (
            f"{path} has version {version} and type {code}; version {_VERSION} and types {sorted(_TYPES)} are read"
        )
        raise DataError(message, fix)
    wanted = _HEADER.size + 12 * sequences + 8 * bounds
    if len(raw) != wanted:
        raise DataError(f"{path} has {len(raw)} bytes, but {sequences} sequences take {wanted}", fix)
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    ends = np.frombuffer(raw, "<i8", bounds, _HEADER.size + 12 * sequences)
    ordered = bounds > 0 and ends[0] == 0 and ends[-1] == sequences and bool((np.diff(ends) >= 0).all())
    if not ordered or (sequences and int(lengths.min()) < 0):
        raise DataError(f"{path} lists documents out of order", fix)
    return np.dtype(_TYPES[code]), lengths, ends


_CONFIG = "tokenizer_config.json"


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
        vocabulary: number of tokens.
        end: the token after each document; None adds none.
        digest: tells tokenizers apart.
        folder: of its files, among them the chat template; None without files.
    """

    vocabulary: int
    end: int | None
    digest: str
    folder: Path | None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special ones."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that a model goes on with, the special ones before it included."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, that of special ones with `special` alone."""
        ...


def read_tokenizer(path: str | None, *, end: str | None = None) -> Tokenizer:
    """Read a tokenizer.

    Args:
        path: a `tokenizer.json`, or a folder that has one, such as a model's; None is a token a byte.
        end: text of the token after each document; None takes the `eos_token` that the folder's
            `tokenizer_config.json` names, if any.

    Raises:
        DataError: there is no such file, it can't be read, or it lacks the token.
        ImportError: the library tokenizers isn't installed.
    """
    if path is None:
        if end is not None:
            raise DataError(f"bytes have no token {end!r}", "give a tokenizer, or no end token")
        return Bytes()
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(
            f"the tokenizer {file} does not exist", "give a tokenizer.json, or a folder that has one", key="tokenizer"
        )
    return _read(file.absolute(), end, tuple(map(_tokenizer_state, (file, file.parent / _CONFIG))))


def without_end(tokenizer: Tokenizer) -> str | None:
    """Say what a tokenizer without an end token makes of several documents; None where it has one.

    Args:
        tokenizer: that reads them. Bytes have no token that could stand for an end.
    """
    if tokenizer.end is not None or tokenizer.folder is None:
        return None
    config = tokenizer.folder / _CONFIG
    which = "names no eos_token" if config.is_file() else "does not exist"
    return f"documents run together, with no token at their end: {config} {which}. Name one there"


def _tokenizer_state(file: Path) -> tuple[int, ...]:
    """Return what differs once a file has been written again; nothing where there is none."""
    if not file.is_file():
        return ()
    state = file.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


@functools.lru_cache(maxsize=2)  # a plan names one; to read that of a large vocabulary takes a second
def _read(file: Path, end: str | None, state: tuple[tuple[int, ...], ...]) -> Tokenizer:
    return _FromFile(file, end)


class Bytes:
    """A token a byte of UTF-8."""

    vocabulary: int = VOCABULARY
    end: int | None = None
    digest: str = "bytes"
    folder: Path | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode("utf-8", "surrogateescape")) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return self.encode([text])[0]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text; bytes that are none become replacement characters."""
        return bytes(tokens).decode("utf-8", "replace")


class _FromFile:
    """A tokenizer of the library tokenizers."""

    def __init__(self, file: Path, end: str | None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise ImportError("a tokenizer.json needs tokenizers: pip install 'hyper-parallel[data]'") from error
        raw = file.read_bytes()
        try:
            self._tokenizer = Library.from_buffer(raw)
        except Exception as error:  # The library raises plain Exceptions.
            message = f"the tokenizer {file} can't be read: {error}"
            raise DataError(message, "give a tokenizer.json that transformers has saved", key="tokenizer") from error
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        name = end if end is not None else _named_end(file.parent / _CONFIG)
        self.end = None if name is None else self._tokenizer.token_to_id(name)
        if name is not None and self.end is None:
            message = f"the tokenizer {file} has no token {name!r}"
            raise DataError(message, "give the text of one of its special tokens", key="tokenizer")
        self.digest = hashlib.sha256(raw + repr(self.end).encode()).hexdigest()
        self.folder: Path | None = file.parent

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, on as many threads as the library takes (RAYON_NUM_THREADS)."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            wrong = next((text for text in texts if not text.isascii() and "\\udc" in ascii(text)), "")
            message = f"the document that begins with {ascii(wrong[:40])} is not UTF-8, so the tokenizer can't read it"
            raise DataError(message, "convert its file, or leave it out") from error
        return [encoding.ids for encoding in encodings]

    def encoding(self, text: str) -> Any:
        """Return tokens (`ids`) and the characters of each (`offsets`), without special ones beyond the text's."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that a model goes on with, the special ones before it included."""
        (own,) = self.encode([text])
        whole = self._tokenizer.encode(text).ids
        places = (place for place in range(len(whole) - len(own) + 1) if whole[place : place + len(own)] == own)
        return [*whole[: next(places, 0)], *own]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text, that of special tokens with `special` alone."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)


def _named_end(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        message = f"{config} can't be read: {error}"
        raise DataError(message, "mend it, or give the end token by --end", key="tokenizer") from error
    return named.get("content") if isinstance(named, dict) else named
