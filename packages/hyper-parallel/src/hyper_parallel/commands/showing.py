"""A plan shown: its documents as tokens with the losses that are taken, and its simulated pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.text import Text

from hp_pipeline.extend import open_forwards
from hp_plan import ParallelPlan
from hp_plan.extend import Choice, Outlook
from hyper_parallel.data import DataError, TokenFile, find_files, has_tokens
from hyper_parallel.data.documents import read_documents, text_files
from hyper_parallel.data.examples import Examples
from hyper_parallel.data.opening import are_bytes
from hyper_parallel.data.tokenization.tokenized import tokenizer_of
from hyper_parallel.data.tokenization.tokenizing import Tokenizer, read_tokenizer
from hyper_parallel.reports.display import make_console

if TYPE_CHECKING:
    from rich.table import Column, Table

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


def as_dict(outlook: Outlook) -> dict[str, Any]:
    """Return the numbers of a plan's order, and of a faster one if there is one."""
    return {**_numbers(outlook.choice), "best": None if outlook.best is None else _numbers(outlook.best)}


def _numbers(choice: Choice) -> dict[str, Any]:
    trace, forwards = choice.trace, open_forwards(choice.order)
    stages = [
        {"rank": rank, "blocks": len(stage.blocks), "parameter_bytes": stage.parameters}
        for rank, stage in zip(choice.pipeline.placement, choice.split.stages, strict=True)
    ]
    ranks = [
        {
            "steps": len(choice.order[rank]),
            "busy_seconds": trace.busy[rank],
            "peak_bytes": trace.peaks[rank],
            "forwards_held": forwards[rank],
        }
        for rank in range(choice.pipeline.ranks)
    ]
    return {
        "schedule": choice.name,
        "micro_batches": choice.pipeline.micro_batches,
        "seconds": trace.makespan,
        "bubble_seconds": trace.bubble,
        "bubble_share": trace.bubble_ratio,
        "stages": stages,
        "ranks": ranks,
    }


def title(plan: ParallelPlan, choice: Choice) -> str:
    """Describe an order in a line."""
    rows = plan.data.batch_size // plan.mesh.data_parallel // choice.pipeline.micro_batches
    micro = f"{choice.pipeline.micro_batches} micro-batches of {rows} sample{'s' if rows != 1 else ''}"
    return f"{choice.name} on {plan.mesh.pp} ranks, stages of {_blocks(choice)} blocks, {micro}"


def ranks_table(choice: Choice) -> Table:
    """Make the table of what each rank of the pipeline runs and holds."""
    from rich.table import Table

    table = Table("rank", "stages", "blocks", *(_right(name) for name in _NUMBERS))
    forwards = open_forwards(choice.order)
    for rank, own in enumerate(choice.pipeline.stages):
        blocks = " + ".join(str(len(choice.split.stages[stage].blocks)) for stage in own)
        numbers = len(choice.order[rank]), forwards[rank], f"{choice.trace.peaks[rank] / 2**20:,.1f} MiB"
        table.add_row(str(rank), ", ".join(map(str, own)), blocks, *map(str, numbers))
    return table


def advice(outlook: Outlook) -> str:
    """Name the fastest order at the same memory."""
    choice, best = outlook.choice, outlook.best
    if best is None:
        return "no order was found that is faster at the same memory"
    gain = choice.trace.makespan / best.trace.makespan - 1
    placement = ", ".join(map(str, best.pipeline.placement))
    return (
        f"{gain:.1%} faster at the same memory: stages of {_blocks(best)} blocks on the ranks {placement}, bubble"
        f" {best.trace.bubble_ratio:.1%} (schedule = 'auto' looks for such an order)"
    )


_NUMBERS = ("steps", "forwards held", "peak memory")


def _right(name: str) -> Column:
    from rich.table import Column

    return Column(name, justify="right")


def _blocks(choice: Choice) -> str:
    return ", ".join(str(len(stage.blocks)) for stage in choice.split.stages)
