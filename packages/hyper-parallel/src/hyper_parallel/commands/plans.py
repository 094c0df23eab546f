"""The plan of a command: its file and the command line's values, and what is set and checked before it is used."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hp_plan import Diagnostic, ParallelPlan, PlanError
from hp_plan.extend import (
    examine,
    memory_shortage,
    near_misses,
    override,
    read_plan,
    read_toml,
    refuse_by_itself,
    with_order,
)
from hp_platform import get_platform
from hp_platform.extend import (
    DEVICE,
    KINDS,
    PLATFORM,
    PLATFORMS,
    SettingError,
    inside_launcher,
    launcher_place,
    wanted_platform,
)
from hyper_parallel.commands.reporting import leads
from hyper_parallel.port import launcher
from hyper_parallel.training.checking import check_run

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="In place of the plan's value; repeatable.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines in place of tables.")]


def read_tables(plan: Path, assignments: Sequence[str] | None) -> dict[str, Any]:
    """Read the tables of a plan's file, and set the command line's values.

    Args:
        plan: the file.
        assignments: "key=value" in place of the file's values.

    Raises:
        SettingError: the file can't be read; it lists the plans beside it.
    """
    try:
        return _with_folders(override(read_toml(plan), assignments or ()), plan)
    except OSError as error:
        beside = sorted(path.name for path in plan.resolve().parent.glob("*.toml") if path.name != "pyproject.toml")
        hint = f"; {near_misses(plan.name, beside)}" if beside and isinstance(error, FileNotFoundError) else ""
        raise SettingError(f"the plan {plan} can't be read: {error.strerror}{hint}") from None


_FOLDERS = (("model", "path"), ("adapter", "weights"), ("objective", "reference"), ("data", "tokenizer"))


def _with_folders(tables: dict[str, Any], plan: Path) -> dict[str, Any]:
    """Name models, adapter and tokenizer in full: they lie beside the plan's file, or else in the working directory."""
    for section, key in _FOLDERS:
        table = tables.get(section)
        if not isinstance(table, dict):
            continue
        named = table.get(key)
        if isinstance(named, str) and (key, named) != ("tokenizer", "bytes"):
            here, beside = Path(named), plan.parent / named
            table[key] = str((here if here.exists() and not beside.exists() else beside).resolve())
    return tables


def set_environment(tables: dict[str, Any], plan: Path, *, run_code: bool = True) -> None:
    """Set the plan's platform, forbid downloads, and make modules in this folder and the plan's importable.

    Args:
        tables: of the plan.
        plan: its file.
        run_code: import from these folders.

    Raises:
        PlanError: the plan's framework is not installed.
        ImportError: no framework is.
    """
    wanted_platform()
    if os.environ.get(DEVICE) not in (None, "", *KINDS):
        _ = get_platform().devices.kind  # It says which kinds there are.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("GLOG_v", "3")  # MindSpore warns of each kind of device that a machine lacks.
    run = tables.get("run")
    named = run.get("platform") if isinstance(run, dict) else None
    _check_installed(named if os.environ.get(PLATFORM) in (None, named) else None)
    if named in PLATFORMS:
        os.environ.setdefault(PLATFORM, named)
    folders = [str(folder) for folder in (Path.cwd(), plan.parent.resolve()) if run_code]
    sys.path[:0] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # Ranks that are not forks of this process.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*paths, *folders])))


def _check_installed(named: str | None) -> None:
    """Raise with what to install if the plan's framework, or every framework, is missing."""
    missing = [name for name in PLATFORMS if name not in sys.modules and importlib.util.find_spec(name) is None]
    if named in missing:
        fix = f"run the command in an environment that has it, or: pip install 'hyper-parallel[{named}]'"
        raise PlanError([Diagnostic("run.platform", f"the plan is for {named}, which is not installed here", fix)])
    if missing == list(PLATFORMS):
        extras = " or ".join(f"'hyper-parallel[{name}]'" for name in PLATFORMS)
        raise ImportError(f"no framework is installed here: pip install {extras}")


