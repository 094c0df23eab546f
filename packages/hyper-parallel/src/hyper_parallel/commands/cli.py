"""The `hyper-parallel` command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hp_pipeline.extend import to_svg, to_text
from hp_plan import Diagnostic, PlanError, VerifyResult
from hp_plan.extend import (
    TORCH_ONLY,
    UNREAD,
    Report,
    build,
    examine,
    json_schema,
    memory_shortage,
    outlook,
    precision_notes,
    read_plan,
    refuse_by_itself,
    sdc_notes,
    settings,
    style_notes,
    traffic_notes,
)
from hp_platform.extend import (
    DEVICE,
    SettingError,
    inside_launcher,
    platform_name,
    wanted_platform,
)
from hyper_parallel import worker
from hyper_parallel.commands import checkpoints, monitor, planning, proposing
from hyper_parallel.commands.data import app as data_app
from hyper_parallel.commands.data import show as show_documents
from hyper_parallel.commands.doctor import examine_machine
from hyper_parallel.commands.plans import (
    Json,
    PlanFile,
    Set,
    checked,
    name_folder,
    override_value,
    prepare,
    read_tables,
    set_environment,
    shorten,
)
from hyper_parallel.commands.reporting import Version, leads, say, saying_what_is_saved, show_diagnostics, user_errors
from hyper_parallel.commands.slurm import Request, check_request, job_script
from hyper_parallel.data.tokenization.tokenized import text_notes
from hyper_parallel.launching.launch import Job, Resume
from hyper_parallel.launching.recovering import check_recovery, check_replacing, described, recovery_notes
from hyper_parallel.port import launcher
from hyper_parallel.reports.display import evaluation_text, findings_table, make_console, settings_table, verify_table
from hyper_parallel.reports.output import OutputError, claimed, prepare_folder, replace_text
from hyper_parallel.reports.page import report_page
from hyper_parallel.supervision.debugging import hand_over_terminal
from hyper_parallel.training.checking import check_first_call, check_run
from hyper_parallel.training.evaluating import check_checkpoint, check_parts
from hyper_parallel.training.resuming import check_resume

Ranks = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Ranks to start; by default the mesh's.", show_default=False)
]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(monitor.app, name="monitor")
app.command()(proposing.init)
app.command()(planning.dryrun)
app.command(name="fit")(planning.fit_plan)
app.command(name="tune")(planning.tune_plan)
app.command(name="probe")(planning.probe_machine)


@app.callback()
def _hyper_parallel(version: Version = False) -> None:
    """Train a model on many devices by declaring how."""


@app.command()
def train(
    plan: PlanFile,
    nproc: Ranks = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="In place of the plan's run.steps.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="PATH...", help="Files or folders to train on.", show_default=False)
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="In place of the plan's model.weights: a safetensors file.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/<plan>-<time>.", show_default=False)
    ] = None,
    resume: Annotated[
        Resume,
        typer.Option(
            help="auto: go on from the newest checkpoint in --out, or start if there is none; new-data: also where the "
            "data is another, at its first sample."
        ),
    ] = "no",
    until: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step, with a checkpoint.", show_default=False)
    ] = None,
    debug_rank: Annotated[
        int | None,
        typer.Option(min=0, help="Give this rank the terminal at breakpoint() and where it fails.", show_default=False),
    ] = None,
    recover: Annotated[bool, typer.Option("--recover", help="Go on with a spare process where one is lost.")] = False,
    spares: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that wait to take a place, with --recover; 1 by default.", show_default=False
        ),
    ] = None,
    readings: Annotated[
        Literal["full"] | None,
        typer.Option("--monitor", help="full: read all of each step, whatever the plan says.", show_default=False),
    ] = None,
    simulate_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Run one rank of so many here, and measure it.", show_default=False),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank of --simulate-ranks; by default 0.", show_default=False)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The network of --simulate-ranks, as of tune.", show_default=False),
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Train the plan's model; starts the ranks, or joins them when torchrun or msrun has started this."""
    with user_errors():
        if simulate_ranks is not None:
            needs_ranks = {"--resume": resume != "no", "--until": until, "--out": out, "--data": data}
            needs_ranks |= {"--monitor": readings is not None}
            needs_ranks |= {"--recover": recover, "--spares": spares is not None}
            needs_ranks |= {"--nproc": nproc, "--weights": weights, "--debug-rank": debug_rank is not None}
            options: dict[str, Any] = {"rank": rank, "hardware": hardware, "steps": steps, "without": needs_ranks}
            planning.simulate_rank(plan, simulate_ranks, **options, assignments=assignments, json_lines=json_lines)
            return
        if rank is not None or hardware is not None:
            raise SettingError("--rank and --hardware are of --simulate-ranks, which is not given")
        if resume != "no" and out is None:
            raise SettingError("--resume needs the folder of the run: name it with --out")
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        name_folder(tables, plan)
        if steps is not None:
            override_value(tables, "run", "steps", steps)
        shorten(tables, assignments or (), given=steps is not None)
        if weights is not None:
            override_value(tables, "model", "weights", str(weights))
        if data:
            override_value(tables, "data", "paths", list(data))
        for key, value in monitor.FULL.items() if readings is not None else ():
            override_value(tables, "monitor", key, value)
        ranks = prepare(tables, nproc)
        if debug_rank is not None and debug_rank >= ranks:
            raise SettingError(f"--debug-rank {debug_rank}: the {ranks} ranks are 0 to {ranks - 1}")
        check_recovery(recover, spares, debug_rank)
        spares = spares or 1
        ready = checked(tables, ranks, training=True)
        check_replacing(ready, recover)
        if recover:
            typer.echo(f"note: {described(ready, spares)}", err=True)
        for note in text_notes(ready) if leads() else ():
            typer.echo(f"note: {note}", err=True)
        # Inside a launcher only rank 0 writes, and this is that rank's own process.
        folder = prepare_folder(out, name=plan.stem, resume=resume != "no") if leads() else Path()
        if resume != "no" and not inside_launcher():
            check_resume(ready, folder, new_data=resume == "new-data")
        with claimed(folder) if leads() else nullcontext(), saying_what_is_saved(folder):
            if debug_rank is not None:
                hand_over_terminal()
            options = {"debug_rank": debug_rank, "spares": spares if recover else 0}
            job = Job(ready, folder, json_lines, resume, until, **options)
            _run(worker.train_rank, job, ranks)


