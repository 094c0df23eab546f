"""Commands that tell what a plan needs before a rank is started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hp_plan
from hp_plan import PlanError
from hp_plan.extend import Tuned, draw_memory, tuned_text
from hp_platform.extend import SettingError, inside_launcher
from hyper_parallel.commands.plans import Json, PlanFile, Set, checked_anywhere, read_tables, set_environment
from hyper_parallel.commands.reporting import user_errors
from hyper_parallel.reports.output import replace_text

Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="How many; by default the mesh's. dp_shard takes the rest.", show_default=False),
]


@contextlib.contextmanager
def _advised() -> Iterator[None]:
    """Show what can't be played or found as what the person can change."""
    try:
        yield
    except PlanError:
        raise
    except (NotImplementedError, ValueError, MemoryError) as error:
        raise SettingError(str(error)) from error


Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="The machine: h100-8, a100-8, 910b-8, cm384, cpu or a file of `probe`.",
        show_default=False,
    ),
]


def dryrun(
    plan: PlanFile,
    ranks: Ranks = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Play this rank, and the stages of its column.", show_default=False)
    ] = None,
    hardware: Hardware = None,
    routes: Annotated[
        float, typer.Option(min=1, max=2, help="Tokens of the first expert over the mean: 1 is balanced.")
    ] = 1.0,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory over a step, by kind: .png, .svg, .pdf.", show_default=False),
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Play the plan's ranks without memory or devices: what each holds, computes and sends in a step."""
    with user_errors(), _advised():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        report = hp_plan.dry_run(
            checked_anywhere(tables),
            ranks=ranks,
            rank=rank,
            hardware=hardware,
            routes=routes,
            memory=picture is not None,
        )
        if picture is not None:
            draw_memory(max(report.ranks, key=lambda each: each.peak.live), picture)
        typer.echo(json.dumps(report.as_json()) if json_lines else str(report))


def fit_plan(
    plan: PlanFile,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of a rank, such as 64GiB.", show_default=False)],
    quantity: Annotated[
        Literal["micro-batch", "sequence-length", "layers"], typer.Option("--largest", help="What is to be large.")
    ] = "micro-batch",
    most: Annotated[int, typer.Option(min=1, help="The largest to try.")] = 4096,
    ranks: Ranks = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Find the largest micro-batch, sequence length or number of layers that fits; exit 1 where the least does not."""
    with user_errors(), _advised():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        found = hp_plan.fit(
            checked_anywhere(tables),
            memory=memory,
            quantity=quantity.replace("-", "_"),  # type: ignore[arg-type]
            most=most,
            ranks=ranks,
        )
        told: dict[str, Any] = {
            "quantity": found.quantity,
            "memory": found.memory,
            "value": found.value,
            "peak": found.peak,
            "beyond": found.beyond,
            "changes": [{"what": each.what, "peak": each.peak} for each in found.changes],
        }
        typer.echo(json.dumps(told) if json_lines else str(found))
        if found.value is None:
            raise typer.Exit(1)


def simulate_rank(
    plan: Path,
    ranks: int,
    *,
    rank: int | None,
    hardware: str | None,
    steps: int | None,
    without: Mapping[str, Any],
    assignments: Sequence[str] | None,
    json_lines: bool,
) -> None:
    """Run one rank of a plan on this machine, and print what it takes.

    Args:
        plan: its file.
        ranks: of the plan.
        rank: the one to run; None is 0.
        hardware: whose network prices the messages; None goes by the device.
        steps: how many; None is 5.
        without: values of options that need all ranks or the plan's data, by name.
        assignments: of the command line.
        json_lines: print JSON.

    Raises:
        SettingError: one of these options is given, or a launcher has started this process.
    """
    given = [name for name, value in without.items() if value]
    if given:
        raise SettingError(f"{given[0]} does not go with --simulate-ranks: one rank is run, on random tokens")
    if inside_launcher():
        raise SettingError("--simulate-ranks runs one rank in one process: start it without torchrun")
    with _advised():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        options: dict[str, Any] = {} if steps is None else {"steps": steps}
        found = hp_plan.simulate_rank(
            checked_anywhere(tables), ranks=ranks, rank=rank or 0, hardware=hardware, **options
        )
        typer.echo(json.dumps(found.as_json()) if json_lines else str(found))


def tune_plan(
    plan: PlanFile,
    ranks: Annotated[int, typer.Option(min=1, help="How many.", show_default=False)],
    hardware: Hardware = None,
    free: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Chosen although the plan gives it; repeatable. mesh is.", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to list.")] = 5,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="By curves and the machine's table alone: no plan is played whole.")
    ] = False,
    measure: Annotated[int, typer.Option(min=0, help="Run so many of the best plans here, five steps each.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best plan here.", show_default=False)
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Find the fastest plans that fit a machine: mesh, micro-batches, recompute, reshard and schedule are chosen.

    Without --hardware the machine is this one, which is measured first, as are the kernels of the best plans.
    """
    with user_errors(), _advised():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        checked_anywhere(tables)
        found = hp_plan.tune(
            tables,
            ranks=ranks,
            hardware=hardware,
            free=("mesh", *(free or ())),
            top=top,
            symbolic=symbolic,
            measure=measure,
        )
        typer.echo(json.dumps(_numbers(found)) if json_lines else tuned_text(found))
        if out is not None:
            best = found.candidates[0]
            replace_text(out, f"# {best.why}\n# {best.seconds.total:.3g} s a step, by rates\n{best.plan.to_toml()}")


def probe_machine(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="Write the table here.", show_default=False)],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many; by default one for each device, or core, of this machine.")
    ] = None,
) -> None:
    """Measure this machine for `tune` and `dryrun`: products, memory, issue of operations, and its ranks' network."""
    with user_errors(), _advised():
        if out.suffix != ".toml":
            raise SettingError(f"{out} is to be a table of TOML; give it a name that ends in .toml")
        measured = hp_plan.probe(ranks)
        measured.write(out)
        typer.echo(f"{out} is written: {measured.described}; next: hyper-parallel tune PLAN --ranks N --hardware {out}")


def _numbers(found: Tuned) -> dict[str, Any]:
    return {
        "searched": found.searched,
        "traced": found.traced,
        "fell_out": dict(found.fell_out),
        "candidates": [
            {
                "mesh": each.plan.mesh.axes,
                "memory": each.memory,
                "seconds": dataclasses.asdict(each.seconds),
                "measured": each.measured,
                "binds": each.binds,
                "why": each.why,
            }
            for each in found.candidates
        ],
    }
