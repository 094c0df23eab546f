"""Muon for MindSpore: momentum on the shards, whole matrices at their owners."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.experimental.optim.optimizer import Optimizer

from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.mindspore.extend import DTensor, local_mode, local_view, set_local
from hp_optim.agreement import agree_on
from hp_optim.mindspore.exchange import Exchanger
from hp_optim.mindspore.newton_schulz import compute_dtype, orthogonalize, scalar
from hp_optim.muon.newton_schulz import Orthogonalization
from hp_optim.muon.ownership import OwnerPlan, Placed
from hp_optim.muon.rules import MatrixRule, all_rules, rule_of, split
from hp_optim.muon.world import owner_plan, placed_as, world_of
from hp_optim.options import broken_gradient, check_gradients, check_group, check_options, muon_defaults
from hp_platform import get_platform
from hp_platform.extend import own_rank


class Muon(Optimizer):
    """See `hp_optim.Muon` on PyTorch, whose arguments these are; names are those of the Parameters.

    Call it with the gradients of ``parameters``, in their order: ``optimizer(gradients)``.

    Raises:
        ValueError: a number out of its range, an unknown variant, a parameter that is no matrix or that a rule does not
            fit, an empty group, a parameter in two groups; at the first step, other parameters or settings on other
            ranks, on all of them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_variant: str = "asym5",
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | None = None,
        ns_epsilon: float = 1e-10,
        head_wise: bool = False,
        head_dim: int | None = None,
        head_wise_patterns: Sequence[str] | None = None,
        *,
        ns_dtype: str | None = None,
        rules: Sequence[MatrixRule] = (),
    ) -> None:
        rules = all_rules(rules, head_wise, head_dim, head_wise_patterns)
        defaults = muon_defaults(
            lr,
            weight_decay,
            matched_adamw_rms,
            momentum,
            nesterov,
            ns_steps,
            ns_variant,
            ns_coefficients,
            ns_epsilon,
            ns_dtype,
        )
        listed = unnamed(params)
        for number, group in enumerate(listed):
            check_group("Muon", {**defaults, **group}, number, known=defaults)
            compute_dtype(None, get_platform().devices.kind, {**defaults, **group}["ns_dtype"])
        with SkipDTensorDispatch():
            super().__init__(listed, defaults)
        self._rules = rules
        self._placed = self._described()
        self.momentum_buffer = ParameterTuple(
            Parameter(ops.zeros_like(local_view(each)), name=f"momentum_buffer.{each.name}", requires_grad=False)
            for each in self.parameters
        )
        self._exchangers: list[tuple[list[int], Exchanger]] | None = None

    def construct(self, gradients: Sequence[Tensor]) -> bool:
        """Update the parameters; all ranks of their meshes call it.

        Args:
            gradients: of ``parameters``, in their order; DTensors of their layouts, or this rank's parts.

        Returns:
            Whether they were updated: False where a gradient is not finite on some rank.
        """
        problems: list[Exception] = []
        locals_: list[Tensor] = []
        placed: list[Placed] | None = None
        try:
            check_gradients("Muon", len(gradients), len(self.parameters))
            for number, group in enumerate(self.param_groups):
                check_options("Muon", group, number)
            locals_, placed = [local_view(each) for each in gradients], self._described()
        except Exception as problem:  # whatever it is, the others have to hear of it
            problems.append(problem)
        with local_mode():
            if self._exchangers is None:
                self._exchangers = self._planned(placed, problems)
            alarm = bool(problems) or placed != self._placed
            done = self._stepped(locals_, alarm)
            if done is None:
                self._exchangers = self._planned(placed, problems)
                done = self._stepped(locals_, False)
        return bool(done)

    def _described(self) -> list[Placed]:
        """Describe the parameters to the planner, with the settings that their groups have now."""
        pairs = zip(self.parameters, self._groups())
        return [_placed(parameter, self._rules, group) for parameter, group in pairs]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the group of each parameter, as it is now."""
        return [group for group in self.param_groups for _ in group["params"]]

    def _stepped(self, gradients: Sequence[Tensor], alarm: bool) -> bool | None:
        """Update the parameters; None where a rank raised the alarm, and nothing is changed."""
        done = [self._step(numbers, exchanger, gradients, alarm) for numbers, exchanger in self._exchangers or ()]
        return None if None in done else all(done)

    def _planned(self, placed: list[Placed] | None, problems: list[Exception]) -> list[tuple[list[int], Exchanger]]:
        """Choose owners, for the parameters of each dtype; all ranks choose the same, or all raise."""
        self._exchangers = None
        sorted_: dict[Any, list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            sorted_.setdefault(parameter.dtype, []).append(number)
        meshes = {each._spec.mesh for each in self.parameters if isinstance(each, DTensor)}
        plans: list[OwnerPlan] = []

        def describe() -> list[str]:
            if problems:
                raise problems.pop()  # nothing of this frame holds it
            assert placed is not None
            self._placed = placed
            plans.extend(owner_plan([self._placed[at] for at in numbers], meshes) for numbers in sorted_.values())
            return [each.line(str(dtype)) for dtype, plan in zip(sorted_, plans) for each in plan.parameters]

        agree_on("Muon", describe, world_of(meshes) or [own_rank()])
        exchangers = []
        for (dtype, numbers), plan in zip(sorted_.items(), plans):
            shapes = [tuple(self.momentum_buffer[number].shape) for number in numbers]
            exchangers.append((numbers, Exchanger(plan, own_rank(), shapes, dtype)))
        return exchangers

    def _step(
        self, numbers: Sequence[int], exchanger: Exchanger, gradients: Sequence[Tensor], alarm: bool
    ) -> bool | None:
        groups = self._groups()
        if alarm:
            exchanger.to_owners([], np.zeros(len(numbers), dtype=bool), alarm=True)
            return None
        momenta, updates = [], []
        for at in numbers:
            group, gradient = groups[at], gradients[at]
            factor = scalar(group["momentum"], gradient)
            momenta.append(self.momentum_buffer[at] * factor + gradient)
            updates.append(momenta[-1] * factor + gradient if group["nesterov"] else momenta[-1])
        broken = np.array([not bool(ops.isfinite(gradients[at]).all()) for at in numbers])
        batches, broken, alarm = exchanger.to_owners(updates, broken)
        if alarm:
            return None
        if broken.any():
            names = [self._placed[at].name for at, flag in zip(numbers, broken) if flag]
            warnings.warn(broken_gradient("Muon", names), RuntimeWarning, stacklevel=4)
            return False
        kind, results = get_platform().devices.kind, []
        for batch, plan in zip(batches, exchanger.exchange.batches):
            settings: Any = plan.settings
            matrices = batch.astype(compute_dtype(batch.dtype, kind, settings.dtype))
            orthogonal = orthogonalize(matrices, settings.coefficients, settings.epsilon).astype(batch.dtype)
            results.append(orthogonal * scalar(settings.scale(plan.rows, plan.columns), orthogonal))
        for at, momentum, update in zip(numbers, momenta, exchanger.to_holders(results)):
            group, parameter = groups[at], self.parameters[at]
            lr = float(group["lr"].asnumpy())
            own = local_view(parameter)
            set_local(self.momentum_buffer[at], momentum)
            set_local(parameter, own * scalar(1 - lr * group["weight_decay"], own) - update * scalar(lr, own))
        return True


def unnamed(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups of Parameters: of Parameters, pairs of a name and a Parameter, or groups of either.

    Args:
        params: an optimizer's argument.
    """
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    return [
        {**group, "params": [each[1] if isinstance(each, tuple) else each for each in group["params"]]}
        for group in groups
    ]


def _placed(parameter: Any, rules: Sequence[MatrixRule], group: dict[str, Any]) -> Placed:
    name, spec = parameter.name, parameter._spec if isinstance(parameter, DTensor) else None
    shape = tuple(parameter.shape if spec is None else spec.shape)
    return placed_as(name, shape, spec, split(shape, rule_of(name, rules), name), Orthogonalization.of_group(group))