@app.command()
def verify(plan: PlanFile, nproc: Ranks = None, assignments: Set = None, json_lines: Json = False) -> None:
    """Compare two float64 steps under the plan with the same in one process, on PyTorch; exit 1 where they differ."""
    with user_errors():
        os.environ.setdefault(DEVICE, "cpu")
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        if platform_name() != "torch":
            say(TORCH_ONLY)
            raise typer.Exit(1)
        ranks = prepare(tables, nproc)
        result = _run(worker.verify_rank, Job(checked(tables, ranks)), ranks)
        if leads():
            _show_verified(result, json_lines=json_lines)
        if not result.passed:
            raise typer.Exit(1)


@app.command(name="evaluate")
def evaluate_plan(
    plan: PlanFile,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run's folder, or a checkpoint; else the plan's weights."),
    ] = None,
    nproc: Ranks = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH...", help="Data; by default validation.paths, else data.paths.", show_default=False),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="At most so many batches; by default all.", show_default=False)
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Compute the loss of a checkpoint on data, over every token that counts; on any mesh but pp."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        newest = None if checkpoint is None else check_checkpoint(checkpoint)
        validation = tables.pop("validation", None)
        paths = data or (validation.get("paths") if isinstance(validation, dict) else None)
        if paths:
            override_value(tables, "data", "paths", list(paths))
            tables["data"].pop("weights", None)
        ranks = prepare(tables, nproc)
        ready = checked(tables, ranks, training=True)
        if ready.mesh.pp > 1:
            message = f"got {ready.mesh.pp}, but a model in stages is not evaluated"
            raise PlanError([Diagnostic("mesh.pp", message, "--set mesh.pp=1: a checkpoint loads on any mesh")])
        if newest is not None:
            check_parts(ready, newest)
        result = _run(worker.evaluate_rank, Job(ready, until=batches, checkpoint=newest), ranks)
        if leads():
            shown = json.dumps(dataclasses.asdict(result)) if json_lines else None
            typer.echo(evaluation_text(result) if shown is None else shown)


