"""Text of a plan that names a tokenizer, tokenized once: into the run's folder, or by a command before training."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import TOKENIZER_FILES, Ranks
from hp_plan import DataSection, ParallelPlan
from hp_platform.extend import beating
from hyper_parallel.data import check_data, has_tokens
from hyper_parallel.data.documents import (
    DOCUMENTS_IN_A_FIELD,
    DataError,
    find_files,
    read_documents,
    several_documents,
    text_files,
)
from hyper_parallel.data.examples import Examples, chat_digest
from hyper_parallel.data.opening import check_validation, validation_data
from hyper_parallel.data.tokenization.tokens import TokenFile, Tokenizer, read_tokenizer, without_end, write_tokens

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
                documents = _tokens_of(file, read_documents(file, field=field), tokenizer)
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


def _tokens_of(file: Path, documents: Iterator[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
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


TOKENS = "tokens"
_BYTES, _TOKENIZER, _CONFIG = "bytes", "tokenizer.json", "tokenizer_config.json"
_OTHER_FILES = ("tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", _CONFIG)


def tokenizer_of(plan: ParallelPlan) -> Tokenizer | None:
    """Return the tokenizer of the plan's text: its own, else that in the model's folder; None is a token a byte.

    Raises:
        DataError: it can't be read, or the model's folder has one in a format that is not read.
    """
    named, folder = plan.data.tokenizer, plan.model.path
    if named is not None:
        return read_tokenizer(None if named == _BYTES else named)
    if folder is None:
        return None
    if (Path(folder) / _TOKENIZER).is_file():
        return read_tokenizer(folder)
    others = [name for name in _OTHER_FILES if (Path(folder) / name).is_file()]
    if others and plan.model.folder_has_weights:
        message = f"{folder} has {others[0]}, but no tokenizer.json, which alone is read"
        fix = "load it with transformers and call save_pretrained(), or name another with data.tokenizer ('bytes')"
        raise DataError(message, fix)
    return None


def tokenizer_files(plan: ParallelPlan) -> dict[str, bytes]:
    """Return the files of the plan's tokenizer, for a folder from which transformers reads model and tokenizer.

    Args:
        plan: whose data names a tokenizer, or whose model's folder has one. A token a byte has no files.

    Raises:
        DataError: as `tokenizer_of`.
    """
    if plan.data.tokenizer == _BYTES or tokenizer_of(plan) is None:
        return {}
    named = Path(plan.data.tokenizer or str(plan.model.path))
    file = named / _TOKENIZER if named.is_dir() else named
    # Beside a file of another name are those of who knows which tokenizer; `read_tokenizer` reads this one of them.
    names = TOKENIZER_FILES if file.name == _TOKENIZER else (_CONFIG,)
    files = {name: (file.parent / name).read_bytes() for name in names if (file.parent / name).is_file()}
    # Without a class transformers takes the one of the model's family, which may build another tokenizer of the file.
    return {_CONFIG: b'{"tokenizer_class": "PreTrainedTokenizerFast"}', **files, _TOKENIZER: file.read_bytes()}


def agreed_files(plan: ParallelPlan, ranks: Ranks) -> dict[str, bytes]:
    """Return `tokenizer_files` as rank 0 has them, on all ranks; those of a machine may be another version's."""

    def read() -> bytes:
        files = tokenizer_files(plan)
        return json.dumps({name: base64.b64encode(content).decode() for name, content in files.items()}).encode()

    files = json.loads(ranks.first(read, "reading the tokenizer"))
    return {name: base64.b64decode(content) for name, content in files.items()}


def check_text_of(plan: ParallelPlan, section: DataSection) -> int | None:
    """Check what can be checked of text that a tokenizer reads, before it does.

    Args:
        plan: which names the tokenizer.
        section: the plan's `[data]`, or the like with other paths.

    Returns:
        The vocabulary that the model needs; None where the data is token files, or text as bytes.

    Raises:
        DataError: the tokenizer or a file can't be read, or an option has no effect.
        ImportError: a file needs a library that isn't installed.
    """
    bounded = section is plan.data and section.max_bytes != DataSection().max_bytes
    if has_tokens(section):
        if bounded:
            message = f"data.max_bytes is for text as bytes, but {section.paths[0]} has tokens"
            raise DataError(message, "leave it out", key="max_bytes")
        given = {"data.tokenizer": plan.data.tokenizer is not None, "data.field": section.field != "text"}
        for key in [key for key, is_given in given.items() if is_given and section is plan.data]:
            message = f"{key} is for text, but {section.paths[0]} is a token file"
            raise DataError(message, "leave it out", key=key.removeprefix("data."))
        return None
    tokenizer, files = tokenizer_of(plan), text_files(find_files(section.paths))
    if tokenizer is None:
        table = next((file for file in files if file.suffix in DOCUMENTS_IN_A_FIELD), None)
        if table is not None:
            raise DataError(
                f"{table} would be read as bytes", "name a tokenizer: data.tokenizer = 'bytes', or a folder"
            )
        for key, given in {"field": section.field, "format": section.format}.items():
            if given != "text":
                message = f"data.{key} = {given!r} has no effect without data.tokenizer"
                raise DataError(message, "name one, or leave it out", key=key)
        return None
    if bounded:
        message = "data.max_bytes is for text as bytes, but this text has a tokenizer"
        raise DataError(message, "leave it out", key="max_bytes")
    if section.weights and len(section.weights) != len(section.paths):
        message = f"{len(section.paths)} paths have {len(section.weights)} weights"
        raise DataError(message, "give one for each path", key="weights")
    lines = next((file for file in files if file.suffix in DOCUMENTS_IN_A_FIELD), None)
    if section.format != "text":
        for file in files:  # Its first example tells of what kind it is, and whether the template is exact.
            next(Examples(section.format, tokenizer).read(file), None)
    elif lines is not None:  # Its first document tells whether it has the field.
        next(read_documents(lines, field=section.field), None)
    return tokenizer.vocabulary


