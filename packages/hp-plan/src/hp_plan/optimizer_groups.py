"""`[[optimizer.groups]]`: which group of a plan a parameter is in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from hp_plan.diagnostics import Diagnostic
from hp_plan.outline import ModelOutline, matches, matches_nothing, matching
from hp_plan.plan import ParallelPlan

__all__ = ["check_groups", "check_group_values", "check_tied_groups", "group_of", "lr_multiple"]


def group_of(plan: ParallelPlan, name: str) -> int | None:
    """Return the number of the group that a parameter is in; None if it is in none."""
    return next(iter(_groups_of(plan, name)), None)


def lr_multiple(plan: ParallelPlan, name: str) -> float:
    """Return a parameter's learning rate as a multiple of the optimizer's."""
    number = group_of(plan, name)
    return 1.0 if number is None else plan.optimizer.groups[number].lr_multiple


def _groups_of(plan: ParallelPlan, name: str) -> dict[int, str]:
    """Return the groups whose patterns match a name, and the first of these patterns."""
    found: dict[int, str] = {}
    for number, group in enumerate(plan.optimizer.groups):
        for pattern in group.patterns:
            if matches(pattern, name):
                found.setdefault(number, pattern)
    return found


def check_group_values(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that each group has patterns, and a value that is not the optimizer's."""
    diagnostics = []
    for number, group in enumerate(plan.optimizer.groups):
        key = f"optimizer.groups[{number}]"
        if not group.patterns:
            fix = 'name parameters, as in patterns = ["model.norm.weight"], or leave the group out'
            diagnostics.append(Diagnostic(f"{key}.patterns", "got no pattern, so no parameter is in the group", fix))
        values = [item for item in fields(group) if item.name != "patterns"]
        if all(getattr(group, item.name) == item.default for item in values):
            message = "the group has the optimizer's own values"
            fix = f"give {' or '.join(item.name for item in values)}, or leave the group out"
            diagnostics.append(Diagnostic(key, message, fix))
    return diagnostics


def check_groups(
    plan: ParallelPlan, names: Sequence[str], *, what: str = "parameter", whole: bool = True
) -> list[Diagnostic]:
    """Check that each pattern matches a parameter, and that no parameter is in two groups.

    Args:
        plan: the plan.
        names: of parameters.
        what: they are names of.
        whole: they are all of the model's.
    """
    diagnostics = []
    for number, group in enumerate(plan.optimizer.groups if whole else ()):
        for place, pattern in enumerate(group.patterns):
            if not matching(pattern, names):
                key = f"optimizer.groups[{number}].patterns[{place}]"
                diagnostics.append(matches_nothing(key, pattern, names, what=what))
    return diagnostics + _doubled(plan, names)


def _doubled(plan: ParallelPlan, names: Iterable[str]) -> list[Diagnostic]:
    """Name parameters in several groups, once for each pair of patterns."""
    if not plan.optimizer.groups:
        return []
    found: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for name in names:
        groups = _groups_of(plan, name)
        if len(groups) > 1:
            found.setdefault(tuple(groups.items()), []).append(name)
    diagnostics = []
    for groups, own in found.items():
        which = " and ".join(f"by '{pattern}' in group {number}" for number, pattern in groups)
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        message = f"{own[0]}{more} is matched {which}; a parameter is in one group"
        key = f"optimizer.groups[{groups[-1][0]}]"
        diagnostics.append(Diagnostic(key, message, "make the patterns exclude each other, or remove one"))
    return diagnostics


def check_tied_groups(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that a tensor that two stages have, each under a name of its own, is in one group under both."""
    diagnostics = []
    for names in model.tied if plan.mesh.pp > 1 else ():
        groups = {name: group_of(plan, name) for name in names}
        if len(set(groups.values())) > 1:
            inside = next(name for name, number in groups.items() if number is not None)
            outside = next(name for name, number in groups.items() if number != groups[inside])
            key = f"optimizer.groups[{groups[inside]}]"
            message = f"{inside} and {outside} are one tensor, on two stages, and only {inside} is in the group"
            diagnostics.append(Diagnostic(key, message, "let its patterns match both"))
    return diagnostics