@app.command(name="lint")
def lint_plan(
    plan: PlanFile,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="How many ranks there will be; by default as the mesh says.", show_default=False),
    ] = None,
    run_model_code: Annotated[
        bool,
        typer.Option(
            "--run-model-code",
            help="Run the model's code: import and call model.function, and under cp call the model once.",
        ),
    ] = False,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Read the plan against its model without starting a rank; exit 1 where something is wrong."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan, run_code=run_model_code)
        read, errors = read_plan(tables)
        report = examine(read, errors, nproc, run_model_code=run_model_code)
        diagnostics, notes = [*report.diagnostics, *check_run(read, report)], _notes(report, nproc)
        if run_model_code and not diagnostics:
            refusals, more = check_first_call(report)
            diagnostics, notes = refusals, [*notes, *more]
        notes += [] if diagnostics else text_notes(read)
        if json_lines:
            typer.echo(json.dumps({"diagnostics": [dataclasses.asdict(each) for each in diagnostics], "notes": notes}))
        elif diagnostics:
            show_diagnostics(diagnostics, source=str(plan))
        else:
            unread = "; its model was not read" if report.unread else ""
            make_console().print(f"{plan}: nothing wrong was found{unread}")
        for note in [] if json_lines else notes:
            typer.echo(f"note: {note}", err=True)
        if diagnostics:
            raise typer.Exit(1)


@app.command()
def show(plan: PlanFile, assignments: Set = None, json_lines: Json = False) -> None:
    """Print every value of the plan, and where it comes from: the file, the command line or the default."""
    with user_errors():
        tables = read_tables(plan, assignments)
        read, diagnostics = read_plan(tables)
        if diagnostics:
            raise PlanError(diagnostics)
        listed = settings(read, tables, assignments or ())
        if json_lines:
            typer.echo(json.dumps([dataclasses.asdict(setting) for setting in listed]))
        else:
            make_console().print(settings_table(listed))


@data_app.command(name="show")
def show_data(
    plan: PlanFile,
    first: Annotated[int, typer.Option(min=0, help="The number of the first document.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Print what a plan trains on, and of which tokens a loss is taken: in green, or in brackets without colours."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan, run_code=False)
        read, diagnostics = read_plan(tables)
        if diagnostics:
            raise PlanError(diagnostics)
        show_documents(read, first, count, json_lines=json_lines)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="By default report.html in the run's folder.", show_default=False),
    ] = None,
) -> None:
    """Write a page of HTML that shows a run: curves, mesh, checkpoints, starts, plan; it needs no other file."""
    with user_errors():
        page, file = report_page(run), out or run / "report.html"
        replace_text(file, page)
        typer.echo(str(file))


@app.command()
def doctor(
    probe: Annotated[bool, typer.Option(help="Start two ranks and let them communicate.")] = True,
    json_lines: Json = False,
) -> None:
    """Show what this machine has to train with, and what to do about what is wrong; exit 1 where ranks can't train."""
    with user_errors():
        wanted_platform()
        findings = examine_machine(probe=probe)
        faults = sum(each.state == "fault" for each in findings)
        if json_lines:
            typer.echo(json.dumps({"faults": faults, "findings": [dataclasses.asdict(each) for each in findings]}))
        else:
            make_console().print(findings_table(findings))
        if faults:
            raise typer.Exit(1)