def text_notes(plan: ParallelPlan) -> list[str]:
    """Say what is likely not meant of text that a tokenizer reads: documents of which nothing tells where they end.

    Args:
        plan: without errors.
    """
    section = plan.data
    if has_tokens(section) or section.packing or section.format != "text":  # packed documents don't see one another
        return []
    tokenizer, files = tokenizer_of(plan), text_files(find_files(section.paths))
    if tokenizer is None or not several_documents(files):
        return []
    note = without_end(tokenizer)
    return [] if note is None else [f"{note}; or set data.packing = true, by which documents don't see one another"]


def with_tokens(plan: ParallelPlan, folder: Path, ranks: Ranks) -> ParallelPlan:
    """Return the plan with token files in place of text that has a tokenizer; rank 0 writes them, others wait.

    Files that are there, of the same text and tokenizer, are taken as they are.

    Args:
        plan: the plan.
        folder: of the run.
        ranks: which call it together.

    Raises:
        CheckpointError: it failed on rank 0; on all ranks.
        DataError: less text than the validation takes; on all ranks.
    """
    if plan.validation.paths:  # first: it is likely the smaller one, and may be too small
        paths = _tokenized(plan, "validation", validation_data(plan), folder, ranks)
        if paths is not None:
            plan = dataclasses.replace(plan, validation=dataclasses.replace(plan.validation, paths=paths))
            check_validation(plan)
    paths = _tokenized(plan, "data", plan.data, folder, ranks)
    if paths is not None:
        plan = dataclasses.replace(plan, data=_of_tokens(plan.data, paths))
        check_data(plan.data)
    return plan


def _tokenized(
    plan: ParallelPlan, name: str, section: DataSection, folder: Path, ranks: Ranks
) -> tuple[str, ...] | None:
    """Return the files of tokens of a section's text; None where it has tokens, or is text as bytes."""

    def write() -> bytes:
        tokenizer = None if has_tokens(section) else tokenizer_of(plan)
        with beating():  # the others wait for as long as it takes
            files = None if tokenizer is None else _write(section, tokenizer, folder / TOKENS, name)
        return json.dumps(files).encode()

    files = json.loads(ranks.first(write, "tokenizing"))
    return None if files is None else tuple(files)


def token_files(plan: ParallelPlan, folder: Path) -> DataSection | None:
    """Return the plan's data as its ranks will read it; None where they have to tokenize its text first.

    Args:
        plan: the plan.
        folder: of the run.

    Raises:
        DataError: the tokenizer or a path can't be read.
    """
    section = plan.data
    tokenizer = None if has_tokens(section) else tokenizer_of(plan)
    if tokenizer is None:
        return section
    files = _files(section, folder / TOKENS, "data")
    if not all(
        is_prepared(paths, stem, tokenizer, field=section.field, format=section.format) for stem, paths in files.items()
    ):
        return None
    return _of_tokens(section, [f"{stem}.bin" for stem in files])


def _of_tokens(section: DataSection, paths: Sequence[str]) -> DataSection:
    return dataclasses.replace(section, paths=tuple(paths), tokenizer=None, field="text")


def _files(section: DataSection, folder: Path, name: str) -> dict[Path, list[str]]:
    """Name a file of tokens for all paths, or one each where they have weights: without its suffix -> its paths."""
    groups = [[path] for path in section.paths] if section.weights else [list(section.paths)]
    stems = [folder / (name if len(groups) == 1 else f"{name}-{number}") for number in range(len(groups))]
    return dict(zip(stems, groups, strict=True))


def _write(section: DataSection, tokenizer: Any, folder: Path, name: str) -> list[str]:
    """Write the files of tokens that are not there; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _files(section, folder, name)
    for stem, paths in files.items():
        if not is_prepared(paths, stem, tokenizer, field=section.field, format=section.format):
            prepare(paths, stem, tokenizer, field=section.field, format=section.format)
    return [f"{stem}.bin" for stem in files]
