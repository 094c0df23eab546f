"""Which optimizer, weight decay and learning rate a plan gives each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hp_offload import SwapManager
from hp_optim import ChainedOptimizer, SwapOptimizerConfig, get_hyper_optimizer, swap_optimizer
from hp_optim.extend import default_patterns
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import check_states
from hp_plan.structure.outline import ModelOutline, matched_by, matches, matches_nothing, matching

# ---- groups of parameters ----


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


Named = list[tuple[str, Any]]


def optimized(parameters: Iterable[Any], plan: ParallelPlan) -> Named:
    """Return the trained parameters with their names, empty ones where there are none.

    Args:
        parameters: parameters, or pairs of a name and a parameter.
        plan: whose optimizer may need names.

    Raises:
        PlanError: the optimizer's states, or its groups, can't be as the plan says.
        ValueError: the plan's optimizer goes by names, and there are none.
    """
    if faults := check_states(plan):
        raise PlanError(faults)
    listed = list(parameters)
    pairs = [each if isinstance(each, tuple) else ("", each) for each in listed]
    section = plan.optimizer
    if (section.name == "muon" or section.groups) and any(not name for name, _ in pairs):
        key = "name = 'muon'" if section.name == "muon" else "groups"
        raise ValueError(
            f"build_optimizer: {key} in [optimizer] goes by names of parameters; pass model.named_parameters()"
        )
    trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
    # A stage has some of the names: those of the whole model are checked by `lint`.
    if faults := check_groups(plan, [name for name, _ in trained], what="trained parameter", whole=plan.mesh.pp == 1):
        raise PlanError(faults)
    return trained


def grouped(named: Named, plan: ParallelPlan) -> list[dict[str, Any]]:
    """Divide parameters into groups as optimizers take them, first those that are in none of the plan's.

    Args:
        named: what `optimized` gave.
        plan: the plan.
    """
    parameters = dict(named) if plan.optimizer.groups else {}
    if not parameters:
        return [{"params": [each for _, each in named], **_values(plan, None)}] if named else []
    return [
        {"params": [parameters[name] for name in names], **_values(plan, number)}
        for number, names in _divided(parameters, plan).items()
    ]


def multiple_of_first(optimizer: Any, named: Iterable[tuple[str, Any]], plan: ParallelPlan) -> float:
    """Return the learning rate of the optimizer's first group, as a multiple of the plan's.

    Args:
        optimizer: of the plan.
        named: the parameters with their names.
        plan: the plan.
    """
    first = optimizer.param_groups[0]["params"][0]
    return next((lr_multiple(plan, name) for name, parameter in named if parameter is first), 1.0)


def _divided(names: Iterable[str], plan: ParallelPlan) -> dict[int | None, list[str]]:
    """Return the names in each group of the plan; under None, first, those in none."""
    groups: dict[int | None, list[str]] = {None: [], **{number: [] for number in range(len(plan.optimizer.groups))}}
    for name in names:
        groups[group_of(plan, name)].append(name)
    return {number: own for number, own in groups.items() if own}


def _values(plan: ParallelPlan, number: int | None) -> dict[str, float]:
    """Return the weight decay and the learning rate of a group; None is what is in no group."""
    section = plan.optimizer
    if number is None:
        return {"weight_decay": section.weight_decay, "lr": section.lr}
    group = section.groups[number]
    decay = section.weight_decay if group.weight_decay is None else group.weight_decay
    return {"weight_decay": decay, "lr": section.lr * group.lr_multiple}


def muon_and_adamw(named: Named, plan: ParallelPlan) -> ChainedOptimizer:
    """Make Muon and AdamW as a plan divides the parameters.

    Args:
        named: what `optimized` gave.
        plan: the plan.
    """
    section = plan.optimizer
    names = [name for name, _ in named]
    hidden = matched_by(section.muon, names) if section.muon else set(default_patterns(named)[0])
    entries = {
        to_muon: [
            {"params": own, **_values(plan, number)}
            for number, own in _divided([name for name in names if (name in hidden) is to_muon], plan).items()
        ]
        for to_muon in (True, False)
    }
    return get_hyper_optimizer(
        named,
        entries[True],
        entries[False],
        {"lr": section.lr, "momentum": section.muon_momentum},
        {"lr": section.lr, "betas": section.betas, "eps": section.eps},
    )


def swapped(optimizer: Any, plan: ParallelPlan) -> Any:
    """Move an optimizer's states to the host, if the plan says so, by the streams that swapped activations use.

    Args:
        optimizer: of hp_optim.
        plan: the plan.
    """
    slices = plan.optimizer.swap_slices
    if not slices:
        return optimizer
    return swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=slices), link=SwapManager())


def scheduled_together(schedules: Iterable[Any]) -> Any:
    """Return schedules as one; a single one as it is, so that its state is that of an optimizer without a chain."""
    listed = list(schedules)
    return listed[0] if len(listed) == 1 else Schedules(listed)


class Schedules:
    """Schedules of several optimizers, stepped together.

    Args:
        schedules: one for each.
    """

    def __init__(self, schedules: Iterable[Any]) -> None:
        self._schedules = list(schedules)

    def step(self) -> None:
        """Go on to the next step's learning rates."""
        for schedule in self._schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedules."""
        return {"schedules": [schedule.state_dict() for schedule in self._schedules]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the steps that were saved.

        Args:
            state_dict: what `state_dict` gave.

        Raises:
            ValueError: it is of another number of schedules.
        """
        saved = state_dict.get("schedules", ())
        if len(saved) != len(self._schedules):
            raise ValueError(f"load: the state has {len(saved)} schedules, expected {len(self._schedules)}")
        for schedule, state in zip(self._schedules, saved, strict=True):
            schedule.load_state_dict(dict(state))
