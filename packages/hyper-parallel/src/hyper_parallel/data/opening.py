"""The training data of a plan, opened, that to validate on too, and its content, so that other data is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_plan import DataSection, ParallelPlan
from hyper_parallel.data.documents import VOCABULARY, DataError, check_text, read_text
from hyper_parallel.data.packing import Cut, Joined, Packed, Padded
from hyper_parallel.data.samples import Mixture, Rows, Samples, Windows
from hyper_parallel.data.tokenization.tokens import Bytes, TokenFile, beyond

_SUFFIXES = (".bin", ".idx")


Opened = list[TokenFile] | NDArray[np.uint8]
"""The token files of a plan, or the bytes of its text."""


def open_data(section: DataSection) -> Opened:
    """Open the token files of a plan's `[data]`, or read its text.

    Raises:
        DataError: as `check_data`.
    """
    if has_tokens(section):
        return [TokenFile(path) for path in section.paths]
    return read_text(section.paths, max_bytes=section.max_bytes)


def open_samples(
    section: DataSection, *, seed: int, vocabulary: int | None = None, data: Opened | None = None
) -> Samples:
    """Open the samples of a plan's `[data]`: each once an epoch, in an order that the seed decides, or the files'.

    Args:
        section: of the plan.
        seed: of the order, which `section.shuffle = False` leaves as it is in the files.
        vocabulary: of the model; tokens beyond it are refused when they are read. None doesn't look.
        data: what `open_data` has opened of it; None opens it.

    Raises:
        DataError: as `check_data`.
    """
    if not section.shuffle and (section.packing or section.weights):
        message = "packed and weighted samples have no order of files to keep"
        raise DataError(message, "leave shuffle, or packing and weights, out", key="shuffle")
    files, length = open_data(section) if data is None else data, section.sequence_length
    order = seed if section.shuffle else None
    if not isinstance(files, list):
        return Windows([files], length, seed=order)
    sources: list[Samples] = []
    for number, group in enumerate([[file] for file in files] if section.weights else [files]):
        source: Samples
        if section.format != "text":
            examples, pairs = cut_examples(section, group), section.format == "preference"
            if section.packing:
                source = Packed(examples, length, seed=seed + number)
            else:
                own = None if order is None else order + number
                source = Padded(examples, length, seed=own, width=2 if pairs else 1)
        elif section.packing:
            source = Packed(group[0] if len(group) == 1 else Joined(group), length, seed=seed + number)
        else:
            source = Windows([file.tokens for file in group], length, seed=None if order is None else order + number)
        sources.append(_Checked(source, group, vocabulary))
    return sources[0] if len(sources) == 1 else Mixture(sources, section.weights, seed=seed)


def cut_examples(section: DataSection, files: Sequence[TokenFile]) -> Cut:
    """Return the examples of files, none longer than a sample.

    Args:
        section: of the plan.
        files: with masks.

    Raises:
        DataError: one is longer, and the plan refuses that; or none is left.
    """
    documents = files[0] if len(files) == 1 else Joined(files)
    together = 2 if section.format == "preference" else 1
    return Cut(documents, section.sequence_length, section.truncation, together=together)


def describe_cuts(section: DataSection, data: Opened) -> str:
    """Say how many examples are shortened or left out; empty where none is.

    Args:
        section: of the plan.
        data: what `open_data` has opened of it.
    """
    if section.format == "text" or not isinstance(data, list):
        return ""
    cut = cut_examples(section, data)
    texts = [f"{cut.shortened:,} examples cut to {section.sequence_length}"] if cut.shortened else []
    texts += [f"{cut.dropped:,} examples left out"] if cut.dropped else []
    return "".join(f", {text}" for text in texts)


def check_data(section: DataSection) -> int:
    """Check that a plan can be trained on its data, without reading it; return the size of the vocabulary it needs.

    Raises:
        DataError: nothing to read, files that don't fit together, less than one sample, or options without effect.
    """
    if not has_tokens(section):
        for name, given in {**_given(section, "packing", "weights"), "format": section.format != "text"}.items():
            if given:
                message = f"{name} is for token files, but the data is text as bytes"
                fix = "write token files with hyper-parallel data prepare, or leave it out"
                raise DataError(message, fix, key=name)
        size = check_text(section.paths, sequence_length=section.sequence_length, max_bytes=section.max_bytes)
        check_count(section, size // section.sequence_length)
        return VOCABULARY
    if section.weights and len(section.weights) != len(section.paths):
        message = f"{len(section.paths)} paths have {len(section.weights)} weights"
        raise DataError(message, "give one for each path", key="weights")
    if section.weights and section.format == "preference":
        raise DataError("pairs of answers are not mixed by weights", "leave weights out", key="weights")
    _check_masks(section)
    check_count(section, len(open_samples(section, seed=0)))
    return max(map(_vocabulary, section.paths))


def _given(section: DataSection, *names: str) -> dict[str, bool]:
    return {name: bool(getattr(section, name)) for name in names}


def _check_masks(section: DataSection) -> None:
    """Check that token files have masks where the format of the data has, and nowhere else."""
    for path in section.paths:
        masked, described = TokenFile(path).mask is not None, _described(path).get("format", "text")
        if masked != (section.format != "text") or (masked and described != section.format):
            message = f"{path} was prepared as {described!r}, but data.format is {section.format!r}"
            raise DataError(message, f"write format = {described!r}, or prepare the data again", key="format")


def check_count(section: DataSection, samples: int) -> None:
    """Check that a batch has no sample twice.

    Args:
        section: of the plan.
        samples: how many there are.

    Raises:
        DataError: fewer than a batch takes.
    """
    if samples < section.batch_size:
        shown = ", ".join(section.paths) or "the standard library's sources"
        message = (
            f"{shown} has {samples} samples of {section.sequence_length} tokens, but a batch takes {section.batch_size}"
        )
        raise DataError(message, f"give more data, or make data.batch_size at most {samples}")


def has_tokens(section: DataSection) -> bool:
    """Return True for token files, False for text.

    Raises:
        DataError: both.
    """
    tokens = [path for path in section.paths if Path(path).suffix in _SUFFIXES]
    if tokens and len(tokens) < len(section.paths):
        text = next(path for path in section.paths if path not in tokens)
        message = f"{tokens[0]} is a token file, but {text} is text"
        raise DataError(message, "write tokens for the text too, with hyper-parallel data prepare")
    return bool(tokens)


def are_bytes(section: DataSection) -> bool:
    """Return whether the token files of a section say that their tokens are bytes."""
    return all(_described(path).get("tokenizer") == Bytes.digest for path in section.paths)


def _vocabulary(path: str) -> int:
    """Return the vocabulary that a file's description names; 0 if there is no description."""
    described = _described(path)
    try:
        return int(described["vocabulary"]) if described else 0
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _described(path: str) -> dict[str, Any]:
    """Return the description of a token file; empty if there is none."""
    file = Path(path).with_suffix(".json")
    if not file.is_file():
        return {}
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(described, dict):
        raise _unreadable(path, TypeError(f"a {type(described).__name__}"))
    return described


