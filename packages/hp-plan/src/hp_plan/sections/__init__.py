"""The sections of a plan, each a frozen value that is checked by `hp_plan.reading.tables`."""

from __future__ import annotations

from hp_plan.sections.distribution import (
    AXES,
    CommunicationSection,
    ContextSection,
    ExpertsSection,
    FsdpSection,
    MeshSection,
    PipelineSection,
    PrecisionSection,
)
from hp_plan.sections.model import AdapterSection, CompileSection, ModelSection
from hp_plan.sections.running import (
    DataSection,
    MemorySection,
    MetricsSection,
    MonitorSection,
    ObjectiveSection,
    OptimizerGroup,
    OptimizerSection,
    ProfileSection,
    RecoverySection,
    RunSection,
    ScheduleSection,
    SdcSection,
    ValidationSection,
    schedule_factor,
)

__all__ = [
    "AXES",
    "AdapterSection",
    "CommunicationSection",
    "CompileSection",
    "ContextSection",
    "DataSection",
    "ExpertsSection",
    "FsdpSection",
    "MemorySection",
    "MeshSection",
    "MetricsSection",
    "ModelSection",
    "MonitorSection",
    "ObjectiveSection",
    "OptimizerGroup",
    "OptimizerSection",
    "PipelineSection",
    "PrecisionSection",
    "ProfileSection",
    "RecoverySection",
    "RunSection",
    "ScheduleSection",
    "SdcSection",
    "ValidationSection",
    "schedule_factor",
]
