"""Tokenize files once, before training."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hyper_parallel.data.documents import read_documents, text_files
from hyper_parallel.data.errors import DataError
from hyper_parallel.data.examples import Examples, chat_digest
from hyper_parallel.data.text import find_files
from hyper_parallel.data.tokenization.tokenizing import Tokenizer
from hyper_parallel.data.tokenization.tokens import TokenFile, write_tokens

_AT_ONCE = 256  # documents


@dataclass(frozen=True)
class Prepared:
    """A pair of token files and what they were made from.

    Attributes:
        path: of the files, without the suffix.
        tokens: their number.
        documents: their number; empty ones don't count.
        vocabulary: of the tokenizer.
        tokenizer: its digest.
        field: the text's name in JSON lines and tables.
        format: of the data, as `[data] format`.
        sources: the SHA-256 of each file that was read.
    """

    path: str
    tokens: int
    documents: int
    vocabulary: int
    tokenizer: str
    field: str
    format: str
    sources: dict[str, str]


def prepare(
    paths: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    format: str = "text",
    progress: Callable[[Path, int], None] = lambda file, tokens: None,
) -> Prepared:
    """Tokenize files into one pair of token files, `out.bin` and `out.idx`, with `out.json` to say what they are.

    Each file's tokens are kept in the folder `out.parts` until all are there, under the digests of the file and the
    tokenizer: a call that was interrupted goes on where it was.

    Args:
        paths: files and folders.
        out: of the files, without the suffix.
        tokenizer: what tokenizes; its `end` follows each document.
        field: the text's name in JSON lines and Parquet files.
        format: what a row is: "text", or examples to fine-tune on, as `[data] format` names them; of these `out.mask`
            tells which tokens are trained.
        progress: called after each file with its number of tokens.

    Raises:
        DataError: a file can't be read, or nothing has any text.
    """
    stem = Path(out)
    parts = stem.with_name(stem.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    files = text_files(find_files(paths))
    digests, masked = {str(file): _digest(file) for file in files}, format != "text"
    digest = chat_digest(tokenizer, format)
    done: list[TokenFile] = []
    for file in files:
        of_part = hashlib.sha256(f"{digests[str(file)]} {digest} {field} {file.suffix}".encode()).hexdigest()
        part = parts / of_part[:32]
        if not part.with_name(part.name + ".idx").exists():
            documents: Iterator[Any]
            if masked:
                documents = ((each.tokens, each.trained) for each in Examples(format, tokenizer).read(file))
            else:
                documents = _tokenized(file, read_documents(file, field=field), tokenizer)
            first = next(documents, None)
            if first is None:
                continue
            write_tokens(part, chain([first], documents), vocabulary=tokenizer.vocabulary, masked=masked)
        done.append(TokenFile(part))
        progress(file, len(done[-1].tokens))
    if not done:
        raise DataError(f"the {len(files)} files have no text", "give files with text")
    places = ((part, number) for part in done for number in range(len(part)))
    together = ((p.document(n), p.trained(n)) if masked else p.document(n) for p, n in places)
    tokens = write_tokens(stem, together, vocabulary=tokenizer.vocabulary, masked=masked)
    counts = tokens, sum(map(len, done))
    prepared = Prepared(str(stem), *counts, tokenizer.vocabulary, digest, field, format, digests)
    stem.with_name(stem.name + ".json").write_text(json.dumps(asdict(prepared), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(parts)
    return prepared


def is_prepared(
    paths: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    format: str = "text",
) -> bool:
    """Return True if `prepare` with the same arguments would write what is there.

    Args:
        paths: as `prepare` takes them.
        out: as `prepare` takes it.
        tokenizer: as `prepare` takes it.
        field: as `prepare` takes it.
        format: as `prepare` takes it.

    Raises:
        DataError: a path does not exist.
    """
    stem = Path(out)
    try:
        described = json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8"))
        TokenFile(stem)
    except (OSError, ValueError):  # DataError among them
        return False
    sources = {str(file): _digest(file) for file in text_files(find_files(paths))}
    digest = chat_digest(tokenizer, format)
    expected = {"tokenizer": digest, "field": field, "format": format, "sources": sources}
    return isinstance(described, dict) and expected.items() <= {"format": "text", **described}.items()


def _tokenized(file: Path, documents: Iterator[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of a file's documents that have any, the end token after them."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    while some := list(islice(documents, _AT_ONCE)):
        try:
            encoded = tokenizer.encode(some)
        except DataError as error:
            raise DataError(f"{file}: {error.message}", error.fix) from error
        yield from (tokens + end for tokens in encoded if tokens)


def _digest(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
