"""Proving a plan: not on MindSpore."""

from __future__ import annotations

from typing import NoReturn

from hp_plan.checks.verification import TORCH_ONLY
from hp_plan.plan import ParallelPlan


def verify(plan: ParallelPlan, *, steps: int = 2, tolerance: float = 1e-9) -> NoReturn:
    """Refuse: MindSpore's CPU kernels are incomplete in float64.

    Raises:
        NotImplementedError: always; it names what to use.
    """
    raise NotImplementedError(TORCH_ONLY)
