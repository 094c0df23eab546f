"""Momenta of Muon, on the device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

__all__ = ["Momenta"]


class Momenta:
    """Momenta in the optimizer's state, read and written by a step."""

    def place(self, parameters: Sequence[torch.Tensor], state: Any) -> None:
        """Take over the momenta that the state has now, in their parameters' dtype and on their device."""
        for parameter in parameters:
            own = state[parameter]
            buffer = own.get("momentum_buffer")
            if buffer is not None and (buffer.dtype, buffer.device) != (parameter.dtype, parameter.device):
                own["momentum_buffer"] = torch.empty_like(parameter, requires_grad=False).copy_(buffer)

    def keep(self, parameters: Container[torch.Tensor]) -> None:
        """Let go what is not of one of these parameters."""

    def settle(self) -> None:
        """Wait until the states can be read."""

    def held(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state that is to be loaded, without what torch would move or convert."""
        return state_dict

    def scaled(
        self, parameters: Sequence[torch.Tensor], states: Sequence[Any], factors: list[float]
    ) -> list[torch.Tensor]:
        """Return new tensors: each momentum times its factor.

        Args:
            parameters: those that have elements here.
            states: of each.
            factors: one for each.
        """
        return list(torch._foreach_mul([state["momentum_buffer"] for state in states], factors))

    def store(self, parameters: Sequence[torch.Tensor], states: Sequence[Any], momenta: list[torch.Tensor]) -> None:
        """Keep the new momenta.

        Args:
            parameters: some of those that `scaled` had.
            states: of each.
            momenta: the tensors that `scaled` returned for them, changed.
        """
        torch._foreach_copy_([state["momentum_buffer"] for state in states], momenta)
