"""AdamW for MindSpore: its own, on this rank's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindspore import Tensor
from mindspore.experimental import optim

from hp_dtensor import SkipDTensorDispatch
from hp_dtensor.mindspore.extend import local_view
from hp_optim.mindspore.muon import AllGroupsAtOnce, unnamed
from hp_optim.options import check_gradients, check_group


class AdamW(AllGroupsAtOnce, optim.AdamW):
    """``mindspore.experimental.optim.AdamW`` for plain Parameters and DTensors of any layout.

    Call it with the gradients of ``parameters``, in their order: ``optimizer(gradients)``. States are sharded as the
    parameters are, and no step communicates.

    Args:
        params: Parameters, pairs of a name and a Parameter, or groups of either.
        lr: the learning rate.
        betas: of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: decoupled.
        amsgrad: divide by the largest average so far.
        maximize: ascend.

    Raises:
        ValueError: a number out of its range, an empty group, a parameter in two groups.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        listed = unnamed(params)
        for number, group in enumerate(listed):
            known = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            check_group("AdamW", {**known, **group}, number, known=[*known, "amsgrad", "maximize"])
        with SkipDTensorDispatch():
            super().__init__(listed, float(lr), betas, eps, float(weight_decay), amsgrad=amsgrad, maximize=maximize)
        self._complete = True

    def construct(self, gradients: Sequence[Tensor]) -> Any:
        """Update the parameters.

        Args:
            gradients: of ``parameters``, in their order; DTensors of their layouts, or this rank's parts.
        """
        check_gradients("AdamW", len(gradients), len(self.parameters))
        with SkipDTensorDispatch():
            return super().construct(tuple(local_view(each) for each in gradients))
