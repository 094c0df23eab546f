"""Training a torch model."""

from __future__ import annotations

from typing import Any

import torch

from hp_fsdp import clip_grad_norm_, global_grad_norm
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, build_schedule
from hp_plan.torch.extend import forward_loss
from hp_platform import get_platform


class Trainer:
    """A plan's model under the plan, its optimizer and schedule.

    Args:
        plan: the plan to train.

    Attributes:
        model: under the plan.
        name: of its class.
        size: number of elements of its parameters.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._device = get_platform().devices.current_device()
        model = build_model(plan)
        self.name = type(model).__name__
        self.model = apply(model.to(self._device), plan)
        self.size = sum(parameter.shape.numel() for parameter in self.model.parameters())
        self._optimizer = build_optimizer(plan, self.model.parameters())
        self._schedule = build_schedule(plan, self._optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self, rows: Any) -> tuple[float, float]:
        """Take one optimizer step.

        Args:
            rows: this rank's samples, a numpy array of tokens.

        Returns:
            The loss of these samples, and the norm of all gradients before clipping.
        """
        parameters, clip = list(self.model.parameters()), self._plan.run.grad_clip
        self._optimizer.zero_grad()
        loss = forward_loss(self._plan, self.model, torch.from_numpy(rows).to(self._device))
        loss.backward()
        norm = global_grad_norm(parameters) if clip is None else clip_grad_norm_(parameters, clip)
        self._optimizer.step()
        self._schedule.step()
        return loss.item(), norm.item()

    def gather(self, loss: float, memory: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Gather every rank's loss and memory."""
        groups, collectives = get_platform().groups, get_platform().collectives
        ranks = groups.size()
        mine = torch.tensor([loss, float(memory)], dtype=torch.float64, device=self._device)
        everyone = torch.empty(ranks * 2, dtype=torch.float64, device=self._device)
        collectives.all_gather(everyone, mine, group=groups.new_group(range(ranks)))
        losses, peaks = zip(*everyone.view(ranks, 2).tolist(), strict=True)
        return losses, tuple(int(peak) for peak in peaks)
