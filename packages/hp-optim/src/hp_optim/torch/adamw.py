"""AdamW on blocks of memory; see Note [Runs] in `hp_optim.torch.blocks`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hp_dtensor.torch.extend import refuse_foreign
from hp_optim.options import broken_gradient, check_group, parameter_names
from hp_optim.torch.blocks import Block, Members, Resident
from hp_optim.torch.finiteness import broken_gradients

__all__ = ["AdamW"]

_plain = torch._C.DisableTorchFunctionSubclass


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that updates neighbouring parameters as one tensor, with states from the beginning.

    Parameters may be plain tensors or DTensors of any layout; states are sharded as they are, and no step
    communicates. Every parameter has its state from construction, so that all ranks have the same keys. State dicts are
    those of ``torch.optim.AdamW``, which loads them and whose it loads. Weights have the same bits for any layout.

    Args:
        params: parameters, pairs of a name and a parameter, or groups of either.
        lr: the learning rate; a tensor of one element is read at each step.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: decoupled.
        amsgrad: divide by the largest average so far.
        maximize: ascend.
        foreach: use the foreach implementation. Default: where there is no fused one.
        fused: use the fused implementation. Default: on CPU and CUDA. With True a GradScaler lets it divide.
        skip_nonfinite: before a step look whether all gradients are finite on all ranks, by one small all-reduce; where
            they are not, all ranks warn with the parameters' names and leave weights and states as they are. After
            `hp_fsdp.clip_grad_norm_` it is not needed: step only if the norm, the same on all ranks, is finite.

    Raises:
        ValueError: a number out of its range, an empty group, a parameter in two groups.
        TypeError: a parameter that is a DTensor of torch's own, or no floating-point tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.skip_nonfinite = skip_nonfinite
        self._blocks: list[Block] = []
        self._places: Any = self._placing()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as of ``torch.optim.Optimizer``; they get their states.

        Raises:
            ValueError, TypeError: see `AdamW`; the optimizer is as it was.
        """
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            self._check(self.param_groups[number], number)
        except Exception:
            del self.param_groups[number]
            raise
        self._lay_out(self._blocks, [number])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, this class's or ``torch.optim.AdamW``'s, into the memory of the present one."""
        super().load_state_dict(state_dict)
        self._lay_out([], range(len(self.param_groups)))

    def _placing(self) -> Resident:
        """Return what makes blocks of parameters."""
        return Resident()

    def _check(self, group: dict[str, Any], number: int) -> None:
        check_group(type(self).__name__, group, number)
        for name, parameter in zip(parameter_names(group, number), group["params"]):
            refuse_foreign(parameter, f"AdamW: parameter {name!r}")
            if not parameter.is_floating_point():
                raise TypeError(
                    f"AdamW: parameter {name!r} is of {parameter.dtype}, and only floating-point ones are updated."
                    " Freeze it, or give it to torch.optim.AdamW"
                )

    def _lay_out(self, blocks: list[Block], numbers: Iterable[int]) -> None:
        """Lay states of groups out, with the values that there are; what has no memory yet is left out."""
        with torch.no_grad(), _plain():
            members = [each for number in numbers for each in self._members(number)]
            self._blocks = self._places.added(blocks, members, self.state)

    def _members(self, number: int) -> list[Members]:
        """Sort a group's parameters by dtype and device."""
        group = self.param_groups[number]
        alike: dict[Any, Members] = {}
        for name, parameter in zip(parameter_names(group, number), group["params"]):
            if not parameter.is_meta:
                _, parameters, names = alike.setdefault((parameter.dtype, parameter.device), (group, [], []))
                parameters.append(parameter)
                names.append(name)
        return list(alike.values())

    def _complete(self) -> list[Block]:
        """Return what all parameters are in; some may have got memory since."""
        if sum(len(block.parameters) for block in self._blocks) != sum(len(g["params"]) for g in self.param_groups):
            self._lay_out([], range(len(self.param_groups)))
        return self._blocks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: computes the loss again and its gradients.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with _plain():
            if self.skip_nonfinite and self._skips():
                return loss
            self._places.visit(self._complete(), lambda block: block.step(scale, found))
        return loss

    def _skips(self) -> bool:
        """Warn where some rank has a gradient that is not finite."""
        named = [
            pair
            for n, group in enumerate(self.param_groups)
            for pair in zip(parameter_names(group, n), group["params"])
        ]
        broken = broken_gradients([name for name, _ in named], [parameter for _, parameter in named])
        if broken:
            warnings.warn(broken_gradient(type(self).__name__, broken), RuntimeWarning, stacklevel=4)
        return bool(broken)
