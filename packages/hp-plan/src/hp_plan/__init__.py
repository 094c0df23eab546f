"""A plan as data: how a model is trained on many ranks, declared, then linted, applied and verified.

`ParallelPlan` is a frozen value and a TOML file, the same content. What needs a framework is loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_plan.application import apply
from hp_plan.checks.monitor.comparing import Comparison, Divergence, compare_readings
from hp_plan.checks.monitor.origin import Origin
from hp_plan.checks.monitor.readings import RankReadings, Reading, read_readings
from hp_plan.checks.sdc.corruption import Corruption, CorruptionError, Verdict
from hp_plan.checks.verification import ModuleDifference, VerifyResult
from hp_plan.dry.report import DryReport
from hp_plan.dry.simulated import Simulated
from hp_plan.linting import lint, order_axes
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import (
    AdapterSection,
    CommunicationSection,
    CompileSection,
    ContextSection,
    DataSection,
    ExpertsSection,
    FsdpSection,
    MemorySection,
    MeshSection,
    MetricsSection,
    ModelSection,
    MonitorSection,
    ObjectiveSection,
    OptimizerGroup,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    ProfileSection,
    RecoverySection,
    RunSection,
    ScheduleSection,
    SdcSection,
    ValidationSection,
)
from hp_plan.tuning.hardware import Hardware
from hp_platform.extend import lazy_exports

__all__ = [
    "AdapterSection",
    "CommunicationSection",
    "CompileSection",
    "Comparison",
    "ContextSection",
    "Corruption",
    "CorruptionError",
    "DataSection",
    "Diagnostic",
    "Divergence",
    "DryReport",
    "ExpertsSection",
    "FsdpSection",
    "Hardware",
    "MemorySection",
    "MeshSection",
    "MetricsSection",
    "ModelSection",
    "ObjectiveSection",
    "ModuleDifference",
    "MonitorSection",
    "OptimizerGroup",
    "OptimizerSection",
    "Origin",
    "ParallelPlan",
    "PipelineSection",
    "PrecisionSection",
    "PlanError",
    "ProfileSection",
    "RecoverySection",
    "RankReadings",
    "Reading",
    "RunSection",
    "ScheduleSection",
    "SdcSection",
    "Simulated",
    "ValidationSection",
    "Verdict",
    "VerifyResult",
    "apply",
    "build_model",
    "build_optimizer",
    "build_parallel_model",
    "build_schedule",
    "compare_readings",
    "dry_run",
    "fit",
    "generating",
    "lint",
    "log_probabilities",
    "order_axes",
    "probe",
    "read_readings",
    "simulate_rank",
    "tune",
    "verify",
]

if TYPE_CHECKING:
    from hp_plan.torch.build import build_model, build_optimizer, build_parallel_model, build_schedule
    from hp_plan.torch.dry.api import dry_run, fit, probe, simulate_rank, tune
    from hp_plan.torch.generation.generating import generating
    from hp_plan.torch.generation.log_probabilities import log_probabilities
    from hp_plan.torch.verify import verify

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "build_model": "build",
        "build_optimizer": "build",
        "build_parallel_model": "build",
        "build_schedule": "build",
        "dry_run": "dry.api",
        "fit": "dry.api",
        "generating": "generation.generating",
        "log_probabilities": "generation.log_probabilities",
        "probe": "dry.api",
        "simulate_rank": "dry.api",
        "tune": "dry.api",
        "verify": "verify",
    },
)
