"""Text of a plan that names a tokenizer: tokenized once, into the run's folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hp_checkpoint.extend import Ranks
from hp_plan import DataSection, ParallelPlan
from hyper_parallel.data import DataError, find_files, has_tokens
from hyper_parallel.data.documents import text_files
from hyper_parallel.data.preparing import is_prepared, prepare
from hyper_parallel.data.tokenizing import Tokenizer, read_tokenizer

TOKENS = "tokens"
_BYTES = "bytes"
_OTHER_FILES = ("tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "tokenizer_config.json")


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
    if (Path(folder) / "tokenizer.json").is_file():
        return read_tokenizer(folder)
    others = [name for name in _OTHER_FILES if (Path(folder) / name).is_file()]
    if others and plan.model.folder_has_weights:
        message = f"{folder} has {others[0]}, but no tokenizer.json, which alone is read"
        fix = "load it with transformers and call save_pretrained(), or name another with data.tokenizer ('bytes')"
        raise DataError(message, fix)
    return None


def check_text_of(plan: ParallelPlan, section: DataSection) -> int | None:
    """Check what can be checked of text that a tokenizer reads, before it does.

    Args:
        plan: which names the tokenizer.
        section: the plan's `[data]`, or the like with other paths.

    Returns:
        The vocabulary that the model needs; None where the data is token files, or text as bytes.

    Raises:
        DataError: the tokenizer or a file can't be read, or an option has no effect.
    """
    if has_tokens(section):
        if plan.data.tokenizer is not None:
            message = f"data.tokenizer = {plan.data.tokenizer!r} is for text, but {section.paths[0]} is a token file"
            raise DataError(message, "leave it out")
        return None
    tokenizer, files = tokenizer_of(plan), text_files(find_files(section.paths))
    if tokenizer is None:
        table = next((file for file in files if file.suffix in (".parquet", ".arrow")), None)
        if table is not None:
            raise DataError(f"{table} would be read as bytes", "name a tokenizer: data.tokenizer = 'bytes', or a folder")
        return None
    if section.weights and len(section.weights) != len(section.paths):
        raise DataError(f"{len(section.paths)} paths have {len(section.weights)} weights", "give one for each path")
    return tokenizer.vocabulary


def with_tokens(plan: ParallelPlan, folder: Path, ranks: Ranks) -> ParallelPlan:
    """Return the plan with token files in place of text that has a tokenizer; rank 0 writes them, others wait.

    Files that are there, of the same text and tokenizer, are taken as they are.

    Args:
        plan: the plan.
        folder: of the run.
        ranks: which call it together.

    Raises:
        CheckpointError: it failed on rank 0; on all ranks.
    """

    def write() -> bytes:
        if has_tokens(plan.data):
            return b"null"
        tokenizer = tokenizer_of(plan)
        return json.dumps(None if tokenizer is None else _write(plan.data, tokenizer, folder / TOKENS, "data")).encode()

    written = json.loads(ranks.first(write, "tokenizing"))
    if written is None:
        return plan
    return dataclasses.replace(plan, data=_of_tokens(plan.data, written))


def _of_tokens(section: DataSection, paths: list[str]) -> DataSection:
    return dataclasses.replace(section, paths=tuple(paths), tokenizer=None, field="text")


def _write(section: DataSection, tokenizer: Tokenizer, folder: Path, name: str) -> list[str]:
    """Write a file of tokens for all paths, or one each where they have weights; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = [[path] for path in section.paths] if section.weights else [list(section.paths)]
    stems = [folder / (name if len(groups) == 1 else f"{name}-{number}") for number in range(len(groups))]
    for stem, paths in zip(stems, groups, strict=True):
        if not is_prepared(paths, stem, tokenizer, field=section.field):
            prepare(paths, stem, tokenizer, field=section.field)
    return [f"{stem}.bin" for stem in stems]