def _unreadable(path: str, error: Exception) -> DataError:
    file = Path(path).with_suffix(".json")
    return DataError(f"{file} can't be read: {error!r}", "remove it, or prepare the data again")


class _Checked:
    """Samples of files that nobody writes to, whose tokens the model's vocabulary has.

    Args:
        samples: to check.
        files: of their tokens.
        vocabulary: of the model; None takes any token.
    """

    def __init__(self, samples: Samples, files: Sequence[TokenFile], vocabulary: int | None) -> None:
        self._samples, self._files, self._vocabulary = samples, files, vocabulary

    def __len__(self) -> int:
        return len(self._samples)

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the samples of these numbers.

        Raises:
            DataError: with the file and the place of the first token that the vocabulary lacks, or with the file that
                has changed.
        """
        for file in self._files:  # before: what was cut off can't be read
            file.check_unchanged()
        rows = self._samples.rows(numbers)
        # One look at the rows, however many files there are.
        if self._vocabulary is not None and beyond(rows.tokens, self._vocabulary):
            for file in self._files:
                file.check(rows.tokens, self._vocabulary)
        return rows


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


def validation_data(plan: ParallelPlan) -> DataSection:
    """Return the plan's data section with the data to validate on."""
    return dataclasses.replace(plan.data, paths=plan.validation.paths, weights=(), shuffle=True)


def check_validation(plan: ParallelPlan) -> None:
    """Check that there are as many samples as the plan validates on.

    Raises:
        DataError: there are fewer.
    """
    wanted = plan.validation.batches * plan.data.batch_size
    found = len(open_samples(validation_data(plan), seed=0))
    if found < wanted:
        message = (
            f"the data to validate on has {found} samples, but {plan.validation.batches} batches of data.batch_size = "
            f"{plan.data.batch_size} take {wanted}"
        )
        possible = found // plan.data.batch_size
        fix = f"make validation.batches at most {possible}" if possible else "make data.batch_size smaller"
        raise DataError(message, f"give more data, or {fix}")
