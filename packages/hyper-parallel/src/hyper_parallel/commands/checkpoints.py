"""The `hyper-parallel checkpoint` commands: checkpoints on disk, without a framework."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hp_checkpoint import InvalidCheckpointError, Keep
from hp_checkpoint.extend import diff, faults, metrics_in, prune, steps_in, summary, to_dcp, to_hugging_face
from hp_platform.extend import platform_name
from hyper_parallel.port import merging
from hyper_parallel.reports.output import CHECKPOINTS, newest_checkpoint

ADAPTER_CONFIG = "adapter_config.json"
Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="A checkpoint's folder, or a run's for its newest one.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]

app = typer.Typer(help="Look at checkpoints on disk, compare, convert and remove them.", no_args_is_help=True)


@app.command()
def inspect(folder: Folder, json_lines: Json = False) -> None:
    """Show the step, tensors and files of a checkpoint."""
    with _errors():
        folder = newest_checkpoint(folder)
        content: dict[str, Any] = summary(folder)
    if json_lines:
        typer.echo(json.dumps(content))
        return
    step = "" if content["step"] is None else f"step {content['step']}, "
    metric = "" if content["metric"] is None else f"metric {content['metric']}, "
    files = content["files"]
    typer.echo(
        f"{folder}: {step}{metric}{sum(files.values()):,} bytes in {len(files)} files, layout {content['layout']}"
    )
    for part, described in content["parts"].items():
        typer.echo(f"{part}: {len(described['tensors']):,} tensors, {described['bytes']:,} bytes")
        for name, (dtype, *shape) in described["tensors"].items():
            typer.echo(f"  {name}  {dtype} {shape}")


@app.command()
def verify(folder: Folder) -> None:
    """Compare all files of a checkpoint with their checksums; exit 1 where one differs."""
    with _errors():
        folder = newest_checkpoint(folder)
        wrong = faults(folder)
    for text in wrong:
        typer.echo(text)
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{folder}: every byte is as it was written")


@app.command(name="diff")
def compare(
    one: Folder,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another checkpoint's folder.", show_default=False)],
    tolerance: Annotated[float, typer.Option(min=0, help="The largest absolute difference that counts as none.")] = 0.0,
    json_lines: Json = False,
) -> None:
    """List the tensors and values that differ; exit 1 where some do."""
    with _errors():
        differences = diff(newest_checkpoint(one), newest_checkpoint(other), tolerance=tolerance)
    for each in differences:
        typer.echo(json.dumps({"name": each.name, "text": each.text}) if json_lines else f"{each.name}: {each.text}")
    if differences:
        raise typer.Exit(1)
    if not json_lines:
        typer.echo("nothing differs")


@app.command()
def convert(
    folder: Folder,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that doesn't exist.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(help="hf: the model as a Hugging Face folder. dcp: all of it, for torch.distributed.checkpoint."),
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the model's floating-point tensors, as bfloat16.", show_default="as they are"),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With --to dcp: the model's tensors alone.")
    ] = False,
) -> None:
    """Write a checkpoint, once its bytes are checked, in another format; one of torch's as a Hugging Face folder."""
    with _errors():
        folder = newest_checkpoint(folder)
        if to == "hf":
            files = to_hugging_face(folder, target, dtype=dtype)
        elif to == "dcp":
            files = to_dcp(folder, target, dtype=dtype, weights_only=weights_only)
        else:
            raise ValueError(f"--to {to}: expected hf or dcp")
    typer.echo(f"{target}: {', '.join(files)}")


@app.command()
def merge(
    folder: Folder,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that doesn't exist.", show_default=False)],
    base: Annotated[
        Path | None,
        typer.Option(help="The model's folder; by default the one that the adapter names.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the merged model, as bfloat16.", show_default="the model's")
    ] = None,
) -> None:
    """Write one model of a checkpoint's adapter and the model that it was trained on."""
    with _errors():
        folder = newest_checkpoint(folder)
        config = folder / ADAPTER_CONFIG
        if not config.is_file():
            raise ValueError(f"{folder} has no {ADAPTER_CONFIG}: it is not of a plan with [adapter]")
        if target.exists():
            raise FileExistsError(f"{target} exists; name a folder that doesn't")
        named = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base is None and named is None:
            raise ValueError(f"{config} names no folder of a model; name it by --base")
        place = Path(str(named)) if base is None else base
        if not (place / "config.json").is_file():
            raise FileNotFoundError(
                f"{place}, the folder of the adapter's model, has no config.json; name it by --base"
            )
        if platform_name() != "torch":
            raise ValueError(
                "merging an adapter needs PyTorch with peft and transformers: merge where these are installed, with"
                " copies of both folders"
            )
        merging().merge(folder, target, base=place, dtype=dtype)
    typer.echo(f"{target}: {place} with the adapter of {folder} in its weights")


@app.command(name="prune")
def remove(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or that of its checkpoints.", show_default=False)
    ],
    last: Annotated[int, typer.Option(min=1, help="Keep so many of the newest.")] = 2,
    every: Annotated[
        int | None, typer.Option(min=1, help="Keep the steps that are a multiple of it as well.", show_default=False)
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, help="Keep so many with the best metrics as well.", show_default=False)
    ] = None,
    better: Annotated[str, typer.Option(help="Which metrics are the best: smaller or larger ones.")] = "smaller",
) -> None:
    """Remove old checkpoints of a run."""
    with _errors():
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        place = folder if steps_in(folder) else folder / CHECKPOINTS
        if not steps_in(place):
            raise FileNotFoundError(f"there is no checkpoint in {folder}: no step-*, and no {CHECKPOINTS}/step-*")
        keep = Keep(last=last, every=every, best=best, better=better)  # type: ignore[arg-type]
        if best is not None and not any(
            metric is not None for metric in metrics_in(place, steps_in(place))[0].values()
        ):
            raise ValueError(f"--best {best}: no checkpoint in {place} was saved with a metric")
        removed = prune(place, keep)
    typer.echo(f"removed {_listed(removed)}; {place} has {_listed(steps_in(place))}")


def _listed(steps: list[int]) -> str:
    """Name steps.

    >>> _listed([10, 20])
    'steps 10, 20'
    """
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}" if steps else "nothing"


@contextmanager
def _errors() -> Iterator[None]:
    """Report errors that a user can mend and exit with 1."""
    try:
        yield
    except FileNotFoundError as error:
        text = str(error) if error.filename is None else f"{error.filename} is missing"
        typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
    except (InvalidCheckpointError, ValueError, OSError, ImportError) as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from None
