"""Checks of a plan against what this machine has: its data, and the libraries of its sinks."""

from __future__ import annotations

from typing import Any

from hp_plan import DataSection, Diagnostic, ParallelPlan
from hp_plan.extend import vocabulary
from hyper_parallel.data import VOCABULARY, DataError, check_data, has_tokens
from hyper_parallel.prompts import check_prompts
from hyper_parallel.sinks import missing
from hyper_parallel.tokenized import check_text_of, tokenizer_of
from hyper_parallel.validation import check_validation, validation_data


def check_run(plan: ParallelPlan, config: Any = None) -> list[Diagnostic]:
    """Check that the plan can be trained on its data, and that its metrics can be written.

    Args:
        plan: the plan.
        config: of its model; None where it has none, or is not known.
    """
    found = [*_check_data(plan, plan.data), *_check_validation(plan, config), *_check_sinks(plan)]
    return list(dict.fromkeys(found))  # Data and validation may say the same of the model.


def _check_data(plan: ParallelPlan, section: DataSection, key: str = "data.paths") -> list[Diagnostic]:
    """Check that the plan's model can read its data."""
    diagnostics = []
    try:
        needed = check_text_of(plan, section) or check_data(section)
    except DataError as error:
        return [Diagnostic(key if error.key == "paths" else f"data.{error.key}", error.message, error.fix)]
    known = vocabulary(plan.model)
    if known is not None and known < needed:
        data = "text as bytes" if needed == VOCABULARY else "the tokenizer of the data"
        message = f"the model knows {known} tokens, but {data} has {needed}"
        diagnostics.append(Diagnostic("model.overrides.vocab_size", message, f"make it {needed} or more"))
    return diagnostics


def _check_validation(plan: ParallelPlan, config: Any) -> list[Diagnostic]:
    """Check that the plan can be validated on its data, and that its prompts can be read."""
    diagnostics = []
    if plan.validation.prompts:
        try:
            check_prompts(plan, config)
        except DataError as error:
            diagnostics.append(Diagnostic("validation.prompts", error.message, error.fix))
    return [*diagnostics, *(_check_validation_data(plan) if plan.validation.paths else [])]


def _check_validation_data(plan: ParallelPlan) -> list[Diagnostic]:
    diagnostics = _check_data(plan, validation_data(plan), "validation.paths")
    if not diagnostics and has_tokens(plan.data) != has_tokens(validation_data(plan)) and tokenizer_of(plan) is None:
        kinds = {True: "token files", False: "text as bytes"}
        trained, validated = kinds[has_tokens(plan.data)], kinds[not has_tokens(plan.data)]
        message = f"the model is trained on {trained} and would be validated on {validated}"
        diagnostics.append(Diagnostic("validation.paths", message, "give both alike, or name data.tokenizer"))
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
