"""Training data in commands: `hyper-parallel data`, which prepares it, and documents shown with the losses taken."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.text import Text

from hp_plan import ParallelPlan
from hyper_parallel.commands.reporting import user_errors
from hyper_parallel.data import DataError, TokenFile, has_tokens
from hyper_parallel.data.documents import find_files, read_documents, several_documents, text_files
from hyper_parallel.data.examples import Examples
from hyper_parallel.data.opening import are_bytes
from hyper_parallel.data.tokenization.tokenized import prepare, tokenizer_of
from hyper_parallel.data.tokenization.tokens import Tokenizer, read_tokenizer, without_end
from hyper_parallel.reports.display import make_console

Format = Literal["text", "messages", "prompt-completion", "preference"]

app = typer.Typer(no_args_is_help=True, help="Prepare training data.")


@app.callback()
def _data() -> None:
    """Prepare training data."""


@app.command(name="prepare")
def prepare_data(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files or folders: .jsonl, .parquet, .arrow, else text.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="STEM", help="Write STEM.bin, STEM.idx and STEM.json.", show_default=False)
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, or a folder that has one; by default bytes.", show_default=False),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(help="Text of the token after each document; by default the folder's.", show_default=False),
    ] = None,
    field: Annotated[str, typer.Option(help="The text's name in JSON lines, Parquet and Arrow files.")] = "text",
    format: Annotated[
        Format, typer.Option(help="What a row is: text, or examples to fine-tune on; also writes STEM.mask.")
    ] = "text",
) -> None:
    """Tokenize files once into memory-mapped files that plans train on; goes on where it was interrupted."""
    with user_errors():
        reader = read_tokenizer(tokenizer, end=end)
        together = (
            without_end(reader) if format == "text" and several_documents(text_files(find_files(paths))) else None
        )
        if together is not None:
            typer.echo(f"note: {together}, or pass --end", err=True)
        prepared = prepare(
            paths,
            out,
            reader,
            field=field,
            format=format,
            progress=lambda file, tokens: typer.echo(f"{file}: {tokens:,} tokens", err=True),
        )
        typer.echo(f"{prepared.path}: {prepared.tokens:,} tokens in {prepared.documents:,} documents")


_OPEN, _CLOSE = "\u27e6", "\u27e7"  # around what is trained, where there are no colours


@dataclass(frozen=True)
class Shown:
    """A document, cut as the plan cuts it.

    Attributes:
        number: in the order of the files; what answers a preference has two.
        tokens: all of them.
        trained: for each token whether a loss is taken of it.
        kept: those that a sample has, from the first to the one before the last; all but for data.truncation.
        parts: text, and whether it is trained; None where no tokenizer is known.
    """

    number: int
    tokens: list[int]
    trained: list[bool]
    kept: tuple[int, int]
    parts: list[tuple[str, bool]] | None


def documents(plan: ParallelPlan, first: int, count: int) -> list[Shown]:
    """Return documents of a plan's data, in the order of its files.

    Args:
        plan: the plan.
        first: the number of the first one.
        count: how many, at most.

    Raises:
        DataError: the data can't be read, or has fewer documents.
    """
    tokenizer = tokenizer_of(plan)
    if tokenizer is None and (not has_tokens(plan.data) or are_bytes(plan.data)):
        tokenizer = read_tokenizer(None)
    found = list(itertools.islice(_documents(plan, tokenizer), first, first + count))
    if not found:
        raise DataError(f"the data has no document {first}", "they are counted from 0 on")
    return [_shown(plan, tokenizer, first + place, *each) for place, each in enumerate(found)]


def _documents(plan: ParallelPlan, tokenizer: Tokenizer | None) -> Iterator[tuple[list[int], list[bool]]]:
    section = plan.data
    if has_tokens(section):
        for file in map(TokenFile, section.paths):
            for number in range(len(file)):
                tokens, mask = file.document(number).tolist(), file.trained(number)
                yield tokens, [True] * len(tokens) if mask is None else mask.astype(bool).tolist()
        return
    assert tokenizer is not None
    for file in text_files(find_files(section.paths)):
        if section.format != "text":
            yield from ((each.tokens, each.trained) for each in Examples(section.format, tokenizer).read(file))
            continue
        for document in read_documents(file, field=section.field):
            (tokens,) = tokenizer.encode([document])
            tokens = [*tokens, *([] if tokenizer.end is None else [tokenizer.end])]
            yield tokens, [True] * len(tokens)


def _shown(
    plan: ParallelPlan, tokenizer: Tokenizer | None, number: int, tokens: list[int], trained: list[bool]
) -> Shown:
    length, size = plan.data.sequence_length, len(tokens)
    kept = (0, size)
    if plan.data.format != "text" and size > length:
        kept = {"right": (0, length), "left": (size - length, size)}.get(plan.data.truncation, (0, 0))
    trained = [place > kept[0] and place < kept[1] and each for place, each in enumerate(trained)]  # the first is given
    if tokenizer is None:
        return Shown(number, tokens, trained, kept, None)
    bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), size]
    parts = [
        (tokenizer.decode(tokens[start:end], special=True), trained[start])
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]
    return Shown(number, tokens, trained, kept, parts)


def show(plan: ParallelPlan, first: int, count: int, *, json_lines: bool) -> None:
    """Print documents: what is trained in green, or in brackets where there are no colours.

    Args:
        plan: the plan.
        first: the number of the first document.
        count: how many.
        json_lines: print a line of JSON each.
    """
    console = make_console()
    for each in documents(plan, first, count):
        if json_lines:
            typer.echo(json.dumps(dataclasses.asdict(each), ensure_ascii=False))
            continue
        size, left = len(each.tokens), each.kept[1] - each.kept[0]
        cut = "" if left == size else f", of which a sample has {left or 'none'} (data.truncation)"
        console.print(
            f"{_named(plan, each.number)}: {size} tokens{cut}; a loss is taken of {sum(each.trained)}",
            markup=False,
            soft_wrap=True,
        )
        if each.parts is None:
            console.print(" ".join(f"{_OPEN}{t}{_CLOSE}" if on else str(t) for t, on in zip(each.tokens, each.trained)))
            continue
        text = Text()
        for part, on in each.parts:
            marked = f"{_OPEN}{part}{_CLOSE}" if on and not console.is_terminal else part
            text.append(marked, style="green" if on else "dim")
        console.print(text, soft_wrap=True)
        console.print()


def _named(plan: ParallelPlan, number: int) -> str:
    """Name a document; the two answers of a pair follow each other."""
    if plan.data.format != "preference":
        return f"document {number}"
    return f"document {number} (pair {number // 2}, {('chosen', 'rejected')[number % 2]})"
