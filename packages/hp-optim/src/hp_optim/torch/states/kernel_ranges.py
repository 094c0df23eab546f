"""Runs: memory that one entry of one call of AdamW's kernel updates.

Note [Tails]
    On CPU a kernel computes whole vectors of elements, and the rest of a tensor one by one, where the compiler may
    contract a product and a sum. So the last elements of a shard would have other bits than the same elements in the
    middle of another. They are copied to where a whole vector follows, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

_VECTOR = 64
"""Elements that every kernel divides into whole vectors."""
_fused_kernel: Any = torch._fused_adamw_
_listed_kernel: Any = adamw


@dataclass(frozen=True)
class Runs:
    """What does not change from step to step; see Note [Runs] in `hp_optim.torch.states.blocks`.

    Attributes:
        first: the first parameter of each.
        sizes: number of elements of each.
        ends: how many of them are whole vectors.
        full: the runs that have whole vectors.
        left: the runs that have elements behind them; see Note [Tails].
        parameters: memory that is updated, one tensor for each run, whole vectors of it.
        states: the same of each state.
        steps: the step counter of each.
        tails: what is left of parameters, then of each state.
        rows: where `tails` are copied, of parameters, then of gradients, then of each state.
        scratch: the same with whole vectors.
    """

    first: list[int]
    sizes: list[int]
    ends: list[int]
    full: list[int]
    left: list[int]
    parameters: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    tails: list[list[torch.Tensor]]
    rows: list[list[torch.Tensor]]
    scratch: list[torch.Tensor]

    @staticmethod
    def of(first: Sequence[int], memory: Sequence[list[torch.Tensor]], steps: Sequence[torch.Tensor]) -> Runs:
        """Divide runs into whole vectors and the rest.

        Args:
            first: the first parameter of each.
            memory: of each the parameters', then that of each state; flat.
            steps: the step counter of each.
        """
        sizes = [tensors[0].numel() for tensors in memory]
        states = len(memory[0]) - 1
        on_cpu = all(tensor.device.type == "cpu" for tensor in (*memory[0], *steps))
        vector = _VECTOR if on_cpu else 1
        ends = [size - size % vector for size in sizes]
        full = [n for n, end in enumerate(ends) if end]
        left = [n for n, (end, size) in enumerate(zip(ends, sizes)) if end < size]
        tails = [[memory[n][k][ends[n] :] for n in left] for k in range(states + 1)]
        scratch = [memory[0][0].new_zeros(len(left), vector) for _ in range(states + 2)]
        rows = [[each[row, : sizes[n] - ends[n]] for row, n in enumerate(left)] for each in scratch]
        return Runs(
            first=list(first),
            sizes=sizes,
            ends=ends,
            full=full,
            left=left,
            parameters=[memory[n][0][: ends[n]] for n in full] + list(scratch[0]),
            states=[[memory[n][k][: ends[n]] for n in full] + list(scratch[k + 1]) for k in range(1, states + 1)],
            steps=[steps[n] for n in (*full, *left)],
            tails=tails,
            rows=rows,
            scratch=scratch,
        )

    def update(
        self,
        gradients: list[torch.Tensor],
        group: dict[str, Any],
        fused: bool,
        scale: torch.Tensor | None,
        found: torch.Tensor | None,
    ) -> None:
        """Do a step of AdamW.

        Args:
            gradients: of each run, flat.
            group: hyperparameters.
            fused: use the fused kernel.
            scale: what the gradients are divided by; see ``torch.amp.GradScaler``.
            found: one where some gradient is not finite, which leaves everything as it is.
        """
        parts = [gradients[n][: self.ends[n]] for n in self.full] + list(self.scratch[1])
        if self.left:
            # Parameters, gradients, states: what is left of a vector, with zeros behind it.
            torch._foreach_copy_(
                _flatten(self.rows),
                [*self.tails[0], *(gradients[n][self.ends[n] :] for n in self.left), *_flatten(self.tails[1:])],
            )
        largest = self.states[2] if group["amsgrad"] else []
        tensors: Any = [self.parameters, parts, *self.states[:2], largest]
        beta1, beta2 = map(float, group["betas"])
        lr = group["lr"]
        options: dict[str, Any] = {key: group[key] for key in ("amsgrad", "weight_decay", "eps", "maximize")}
        if fused:
            if isinstance(lr, torch.Tensor) and lr.device != self.steps[0].device:
                lr = lr.to(self.steps[0].device)
            _fused_kernel(
                *tensors, self.steps, lr=lr, beta1=beta1, beta2=beta2, grad_scale=scale, found_inf=found, **options
            )
        else:
            steps = [step - 1 for step in self.steps]  # the kernel counts it again
            foreach = group["foreach"] is not False and not isinstance(lr, torch.Tensor)  # torch's has no such lr
            _listed_kernel(*tensors, steps, foreach=foreach, lr=lr, beta1=beta1, beta2=beta2, **options)
        if self.left:
            torch._foreach_copy_(_flatten(self.tails), [*self.rows[0], *_flatten(self.rows[2:])])


def _flatten(lists: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for each in lists for tensor in each]
