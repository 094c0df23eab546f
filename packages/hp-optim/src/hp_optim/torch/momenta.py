"""Momenta of Muon, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Momenta"]


class Momenta:
    """Momenta in the optimizer's state, read and written by a step."""

    def place(self, parameters: Sequence[torch.Tensor], state: Any) -> None:
        """Take over the momenta that the state has now."""

    def scaled(self, parameters: Sequence[torch.Tensor], state: Any, factors: list[float]) -> list[torch.Tensor]:
        """Return new tensors: each momentum times its factor.

        Args:
            parameters: those that have elements here.
            state: the optimizer's.
            factors: one for each.
        """
        return list(torch._foreach_mul([state[each]["momentum_buffer"] for each in parameters], factors))

    def store(self, parameters: Sequence[torch.Tensor], state: Any, momenta: list[torch.Tensor]) -> None:
        """Keep the new momenta.

        Args:
            parameters: some of those that `scaled` had.
            state: the optimizer's.
            momenta: the tensors that `scaled` returned for them, changed.
        """
        torch._foreach_copy_([state[each]["momentum_buffer"] for each in parameters], momenta)
