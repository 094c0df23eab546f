"""Mixtures of experts over ranks, for unmodified models: no token is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_moe.layer.layer import overlap_experts
from hp_moe.placement.placement import ExpertPlacement, plan_replicas
from hp_moe.placement.rebalancing import get_placement_state, place_experts, rebalance, set_placement_state
from hp_moe.routes.capacity import Drops, report_drops
from hp_moe.styles import BaseExpertParallel, ExpertParallel, ExpertTensorParallel, TensorParallel
from hp_platform.extend import lazy_exports

if TYPE_CHECKING:
    from hp_moe.torch.balance import MoEAuxLossAutoScaler, global_auxiliary_loss, update_expert_bias
    from hp_moe.torch.modules import FeedForward, GroupedExperts, MoE, TokenChoiceTopKRouter, register_experts

__all__ = [
    "BaseExpertParallel",
    "Drops",
    "ExpertParallel",
    "ExpertTensorParallel",
    "FeedForward",
    "GroupedExperts",
    "MoE",
    "MoEAuxLossAutoScaler",
    "ExpertPlacement",
    "TensorParallel",
    "TokenChoiceTopKRouter",
    "get_placement_state",
    "global_auxiliary_loss",
    "place_experts",
    "overlap_experts",
    "plan_replicas",
    "register_experts",
    "rebalance",
    "report_drops",
    "set_placement_state",
    "update_expert_bias",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FeedForward": "modules",
        "GroupedExperts": "modules",
        "MoE": "modules",
        "MoEAuxLossAutoScaler": "balance",
        "TokenChoiceTopKRouter": "modules",
        "global_auxiliary_loss": "balance",
        "register_experts": "modules",
        "update_expert_bias": "balance",
    },
)
