"""MuonArguments: the arguments of Muon on any framework, and what they mean for its groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hp_optim.muon.rules import MatrixRule, all_rules


class MuonArguments:
    """Base of a framework's Muon, before its class of optimizers; the arguments are described there."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 0.02,
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
        self._begin(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "matched_adamw_rms": matched_adamw_rms,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_steps": ns_steps,
                "ns_variant": ns_variant,
                "ns_coefficients": ns_coefficients,
                "ns_epsilon": ns_epsilon,
                "ns_dtype": ns_dtype,
            },
            all_rules(rules, head_wise, head_dim, head_wise_patterns),
        )

    def _begin(self, params: Iterable[Any], defaults: dict[str, Any], rules: Sequence[MatrixRule]) -> None:
        """Initialise the framework's optimizer.

        Args:
            params: see there.
            defaults: the hyperparameters of a group that sets none of its own.
            rules: which matrices parameters hold, those of the heads among them.
        """
        raise NotImplementedError
