"""Which package has which public name, known without importing any."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

PUBLIC: dict[str, tuple[str, ...]] = {
    "hp_platform": (
        "CollectiveCounts",
        "GroupOptions",
        "LostRankError",
        "Platform",
        "count_collectives",
        "destroy_process_group",
        "get_backend",
        "get_group_local_rank",
        "get_platform",
        "get_process_group_ranks",
        "init_process_group",
        "manual_seed",
        "mark_created_groups",
        "split_group",
    ),
    "hp_dtensor": (
        "DFunction",
        "DTensor",
        "DeviceMesh",
        "Layout",
        "Partial",
        "Placement",
        "RaggedShard",
        "Replicate",
        "Shard",
        "SkipDTensorDispatch",
        "StridedShard",
        "custom_shard",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "full",
        "get_current_mesh",
        "implicit_replication",
        "init_device_mesh",
        "init_empty_weights",
        "init_on_device",
        "init_parameters",
        "local_map",
        "ones",
        "parallelize_value_and_grad",
        "rand",
        "randn",
        "register_sharding",
        "shard_module",
        "visualize_sharding",
        "zeros",
    ),
    "hp_styles": (
        "AsyncContextParallel",
        "AsyncDSAIndexerContextParallel",
        "AsyncDSAIndexerLossContextParallel",
        "AsyncDSASparseAttentionContextParallel",
        "ColwiseParallel",
        "ContextParallel",
        "DSAIndexerContextParallel",
        "DSAIndexerLossContextParallel",
        "DSASparseAttentionContextParallel",
        "ParallelStyle",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "TwoDimensionalParallel",
        "context_parallel",
        "context_parallel_shard",
        "context_parallel_unshard",
        "loss_parallel",
        "parallelize_module",
        "sequence_parallel_plan",
    ),
    "hp_fsdp": (
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "HSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "StateDictOptions",
        "UnshardHandle",
        "clip_grad_norm_",
        "explain",
        "full_state_dict",
        "fully_shard",
        "get_model_state_dict",
        "get_state_dict",
        "get_optimizer_state_dict",
        "global_grad_norm",
        "hsdp",
        "hsdp_sync_stream",
        "load_full_state_dict",
        "modules_by_size",
        "register_fsdp_forward_method",
        "set_model_state_dict",
        "set_state_dict",
        "set_optimizer_state_dict",
        "share_comm_ctx",
        "watch_activations",
    ),
    "hp_plan": (
        "DataSection",
        "Finding",
        "FsdpSection",
        "MeshSection",
        "ModelSection",
        "ModuleDifference",
        "OptimizerSection",
        "ParallelPlan",
        "PlanError",
        "RunSection",
        "ScheduleSection",
        "VerifyResult",
        "apply",
        "build_model",
        "build_optimizer",
        "build_schedule",
        "lint",
        "verify",
    ),
}


def names() -> list[str]:
    """The public names of the packages that are installed."""
    return [name for package, inside in PUBLIC.items() if _installed(package) for name in inside]


def resolve(name: str) -> Any:
    """The object called `name`.

    Raises:
        AttributeError: no package has such a name.
        ImportError: the package that has it isn't installed.
    """
    for package, inside in PUBLIC.items():
        if name in inside:
            if not _installed(package):
                distribution = package.replace("_", "-")
                raise ImportError(f"{name} is in {distribution}, which is not installed: pip install {distribution}")
            return getattr(importlib.import_module(package), name)
    raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
