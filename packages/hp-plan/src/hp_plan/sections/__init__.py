"""The sections of a plan, each a frozen value that is checked by `hp_plan.reading.tables`."""

from __future__ import annotations

from hp_plan.sections.adapting import AdapterSection
from hp_plan.sections.distribution import ContextSection, FsdpSection, PipelineSection
from hp_plan.sections.experts import ExpertsSection
from hp_plan.sections.mesh import AXES, MeshSection
from hp_plan.sections.model import CompileSection, ModelSection
from hp_plan.sections.objective import ObjectiveSection
from hp_plan.sections.optimization import OptimizerGroup, OptimizerSection, ScheduleSection, schedule_factor
from hp_plan.sections.running import DataSection, MemorySection, RunSection
from hp_plan.sections.watching import MetricsSection, ProfileSection, ValidationSection

__all__ = [
    "AXES",
    "AdapterSection",
    "CompileSection",
    "ContextSection",
    "DataSection",
    "ExpertsSection",
    "FsdpSection",
    "MemorySection",
    "MeshSection",
    "MetricsSection",
    "ModelSection",
    "ObjectiveSection",
    "OptimizerGroup",
    "OptimizerSection",
    "PipelineSection",
    "ProfileSection",
    "RunSection",
    "ScheduleSection",
    "ValidationSection",
    "schedule_factor",
]