def prepare(tables: dict[str, Any], nproc: int | None) -> int:
    """Start loading the ranks' libraries while the plan is checked, and return the number of ranks.

    Args:
        tables: of the plan.
        nproc: the number of ranks to start; None is the mesh's.

    Raises:
        PlanError: something is wrong with the plan whatever its model is; nothing was started.
    """
    place, (read, diagnostics) = launcher_place(), read_plan(tables)
    ranks = place.world_size if place is not None else nproc or read.mesh.world_size
    refuse_by_itself(read, diagnostics, ranks)
    if place is None:
        launcher().start_server(read, ranks)
    return ranks


def checked(tables: dict[str, Any], ranks: int, *, training: bool = False) -> ParallelPlan:
    """Return the plan, of which nothing is wrong on so many ranks of this machine; `prepare` comes before.

    Args:
        tables: of the plan.
        ranks: to be started.
        training: check what a run needs too.

    Raises:
        PlanError: something is wrong with it.
    """
    read, diagnostics = read_plan(tables)
    report = examine(read, diagnostics, ranks, run_model_code=True)
    diagnostics = list(report.diagnostics)
    if training:
        diagnostics += check_run(read, report)
    devices = get_platform().devices
    if devices.kind != "cpu" and not inside_launcher() and ranks > devices.count:
        message = f"{ranks} ranks, but this machine has only {devices.count} {devices.kind} devices"
        diagnostics.append(Diagnostic("mesh", message, "make the mesh smaller, or set HYPER_PARALLEL_DEVICE=cpu"))
    elif report.model is not None and not inside_launcher():
        shortage = memory_shortage(read, report.model, ranks)
        if shortage is not None:
            fix = "take a smaller model or dtype, or start the ranks on more machines (torchrun, msrun)"
            diagnostics.append(Diagnostic("mesh", shortage, fix))
    if diagnostics:
        raise PlanError(diagnostics)
    return read if report.model is None else with_order(read, report.model)


def checked_anywhere(tables: dict[str, Any]) -> ParallelPlan:
    """Return the plan, of which nothing is wrong, whatever this machine has.

    Args:
        tables: of the plan.

    Raises:
        PlanError: something is wrong with it.
    """
    read, diagnostics = read_plan(tables)
    refuse_by_itself(read, diagnostics)
    report = examine(read, diagnostics, None, run_model_code=True)
    if report.diagnostics:
        raise PlanError(report.diagnostics)
    return read if report.model is None else with_order(read, report.model)


def override_value(tables: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Set a value in place of the plan's.

    Args:
        tables: of the plan; changed.
        section: the table.
        key: in it.
        value: the new value.
    """
    table = tables.setdefault(section, {})
    if isinstance(table, dict):  # Else lint says what is wrong with it.
        table[key] = value


def name_folder(tables: dict[str, Any], plan: Path) -> None:
    """Write into the plan where its function is looked for, so that the copy in the run's folder can be read.

    Args:
        tables: of the plan; changed.
        plan: its file.
    """
    model = tables.get("model")
    if isinstance(model, dict) and "function" in model:
        model.setdefault("folder", str(plan.parent.resolve()))


def shorten(tables: dict[str, Any], assignments: Sequence[str], *, given: bool) -> None:
    """Shorten the plan's warm-up to a number of steps from the command line that is smaller.

    Args:
        tables: of the plan; changed.
        assignments: of the command line.
        given: the number of steps was given as an option.
    """
    set_keys = {each.partition("=")[0].strip() for each in assignments}
    if not (given or "run.steps" in set_keys) or "schedule.warmup_steps" in set_keys:
        return
    steps, schedule = tables["run"]["steps"], tables.get("schedule")
    warmup = schedule.get("warmup_steps") if isinstance(schedule, dict) else None
    if isinstance(warmup, int) and isinstance(steps, int) and warmup > steps:
        override_value(tables, "schedule", "warmup_steps", steps)
        if leads():
            typer.echo(f"note: {steps} steps shorten schedule.warmup_steps, {warmup} in the plan, to {steps}", err=True)
