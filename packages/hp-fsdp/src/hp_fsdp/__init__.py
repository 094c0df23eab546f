"""Fully-sharded data parallel training: `fully_shard` on a flat, ragged, zero-copy buffer.

Policies and planning are framework-neutral; what touches tensors is in the framework's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_platform import lazy_exports

if TYPE_CHECKING:
    from hp_fsdp.torch.api import fully_shard
    from hp_fsdp.torch.grad_norm import clip_grad_norm_, global_grad_norm
    from hp_fsdp.torch.module import HSDPModule
    from hp_fsdp.torch.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "global_grad_norm",
    "load_full_state_dict",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "HSDPModule": "module",
        "clip_grad_norm_": "grad_norm",
        "full_state_dict": "state_dict",
        "fully_shard": "api",
        "global_grad_norm": "grad_norm",
        "load_full_state_dict": "state_dict",
    },
)
