"""Proving a plan: not on MindSpore."""

from __future__ import annotations

from typing import NoReturn

from hp_plan.plan import ParallelPlan


def verify(plan: ParallelPlan, *, steps: int = 2, tolerance: float = 1e-9) -> NoReturn:
    """Not on MindSpore, whose CPU kernels are incomplete in float64.

    Raises:
        NotImplementedError: always; it names what to use.
    """
    raise NotImplementedError(
        "verify runs on PyTorch only: on MindSpore, lint the plan, then compare the losses of a few steps with those "
        "of one rank (--nproc 1 and a plan without [mesh]) or of PyTorch (examples/compare_frameworks.py)"
    )
