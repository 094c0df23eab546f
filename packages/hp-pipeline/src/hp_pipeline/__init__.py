"""Pipelines: schedules as data, proved before they run."""

from typing import TYPE_CHECKING

from hp_pipeline import schedules
from hp_pipeline.orders.checking import HookRole, Meeting, check
from hp_pipeline.orders.pipeline import Costs, MetaStep, MetaStepType, Order, Pipeline, lower, placed
from hp_pipeline.orders.simulation import Span, Trace, simulate
from hp_pipeline.running.agreement import PipelineError
from hp_pipeline.running.overlap import CommComputeOverlap, HookCoordinator
from hp_pipeline.running.schedule import (
    PipelineSchedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleSeqPP,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZB1P,
    ScheduleZBV,
)
from hp_pipeline.running.slices import BatchDimSpec, SequenceState
from hp_pipeline.schedules import synthesize
from hp_pipeline.stages.split import Split, split_model
from hp_pipeline.stages.stage import PipelineStage, SharedParameterInfo
from hp_platform.extend import lazy_exports

if TYPE_CHECKING:
    from hp_pipeline.torch.model import PipelinedModel

__all__ = [
    "BatchDimSpec",
    "CommComputeOverlap",
    "Costs",
    "HookCoordinator",
    "HookRole",
    "Meeting",
    "MetaStep",
    "MetaStepType",
    "Order",
    "Pipeline",
    "PipelineError",
    "PipelineSchedule",
    "PipelineStage",
    "PipelinedModel",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleSeqPP",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZB1P",
    "ScheduleZBV",
    "SequenceState",
    "SharedParameterInfo",
    "Span",
    "Split",
    "Trace",
    "check",
    "lower",
    "placed",
    "schedules",
    "simulate",
    "split_model",
    "synthesize",
]

__getattr__, __dir__ = lazy_exports(__name__, {"PipelinedModel": "model"})
