"""Pipelines: schedules as data, proved before they run."""

from typing import TYPE_CHECKING

from hp_pipeline import schedules
from hp_pipeline.agreement import PipelineError
from hp_pipeline.batches import BatchDimSpec
from hp_pipeline.checking import check
from hp_pipeline.coordinator import HookCoordinator
from hp_pipeline.lowering import lower
from hp_pipeline.meetings import HookRole, Meeting
from hp_pipeline.overlap import CommComputeOverlap
from hp_pipeline.pipeline import Costs, Pipeline, placed
from hp_pipeline.schedule import PipelineSchedule
from hp_pipeline.schedule_kinds import (
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
from hp_pipeline.shared import SharedParameterInfo
from hp_pipeline.simulation import Span, Trace, simulate
from hp_pipeline.slices import SequenceState
from hp_pipeline.split import Split, split_model
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import MetaStep, MetaStepType, Order
from hp_pipeline.synthesis import synthesize
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
