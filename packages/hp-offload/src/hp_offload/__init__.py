"""Activations between forward and backward: kept, computed again, or on the host.

`checkpoint` and `swap` take a function, their wrappers a module; `CheckpointPolicy` says what becomes of an output, and
`SwapManager` moves storages in groups. `plan_memory` chooses for a whole step.
"""

from hp_offload.api import (
    MemoryPlanWarning,
    apply_memory_plan,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    fit_memory,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
    trace_saved,
)
from hp_offload.homes.placing import Placed, PlacedReport, place
from hp_offload.homes.planning import CachePlan, CacheUse, ParameterVisits, plan_cache
from hp_offload.manager import SwapManager
from hp_offload.planning import plan_memory
from hp_offload.saved import CheckpointPolicy, MemoryPlan, Saved, keep_collectives_policy

__all__ = [
    "CachePlan",
    "CacheUse",
    "CheckpointPolicy",
    "MemoryPlan",
    "MemoryPlanWarning",
    "ParameterVisits",
    "Placed",
    "PlacedReport",
    "Saved",
    "SwapManager",
    "apply_memory_plan",
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "fit_memory",
    "keep_collectives_policy",
    "place",
    "plan_cache",
    "plan_memory",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "trace_saved",
]