@app.command()
def slurm(
    plan: PlanFile,
    nodes: Annotated[int, typer.Option(min=1, help="The job's nodes.")],
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=0, help="One a rank; by default as the mesh needs. 0: ranks on CPUs.", show_default=False),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="The job's limit, such as 8:00:00; else the partition's.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="The run's folder, seen by all nodes; by default runs/<plan>.", show_default=False),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="As partition=gpu; repeatable.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="JOB.sh", help="Write here; else to the terminal.", show_default=False)
    ] = None,
    assignments: Set = None,
) -> None:
    """Write a script for sbatch that trains the plan, a rank a task of srun; it saves before its time limit."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        read, errors = read_plan(tables)
        report = examine(read, errors, run_model_code=True)
        request = Request(nodes, gpus_per_node, time, tuple(options or ()))
        diagnostics = [*report.diagnostics, *check_run(read, report), *check_request(request, read)]
        if diagnostics:
            raise PlanError(diagnostics)
        text = job_script(request, read, plan, folder or Path("runs") / plan.stem, assignments or ())
        if out is None:
            typer.echo(text, nl=False)
            return
        if out.exists():
            raise OutputError(f"{out} exists; remove it, or choose another file with --out")
        out.write_text(text, encoding="utf-8")
        typer.echo(f"{out} is written; next: sbatch {out}")


@app.command()
def schema() -> None:
    """Print the JSON schema of plans, by which an editor completes and checks them (`#:schema FILE` atop a plan)."""
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def schedule(
    plan: PlanFile,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the time line to this file.", show_default=False)
    ] = None,
    assignments: Set = None,
    json_lines: Json = False,
) -> None:
    """Simulate the plan's pipeline by counted costs, without starting a rank, and look for a faster order."""
    with user_errors():
        tables = read_tables(plan, assignments)
        set_environment(tables, plan)
        read, errors = read_plan(tables)
        refuse_by_itself(read, errors)
        diagnostics = list(examine(read, errors, run_model_code=True).diagnostics)
        if not diagnostics and read.mesh.pp == 1:
            message = "there is no pp axis, and so no pipeline"
            diagnostics.append(Diagnostic("mesh.pp", message, "make mesh.pp at least 2"))
        if diagnostics:
            raise PlanError(diagnostics)
        result = outlook(read, build().build_empty(read))
        if svg is not None:
            svg.write_text(to_svg(result.choice.trace), encoding="utf-8")
        if json_lines:
            typer.echo(json.dumps(proposing.as_dict(result)))
            return
        console = make_console()
        console.print(proposing.title(read, result.choice), markup=False)
        typer.echo(to_text(result.choice.trace, max(20, min(console.width, 120) - 32)))
        typer.echo("(seconds at 1 Tflop/s a rank; messages take no time; activations as without tensor parallelism)")
        console.print(proposing.ranks_table(result.choice))
        console.print(proposing.advice(result), markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: by default those of the process.
    """
    app(_spread("--data", list(sys.argv[1:] if arguments is None else arguments)))


def _spread(option: str, arguments: list[str]) -> list[str]:
    """Turn `--data a b` into `--data a --data b`: click's options take one value each.

    >>> _spread("--data", ["plan.toml", "--data", "a", "b", "--json"])
    ['plan.toml', '--data', 'a', '--data', 'b', '--json']
    """
    spread: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument == option
        elif taking and spread[-1] != option:
            spread.append(option)
        spread.append(argument)
    return spread


def _notes(report: Report, nproc: int | None) -> list[str]:
    """List notes besides diagnostics: what was not checked, and what this machine cannot hold."""
    if report.unread:
        return [UNREAD.format("--run-model-code")]
    if report.model is None:
        return []
    notes = style_notes(report.plan, report.model) + precision_notes(report.plan, report.model)
    notes += recovery_notes(report.plan)
    with suppress(SettingError):  # A device that is elsewhere is not an error of the plan.
        shortage = memory_shortage(report.plan, report.model, nproc or report.plan.mesh.world_size)
        notes += [] if shortage is None else [f"too large to train here: {shortage}"]
    notes += [] if report.diagnostics else [*traffic_notes(report.plan, report.model), *sdc_notes(report.plan)]
    return notes


def _run(work: Callable[[Job], Any], job: Job, ranks: int) -> Any:
    """Run on new ranks, or on the rank that this process is, and return rank 0's result."""
    if inside_launcher():
        return work(job)
    if sys.stderr.isatty():  # It takes seconds until a rank has something to show.
        typer.echo(f"starting {ranks} rank{'s' if ranks != 1 else ''}", err=True)
    return launcher().launch(work, job, ranks=ranks)[0]


def _show_verified(result: VerifyResult, *, json_lines: bool) -> None:
    if json_lines:
        rows = [dataclasses.asdict(row) for row in result.rows]
        numbers = {"passed": result.passed, "first": result.first, "largest": result.largest, "ranks": result.ranks}
        numbers = {**numbers, "tolerance": result.tolerance, "losses": result.losses, "rows": rows}
        typer.echo(json.dumps({**numbers, "notes": result.notes}))
        return
    console = make_console()
    console.print(verify_table(result))
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    count = f"{len(result.steps)} steps on {result.ranks} rank{'s' if result.ranks != 1 else ''}"
    if result.passed:
        console.print(
            f"equal: {count}, largest relative difference {result.largest:.1e} of {result.tolerance:.0e} allowed"
        )
    else:
        first = result.first or "the loss"
        console.print(
            f"[red]different:[/red] {first} is the first in forward order that differs; {count}, largest "
            f"relative difference {result.largest:.1e} of {result.tolerance:.0e} allowed"
        )
