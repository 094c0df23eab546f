"""The command `hyper-parallel data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hyper_parallel.commands.reporting import user_errors
from hyper_parallel.data.documents import find_files, several_documents, text_files
from hyper_parallel.data.tokenization.tokenized import prepare
from hyper_parallel.data.tokenization.tokenizing import read_tokenizer, without_end

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
