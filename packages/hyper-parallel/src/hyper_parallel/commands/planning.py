"""Commands that tell what a plan needs before a rank is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hp_plan import dry_run
from hp_plan.extend import draw_memory
from hyper_parallel.commands.plans import Json, PlanFile, Set, checked_anywhere, read_tables, set_environment
from hyper_parallel.commands.reporting import user_errors


def dryrun(
    plan: PlanFile,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="How many; by default the mesh's. dp_shard takes the rest.", show_default=False),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Play this rank, and the stages of its column.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory over a step, by kind: .png, .svg, .pdf.", show_default=False),
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Play the plan's ranks without memory or devices: what each holds, computes and sends in a step."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        report = dry_run(checked_anywhere(tables), ranks=ranks, rank=rank, memory=picture is not None)
        if picture is not None:
            draw_memory(max(report.ranks, key=lambda each: each.peak.live), picture)
        typer.echo(json.dumps(report.as_json()) if json_lines else str(report))
