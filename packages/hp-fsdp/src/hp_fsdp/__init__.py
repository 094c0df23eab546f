"""Fully-sharded data parallel training: `fully_shard` on a flat, ragged, zero-copy buffer.

Policies, planning and the order of events are framework-neutral; tensors are touched in the frameworks' folders only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_fsdp.api import fully_shard, hsdp, modules_by_size
from hp_fsdp.axes import DataParallelMeshDims
from hp_fsdp.explanation.explain import explain
from hp_fsdp.grad_norm import clip_grad_norm_, global_grad_norm
from hp_fsdp.module_api import UnshardHandle, share_comm_ctx
from hp_fsdp.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_fsdp.state_dict.model import (
    StateDictOptions,
    full_state_dict,
    get_model_state_dict,
    load_full_state_dict,
    set_model_state_dict,
)
from hp_fsdp.state_dict.optimizer import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hp_platform.extend import lazy_exports

if TYPE_CHECKING:
    from hp_fsdp.torch.activations import watch_activations
    from hp_fsdp.torch.module import FSDPModule, HSDPModule, register_fsdp_forward_method
    from hp_fsdp.torch.steps.context import hsdp_sync_stream

__all__ = [
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
    "get_optimizer_state_dict",
    "get_state_dict",
    "global_grad_norm",
    "hsdp",
    "hsdp_sync_stream",
    "load_full_state_dict",
    "modules_by_size",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "share_comm_ctx",
    "watch_activations",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FSDPModule": "module",
        "HSDPModule": "module",
        "hsdp_sync_stream": "module",
        "register_fsdp_forward_method": "module",
        "watch_activations": "explain",
    },
)
