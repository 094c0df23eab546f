"""Proposals: `hyper-parallel init`, a plan to begin with, and a pipeline simulated beside a faster order."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

import hp_plan
from hp_offload.extend import parse_size, size
from hp_pipeline.extend import open_forwards
from hp_plan import Diagnostic, DryReport, ParallelPlan, PlanError
from hp_plan.extend import Choice, Estimate, Outlook, Play, Proposal, override, propose
from hyper_parallel.commands.reporting import user_errors
from hyper_parallel.reports.output import OutputError

if TYPE_CHECKING:
    from rich.table import Column, Table

_ORDER = ("model", "mesh", "fsdp", "memory", "optimizer", "schedule", "data", "run")


def init(
    model: Annotated[
        str, typer.Option(metavar="FOLDER|CLASS", help="A model's folder, or a configuration class of transformers.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks there will be.")],
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a rank, such as 64GiB; else it isn't limited.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="Write here; else to the terminal.", show_default=False)
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value that is not to be chosen; repeatable."),
    ] = None,
) -> None:
    """Write a plan that lints clean and fits: mesh and micro-batches by dry runs, with the reasons as comments."""
    with user_errors():
        os.environ["HF_HUB_OFFLINE"] = "1"
        if out is not None and out.exists():
            raise OutputError(f"{out} exists; remove it, or choose another file with --out")
        proposal = proposal_of(model, ranks, play=_shown(hp_plan.dry_run), memory=memory, assignments=assignments or ())
        if out is not None:
            proposal = _beside(proposal, out)
        text = plan_text(proposal, memory=memory)
        if out is None:
            typer.echo(text, nl=False)
            return
        out.write_text(text, encoding="utf-8")
        typer.echo(f"{out} is written; next: hyper-parallel lint {out}, hyper-parallel train {out}")


def _shown(play: Play) -> Play:
    """Name the plans that are played, each of which takes seconds, on a terminal."""

    def shown(plan: ParallelPlan) -> DryReport:
        if sys.stderr.isatty():
            recomputed = ", recompute" if plan.memory.recompute else ""
            typer.echo(f"playing {plan.mesh.described}{recomputed}", err=True)
        return play(plan)

    return shown


def proposal_of(
    model: str, ranks: int, *, play: Play, memory: str | None = None, assignments: list[str] | tuple[str, ...] = ()
) -> Proposal:
    """Choose a plan.

    Args:
        model: a folder, which the plan names as it is given here, or the name of a configuration class.
        ranks: their number.
        play: plays a plan without memory.
        memory: of a rank.
        assignments: `key=value`, of what is not to be chosen.

    Raises:
        PlanError: there is no such plan.
    """
    if memory is not None:
        try:
            limit = parse_size(memory)
        except ValueError as error:
            raise PlanError([Diagnostic("--memory", str(error), "write for example --memory 64GiB")]) from error
    else:
        limit = None
    folder = Path(model).is_dir() or os.sep in model
    if not folder and not model.endswith("Config"):
        message = f"{model!r} is no folder here, and no configuration class of transformers"
        raise PlanError([Diagnostic("--model", message, "give a folder with a config.json, or such as LlamaConfig")])
    tables: dict[str, Any] = {
        "model": {"path": model} if folder else {"config": model},
        "optimizer": {"lr": 2e-5 if folder else 1e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 10, "final": 0.1},
        "run": {"grad_clip": 1.0, "checkpoint_every": 100},
    }
    return propose(override(tables, assignments), ranks, play=play, memory=limit)


def _beside(proposal: Proposal, out: Path) -> Proposal:
    """Name the model as the plan's file will find it: a path that is relative here is relative to the file there."""
    path = proposal.tables["model"].get("path")
    folder, here = out.parent.resolve(), Path.cwd().resolve()
    if path is None or Path(path).is_absolute() or folder == here:
        return proposal
    tables = {**proposal.tables, "model": {**proposal.tables["model"], "path": os.path.relpath(here / path, folder)}}
    return dataclasses.replace(proposal, tables=tables)


def plan_text(proposal: Proposal, *, memory: str | None = None) -> str:
    """Write a proposal as TOML, with its reasons as comments.

    Args:
        proposal: the plan and why.
        memory: of a rank, as it was given.
    """
    reasons = {**_REASONS, **proposal.reasons}
    told = _told(proposal.estimate, proposal.plan.mesh.world_size, f" of {memory}" if memory is not None else "")
    lines = [f"# {line}" for each in told for line in textwrap.wrap(each, 94, break_long_words=False)]
    tables = proposal.tables
    if not proposal.plan.data.paths:
        lines.append("# It trains on the sources of Python's library; data.paths or train --data names other text.")
    for name in [*_ORDER, *(each for each in tables if each not in _ORDER)]:
        if name in tables:
            lines += _table(name, tables[name], reasons)
    return "\n".join(lines) + "\n"


def _told(estimate: Estimate, ranks: int, limit: str) -> list[str]:
    """Say what a rank needs, and what that leaves out."""
    if estimate.unplayed:
        return [
            f"{size(estimate.total)}{limit} on each of {ranks} ranks for weights, gradients and optimizer states,"
            " counted from shapes. What else a step takes is not known: the plan can't be played without memory.",
            estimate.unplayed,
        ]
    parts = {kind: size(number) for kind, number in estimate.by_kind.items() if number}
    host = f", and {parts.pop('host')} of the host's memory" if "host" in parts else ""
    listed = ", ".join(f"{kind} {number}" for kind, number in parts.items())
    return [
        f"{size(estimate.total)}{limit} at the peak of a step, on the fullest of {ranks} ranks: {listed}{host}.",
        "An allocator's rounding and workspaces of kernels and of communication come on top.",
    ]


_REASONS = {
    "optimizer.lr": "of the top; a model that goes on from weights takes less than one that starts",
    "run.checkpoint_every": "steps; what a lost machine takes with it, at most",
    "run.grad_clip": "the largest norm of all gradients together",
}


def _table(name: str, table: Any, reasons: Mapping[str, str]) -> list[str]:
    """Write a section; tables in it come last."""
    if not isinstance(table, Mapping):
        return ["", *tomli_w.dumps({name: table}).splitlines()]
    lines = ["", f"[{name}]"]
    for key, value in table.items():
        if not isinstance(value, Mapping):
            text = (
                f"{key} = [{', '.join(map(_value, value))}]" if isinstance(value, list) else f"{key} = {_value(value)}"
            )
            reason = reasons.get(f"{name}.{key}")
            lines.append(f"{text}  # {reason}" if reason else text)
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    return [*lines, *(["", *tomli_w.dumps({name: nested}).splitlines()] if nested else [])]


def _value(value: Any) -> str:
    return tomli_w.dumps({"_": value}).strip().removeprefix("_ = ")


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
