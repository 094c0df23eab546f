"""Which optimizer and which weight decay a plan gives each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hp_offload import SwapManager
from hp_optim import ChainedOptimizer, SwapOptimizerConfig, get_hyper_optimizer, swap_optimizer
from hp_optim.extend import default_patterns
from hp_plan.diagnostics import PlanError
from hp_plan.memory import check_states
from hp_plan.outline import matched_by
from hp_plan.plan import ParallelPlan

__all__ = ["Schedules", "muon_and_adamw", "optimized", "swapped", "with_decay"]

Named = list[tuple[str, Any]]


def optimized(parameters: Iterable[Any], plan: ParallelPlan) -> Named:
    """Return the trained parameters with their names, empty ones where there are none.

    Args:
        parameters: parameters, or pairs of a name and a parameter.
        plan: whose optimizer may need names.

    Raises:
        PlanError: the optimizer's states can't be as the plan says.
        ValueError: the plan's optimizer goes by names, and there are none.
    """
    if faults := check_states(plan):
        raise PlanError(faults)
    listed = list(parameters)
    pairs = [each if isinstance(each, tuple) else ("", each) for each in listed]
    section = plan.optimizer
    if (section.name == "muon" or section.no_decay) and any(not name for name, _ in pairs):
        key = "name = 'muon'" if section.name == "muon" else "no_decay"
        raise ValueError(
            f"build_optimizer: {key} in [optimizer] goes by names of parameters; pass model.named_parameters()"
        )
    return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def with_decay(named: Named, plan: ParallelPlan) -> list[tuple[list[Any], float]]:
    """Divide parameters by their weight decay.

    Args:
        named: what `optimized` gave.
        plan: the plan.
    """
    without = _chosen(named, plan.optimizer.no_decay)
    decayed = [parameter for name, parameter in named if name not in without]
    others = [parameter for name, parameter in named if name in without]
    return [(each, decay) for each, decay in ((decayed, plan.optimizer.weight_decay), (others, 0.0)) if each]


def muon_and_adamw(named: Named, plan: ParallelPlan) -> ChainedOptimizer:
    """Make Muon and AdamW as a plan divides the parameters.

    Args:
        named: what `optimized` gave.
        plan: the plan.
    """
    section = plan.optimizer
    hidden = _chosen(named, section.muon) if section.muon else set(default_patterns(named)[0])
    without = _chosen(named, section.no_decay)
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name, _ in named:
        groups.setdefault((name in hidden, name in without), []).append(name)
    entries: dict[bool, list[Any]] = {True: [], False: []}
    for (to_muon, no_decay), names in groups.items():
        decay = 0.0 if no_decay else section.weight_decay
        entries[to_muon].append({"params": names, "weight_decay": decay})
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


def _chosen(named: Named, patterns: Iterable[str]) -> set[str]:
    return matched_by(patterns, (name for name, _ in named))
