"""Redistribution as data: a plan of one-axis steps, pure, cached and costed.

A framework's executor runs the steps; `simulate` runs them on numpy arrays for all ranks in one process.
"""

from __future__ import annotations

from hp_dtensor.redistribution.planner import cost, explain, plan
from hp_dtensor.redistribution.simulate import simulate
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step, ToPartial

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "ReduceScatter",
    "Slice",
    "Step",
    "ToPartial",
    "cost",
    "explain",
    "plan",
    "simulate",
]
