"""Names on PyTorch that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_plan.torch.build import begin, build_objective, finish
from hp_plan.torch.library.adapters import adapter_texts
from hp_plan.torch.library.folders import no_progress_bars
from hp_plan.torch.training.loss import backward_loss
from hp_plan.torch.training.monitor import Capture
from hp_plan.torch.training.objectives import evaluate, evaluating
from hp_plan.torch.training.origin import Hunt
from hp_plan.torch.training.parts import clip_gradients
from hp_plan.torch.training.replay import Replay
from hp_plan.torch.training.replicas import Replicas

__all__ = [
    "Capture",
    "Hunt",
    "Replay",
    "Replicas",
    "adapter_texts",
    "backward_loss",
    "begin",
    "build_objective",
    "clip_gradients",
    "evaluate",
    "evaluating",
    "finish",
    "no_progress_bars",
]
