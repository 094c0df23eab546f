"""Checks of a plan against what this machine has: its data, and the libraries of its sinks."""

from __future__ import annotations

from hp_plan import Diagnostic, ParallelPlan
from hp_plan.extend import vocabulary
from hyper_parallel.data import VOCABULARY, DataError, check_data
from hyper_parallel.sinks import missing


def check_run(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the plan can be trained on its data, and that its metrics can be written."""
    return [*_check_data(plan), *_check_sinks(plan)]


def _check_data(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the plan can be trained on its data."""
    diagnostics = []
    try:
        needed = check_data(plan.data)
    except DataError as error:
        return [Diagnostic("data.paths", error.message, error.fix)]
    known = vocabulary(plan.model)
    if known is not None and known < needed:
        data = "text as bytes" if needed == VOCABULARY else "the tokenizer of the data"
        message = f"the model knows {known} tokens, but {data} has {needed}"
        diagnostics.append(Diagnostic("model.overrides.vocab_size", message, f"make it {needed} or more"))
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
