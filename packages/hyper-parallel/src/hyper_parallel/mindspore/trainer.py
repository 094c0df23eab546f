"""Training a MindSpore Cell, and saving it for transformers as for MindSpore: the names are the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
from mindspore import Tensor, nn, ops

from hp_dtensor import SkipDTensorDispatch, parallelize_value_and_grad
from hp_fsdp import clip_grad_norm_, full_state_dict, global_grad_norm
from hp_optim import ChainedOptimizer
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, build_schedule
from hp_plan.mindspore.extend import forward_loss, named_parameters
from hp_platform import get_platform
from hyper_parallel.data import Rows


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
        self.model: Any = build_model(plan)
        self.name = type(self.model).__name__
        self.size = sum(parameter.size for parameter in self.model.get_parameters())
        apply(self.model, plan)
        self.model.set_train()  # A Cell is made for inference, without dropout.
        self._weights = list(self.model.trainable_params())
        self._optimizer: Any = build_optimizer(plan, self._weights)
        self._schedule = build_schedule(plan, self._optimizer)
        self._gradients: Any = parallelize_value_and_grad(self._loss, None, self._weights)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _loss(self, tokens: Tensor) -> Tensor:
        return forward_loss(self._plan, self.model, tokens)

    def step(self, rows: Rows) -> tuple[float, float]:
        """Take one optimizer step.

        Args:
            rows: this rank's samples.

        Returns:
            The loss of these samples, and the norm of all gradients before clipping.
        """
        loss, gradients = self._gradients(Tensor(rows.tokens))
        clip = self._plan.run.grad_clip
        if clip is None:
            norm: Any = global_grad_norm(self._weights, gradients=gradients)
        else:
            norm = clip_grad_norm_(self._weights, clip, gradients=gradients)
        with SkipDTensorDispatch():
            if isinstance(self._optimizer, ChainedOptimizer):
                self._optimizer.step({weight.name: each for weight, each in zip(self._weights, gradients)})
            else:
                self._optimizer(gradients)
        self._schedule.step()
        return float(loss.asnumpy()), float(norm.asnumpy())

    def gather(self, loss: float | None, memory: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Gather every rank's loss and memory."""
        losses = _gather(Tensor([loss], mindspore.float32))
        return tuple(losses), tuple(_gather(Tensor([memory], mindspore.int64)))


def _gather(mine: Tensor) -> list[Any]:
    groups = get_platform().groups
    everyone = ops.zeros((groups.size(),), mine.dtype)
    get_platform().collectives.all_gather(everyone, mine, group=groups.new_group(range(groups.size())))
    return everyone.asnumpy().tolist()


def save_checkpoint(plan: ParallelPlan, model: nn.Cell, folder: Path) -> None:
    """Gather the full model and write it on rank 0: model.safetensors. Every rank calls it.

    Parameters that are one tensor are written once, under the first of their names, as transformers does.

    Args:
        plan: the plan of the model.
        model: after `hp_plan.apply`.
        folder: an existing folder.
    """
    from safetensors.numpy import save_file

    state: Any = full_state_dict(model, rank0_only=True, cpu=True)
    if get_platform().groups.rank() != 0:
        return
    once = {id(parameter): name for name, parameter in reversed(list(named_parameters(model)))}
    arrays = {name: state[name].asnumpy() for name in reversed(once.values())}
    save_file(arrays, folder / "model.safetensors")


def write_sample(plan: ParallelPlan, folder: Path) -> None:
    """Nothing: a function's model says of no way to generate."""
