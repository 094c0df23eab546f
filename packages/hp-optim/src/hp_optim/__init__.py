"""Optimizers that know how their parameters are sharded: AdamW, Muon, learning-rate schedules.

Rules, owners and schedules are framework-neutral; what touches tensors is in the framework's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_optim.chained import ChainedOptimizer, get_hyper_optimizer
from hp_optim.lr_schedulers import LRScheduler, LRSchedulersContainer, Schedule, get_hyper_lr_scheduler
from hp_optim.muon.rules import HEAD_WISE_PATTERNS, NS_VARIANTS, MatrixRule
from hp_optim.swapping import SwapOptimizerConfig, swap_optimizer
from hp_platform.extend import lazy_exports

if TYPE_CHECKING:
    from hp_optim.torch.adamw import AdamW
    from hp_optim.torch.adamw8bit import AdamW8bit
    from hp_optim.torch.muon import Muon

__all__ = [
    "HEAD_WISE_PATTERNS",
    "NS_VARIANTS",
    "AdamW",
    "AdamW8bit",
    "ChainedOptimizer",
    "LRScheduler",
    "LRSchedulersContainer",
    "MatrixRule",
    "Muon",
    "Schedule",
    "SwapOptimizerConfig",
    "get_hyper_lr_scheduler",
    "get_hyper_optimizer",
    "swap_optimizer",
]

__getattr__, __dir__ = lazy_exports(__name__, {"AdamW": "adamw", "AdamW8bit": "adamw8bit", "Muon": "muon"})
