"""Training a MindSpore Cell, and saving it for transformers as for MindSpore: the names are the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from hp_dtensor import SkipDTensorDispatch, parallelize_value_and_grad
from hp_fsdp import HSDPModule, clip_grad_norm_, global_grad_norm
from hp_optim import ChainedOptimizer
from hp_plan import Diagnostic, ParallelPlan, PlanError, apply, build_model, build_optimizer, build_schedule
from hp_plan.extend import cut_rows, data_parallel_place, draws, multiple_of_first, share_out
from hp_plan.mindspore.extend import forward_loss
from hp_platform import get_platform
from hp_platform.extend import share_numbers
from hyper_parallel.data import Rows

_Kernel = ops.Dropout


class Trainer:
    """A plan's model under the plan, its optimizer and schedule.

    Args:
        plan: the plan to train.
        weights: they are always set.

    Attributes:
        model: under the plan.
        optimizer: of its parameters.
        schedule: of the optimizer's learning rate.
        name: of its class.
        size: number of elements of its parameters.
        trained: how many of them are trained.
        operations: None; they are not counted.
        adapter: None; a plan with one is refused.
        measures: nothing is measured beside the loss.
        measured: None.
        capture: None; a plan with `[monitor]` is refused.
        replay: None; a plan with `[sdc]` is refused.
        replicas: None; likewise.
    """

    operations = None
    adapter = None
    measures: Sequence[str] = ()
    measured = None
    capture = None
    replay = None
    replicas = None

    def __init__(self, plan: ParallelPlan, *, weights: bool = True) -> None:
        self._plan = plan
        self.model: Any = build_model(plan)
        self.name = type(self.model).__name__
        self.size = sum(parameter.size for parameter in self.model.get_parameters())
        self.trained = sum(parameter.size for parameter in self.model.trainable_params())
        apply(self.model, plan)
        self.model.set_train()  # A Cell is made for inference, without dropout.
        _seed_dropouts(self.model, plan)
        self._weights = list(self.model.trainable_params())
        self.optimizer: Any = build_optimizer(plan, self._weights)
        self.schedule = build_schedule(plan, self.optimizer)
        self._multiple = multiple_of_first(self.optimizer, [(each.name, each) for each in self._weights], plan)
        world = get_platform().groups.size()
        shares = share_out(plan, [[1] * plan.run.accumulate] * world, 0)  # all tokens count
        self._weight, self._scale = shares.weights[0], shares.scale
        self._own: list[Any] = []
        self._gradients: Any = parallelize_value_and_grad(self._loss, None, self._weights)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of parameters that have no multiple of it."""
        return float(self.optimizer.param_groups[0]["lr"]) / self._multiple

    def _loss(self, tokens: Tensor) -> Tensor:
        loss = forward_loss(self._plan, self.model, tokens)
        return loss if self._weight == 1.0 else loss * self._weight

    def _backward(self, tokens: Any) -> tuple[float, list[Any]]:
        """Return the loss of this rank's samples and its gradients, of one micro-batch after the other."""
        rows, total, gradients = cut_rows(self._plan, len(tokens)), 0.0, []
        sharded = isinstance(self.model, HSDPModule)
        if sharded and self._plan.run.deterministic:
            self.model.set_reduce_op_type("sum")
        draw = draws(self._plan, len(rows))
        for number, part in enumerate(rows):
            draw(number)
            if sharded and len(rows) > 1:  # gradients that wait for the last are zeros here
                self.model.set_requires_gradient_sync(number == len(rows) - 1)
            loss, own = self._gradients(Tensor(tokens[part]))
            total += float(loss.asnumpy())
            with SkipDTensorDispatch():
                gradients = [a + b for a, b in zip(gradients, own, strict=True)] if gradients else list(own)
        return total * self._scale, gradients

    def gradients(self, rows: Rows) -> tuple[float, Tensor]:
        """Compute the gradients of a step.

        Args:
            rows: this rank's samples.

        Returns:
            The loss of these samples, and the norm of all gradients before clipping.
        """
        loss, self._own = self._backward(rows.tokens)
        clip = self._plan.run.grad_clip
        if clip is None:
            return loss, global_grad_norm(self._weights, gradients=self._own)
        return loss, clip_grad_norm_(self._weights, clip, gradients=self._own)

    def update(self) -> None:
        """Take the optimizer's step, and the schedule's."""
        gradients, self._own = self._own, []
        with SkipDTensorDispatch():
            if isinstance(self.optimizer, ChainedOptimizer):
                self.optimizer.step({weight.name: each for weight, each in zip(self._weights, gradients)})
            else:
                self.optimizer(gradients)
        self.schedule.step()

    def origin(self, rows: Rows) -> None:
        """Return nothing: a step is not run again to look for a NaN."""

    def experts(self, *, loads: bool = True) -> None:
        """Return nothing: experts are not spread over ranks by a plan."""

    def go_on(self, step: int, experts: Mapping[str, Any] | None) -> None:
        """Go on after a step whose weights and states have been loaded: nothing else is counted."""

    def evaluate(self, rows: Rows) -> tuple[list[float], float]:
        """Compute a loss without training on it.

        Args:
            rows: this rank's samples.

        Returns:
            The loss of these samples, and the number of their labels.
        """
        self.model.set_train(False)
        try:
            loss: Any = forward_loss(self._plan, self.model, Tensor(rows.tokens))
        finally:
            self.model.set_train()
        return [float(loss.asnumpy())], float(rows.tokens.size - len(rows))

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """Refuse to: a function's model says of no way to generate; the plan is refused before."""
        raise NotImplementedError("a Cell that a function returns has no way to generate that is known")


def _seed_dropouts(model: Any, plan: ParallelPlan) -> None:
    """Let ranks with other samples drop others; see Note [Draws of a step] in `hp_plan.checks.alike`.

    A Cell of dropout has a kernel with a seed and a state of its own, which no other seed sets back. A new kernel each
    step would be compiled and kept each step.

    Raises:
        PlanError: `run.deterministic`, with such a Cell.
    """
    names = {
        name: cell for name, cell in model.cells_and_names() if isinstance(getattr(cell, "dropout", None), _Kernel)
    }
    if names and plan.run.deterministic:
        message = f"got true, but {next(iter(names))!r} is a Cell of dropout, which draws on from a seed of its own"
        raise PlanError([Diagnostic("run.deterministic", message, "call mindspore.ops.dropout, or leave it out")])
    place = data_parallel_place(plan)
    for number, cell in enumerate(names.values()):
        seed = plan.run.seed * plan.mesh.data_parallel + place
        own: Any = cell.dropout
        cell.dropout = _Kernel(own.keep_prob, Seed0=seed % 2**31 + 1, Seed1=number + 1)


def write_sample(plan: ParallelPlan, folder: Path) -> None:
    """Nothing: a function's model says of no way to generate."""


class Numbers:
    """Numbers of every rank.

    Args:
        own: this rank's, tensors of one element or plain numbers; every rank has as many.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        groups = get_platform().groups
        plain = [float(number.asnumpy()) if hasattr(number, "asnumpy") else float(number) for number in own]
        self._numbers = np.array(share_numbers(plain, groups.default_group() if groups.is_initialized() else None))

    def read(self) -> NDArray[np.float64]:
        """Return the numbers as [ranks, numbers]."""
        return self._numbers

    def ready(self) -> bool:
        """Tell whether the numbers are there."""
        return True
