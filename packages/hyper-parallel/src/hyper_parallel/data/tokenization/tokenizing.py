"""Tokenizers: a `tokenizer.json` on this machine, or bytes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.data.documents import VOCABULARY, DataError

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
    return _read(file.absolute(), end, tuple(map(_state, (file, file.parent / _CONFIG))))


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


def _state(file: Path) -> tuple[int, ...]:
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
