"""Pipelines: schedules as data, proved before they run."""

from hp_pipeline import schedules
from hp_pipeline.checking import check
from hp_pipeline.lowering import lower
from hp_pipeline.pipeline import UNIT, Costs, Pipeline, placed
from hp_pipeline.simulation import Span, Trace, simulate
from hp_pipeline.steps import MetaStep, MetaStepType, Order, step
from hp_pipeline.synthesis import synthesize

__all__ = [
    "UNIT",
    "Costs",
    "MetaStep",
    "MetaStepType",
    "Order",
    "Pipeline",
    "Span",
    "Trace",
    "check",
    "lower",
    "placed",
    "schedules",
    "simulate",
    "step",
    "synthesize",
]
