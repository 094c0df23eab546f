"""Redistribution as data: a plan of one-axis steps, with an exchange between meshes; pure, cached and priced.

The framework's executor runs the steps; `simulate` runs them on numpy arrays for all ranks in one process.
"""

from __future__ import annotations

from hp_dtensor.redistribution.executor import simulate
from hp_dtensor.redistribution.planner import cost, explain, plan
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step, ToPartial
from hp_dtensor.redistribution.transfer import Move, Transfer, explain_transfer, plan_transfer

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Move",
    "ReduceScatter",
    "Slice",
    "Step",
    "ToPartial",
    "Transfer",
    "cost",
    "explain",
    "explain_transfer",
    "plan",
    "plan_transfer",
    "simulate",
]
