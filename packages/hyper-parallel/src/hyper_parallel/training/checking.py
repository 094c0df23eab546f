"""Checks of a plan against what this machine has: its data, and the libraries of its sinks."""

from __future__ import annotations

import dataclasses
import os

from hp_plan import ContextSection, DataSection, Diagnostic, MeshSection, ParallelPlan, RunSection
from hp_plan.extend import Report, examine, memory_shortage, vocabulary
from hp_platform.extend import DEVICE, inside_launcher
from hyper_parallel import worker
from hyper_parallel.data import VOCABULARY, DataError, check_data, has_tokens
from hyper_parallel.data.opening import check_validation, validation_data
from hyper_parallel.data.tokenization.tokenized import check_text_of, tokenizer_of
from hyper_parallel.launching.launch import Job
from hyper_parallel.port import launcher
from hyper_parallel.reports.sinks import missing
from hyper_parallel.training.evaluating import check_prompts

_LONGEST = 512  # tokens of the sequence that the model is called with to look for what it makes of a part
UNCALLED = "the model was not called on parts of a sequence, which its first step does and may refuse: {0}"


def check_first_call(report: Report) -> tuple[list[Diagnostic], list[str]]:
    """Call the model of a plan with `cp` once, on few ranks, which compares parts of a sequence with the whole.

    Args:
        report: of a plan without faults, whose model's code may run.

    Returns:
        What is wrong, and notes on what was not looked at.
    """
    plan = report.plan
    if plan.mesh.cp == 1 or report.model is None:
        return [], []
    ranks = next(each for each in range(2, plan.mesh.cp + 1) if plan.mesh.cp % each == 0)
    length = max(1, min(plan.data.sequence_length, _LONGEST) // (2 * ranks)) * 2 * ranks  # two chunks each
    fewer = ParallelPlan(
        model=plan.model,
        mesh=MeshSection(cp=ranks),
        data=dataclasses.replace(plan.data, sequence_length=length),
        context=ContextSection(
            ulysses_degree=1 if plan.context.ulysses_degree == 1 else None, load_balance=plan.context.load_balance
        ),
        run=RunSection(seed=plan.run.seed),
    )
    reason = "this process is one of a launcher's ranks" if inside_launcher() else None
    reason = reason or memory_shortage(fewer, report.model, ranks)
    reason = reason or next(map(str, examine(fewer, [], ranks, run_model_code=True).diagnostics), None)
    if reason is not None:
        return [], [UNCALLED.format(reason)]
    os.environ.setdefault(DEVICE, "cpu")
    refusal = launcher().launch(worker.first_call_rank, Job(fewer), ranks=ranks)[0]
    if refusal is None:
        return [], []
    message = f"its first call, of {length} tokens on {ranks} ranks, is refused: {refusal.removeprefix('cp: ')}"
    return [Diagnostic("mesh.cp", message, "leave cp out")], []


def check_run(plan: ParallelPlan, report: Report | None = None) -> list[Diagnostic]:
    """Check that the plan can be trained on its data, and that its metrics can be written.

    Args:
        plan: the plan.
        report: of the plan against its model; None where it was not made.
    """
    found = [*_check_data(plan, plan.data, report), *_check_validation(plan, report), *_check_sinks(plan)]
    return list(dict.fromkeys(found))  # Data and validation may say the same of the model.


def _check_data(
    plan: ParallelPlan, section: DataSection, report: Report | None, key: str = "data.paths"
) -> list[Diagnostic]:
    """Check that the plan's model can read its data."""
    diagnostics = []
    try:
        needed = check_text_of(plan, section) or check_data(section)
    except DataError as error:
        return [Diagnostic(key if error.key == "paths" else f"data.{error.key}", error.message, error.fix)]
    known, data = vocabulary(plan.model), "text as bytes" if needed == VOCABULARY else "the tokenizer of the data"
    if known is None and report is not None and report.model is not None and plan.model.function is not None:
        tables = [each.shapes.values() for each in report.model.modules.values() if each.kind == "embedding"]
        rows = max((shape[0] for shapes in tables for shape in shapes), default=needed)
        if rows < needed:
            message = f"its largest embedding has {rows} rows, but {data} has {needed} tokens"
            diagnostics.append(Diagnostic("model.function", message, f"make it {needed} rows or more"))
    if known is not None and known < needed:
        message = f"the model knows {known} tokens, but {data} has {needed}"
        diagnostics.append(Diagnostic("model.overrides.vocab_size", message, f"make it {needed} or more"))
    return diagnostics


def _check_validation(plan: ParallelPlan, report: Report | None) -> list[Diagnostic]:
    """Check that the plan can be validated on its data, and that its prompts can be read."""
    diagnostics = []
    if plan.validation.prompts:
        try:
            check_prompts(plan, None if report is None else report.config)
        except DataError as error:
            diagnostics.append(Diagnostic("validation.prompts", error.message, error.fix))
    return [*diagnostics, *(_check_validation_data(plan, report) if plan.validation.paths else [])]


def _check_validation_data(plan: ParallelPlan, report: Report | None) -> list[Diagnostic]:
    diagnostics = _check_data(plan, validation_data(plan), report, "validation.paths")
    if not diagnostics and has_tokens(plan.data) != has_tokens(validation_data(plan)) and tokenizer_of(plan) is None:
        kinds = {True: "token files", False: "text as bytes"}
        trained, validated = kinds[has_tokens(plan.data)], kinds[not has_tokens(plan.data)]
        message = f"the model is trained on {trained} and would be validated on {validated}"
        # Of token files, data.tokenizer is refused: it would read nothing.
        other = "a [model] path that has the tokenizer" if has_tokens(plan.data) else "name data.tokenizer"
        diagnostics.append(Diagnostic("validation.paths", message, f"give both alike, or {other}"))
    if not diagnostics:
        try:
            if check_text_of(plan, validation_data(plan)) is None:  # else once there are tokens
                check_validation(plan)
        except DataError as error:
            diagnostics.append(Diagnostic("validation.paths", error.message, error.fix))
    return diagnostics


def _check_sinks(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that what the sinks need is installed."""
    return [
        Diagnostic(
            "metrics.sinks",
            f"{name} needs {library}, which is not installed here",
            f"pip install 'hyper-parallel[{name}]', or leave it out",
        )
        for name, library in missing(plan.metrics.sinks)
    ]
