"""`[experts]`: how tokens come to experts that are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import at_least


@dataclass(frozen=True)
class ExpertsSection:
    """Experts over `ep`: how tokens come to them; see `hp_moe.ExpertParallel`.

    Attributes:
        combine: `fast` sends a token once to each rank that has any of its experts, and adds their results up there;
            `exact` once for each expert: the same bits wherever experts are.
        exchange: `all_to_all`, or for few ranks `all_gather`, which sends all tokens to all of them.
        capacity: tokens of each rank that an expert takes; the last beyond it are dropped, and warned of. Shapes are
            static then. None drops none.
        chunks: parts of a rank's tokens: one is computed while another travels.
        slots: replicas of hot experts that each rank has room for.
        every: steps after which replicas are chosen anew, or drops are told, by `hyper-parallel train`.
    """

    combine: Literal["fast", "exact"] = "fast"
    exchange: Literal["all_to_all", "all_gather"] = "all_to_all"
    capacity: int | None = at_least(1, None)
    chunks: int = at_least(1, 1)
    slots: int = at_least(0, 0)
    every: int = at_least(1, 50)
