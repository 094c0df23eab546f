"""What a router and a mixture of experts are made of, on any framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal


class RouterArguments:
    """Base of a framework's ``TokenChoiceTopKRouter``, where the arguments are described."""

    _linear: ClassVar[Any]

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        score_func: Literal["sigmoid", "softmax"] = "sigmoid",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self._check(num_experts, top_k, score_func, num_expert_groups, num_limited_groups)
        self.num_experts, self.top_k, self.score_func, self.route_scale = num_experts, top_k, score_func, route_scale
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.gate = self._linear(dim, num_experts, bias=False)

    def _check(self, experts: int, top_k: int, score_func: str, groups: int | None, limited: int | None) -> None:
        name = "TokenChoiceTopKRouter"
        if not 1 <= top_k <= experts:
            raise ValueError(f"{name}: top_k must be from 1 to the {experts} experts, got {top_k}.")
        if score_func not in ("sigmoid", "softmax"):
            raise ValueError(f"{name}: score_func is 'sigmoid' or 'softmax', got {score_func!r}.")
        if (groups is None) != (limited is None):
            raise ValueError(
                f"{name}: num_expert_groups and num_limited_groups go together, got {groups} and {limited}."
            )
        if groups is None or limited is None:
            return
        if groups < 1 or experts % groups:
            raise ValueError(f"{name}: {experts} experts cannot be cut into {groups} equal groups.")
        if not 1 <= limited <= groups or limited * (experts // groups) < top_k:
            raise ValueError(
                f"{name}: {limited} of {groups} groups have {limited * (experts // groups)} experts, top_k is {top_k};"
                " num_limited_groups must be from 1 to num_expert_groups, and leave enough."
            )


class MixtureArguments:
    """Base of a framework's ``MoE``, where the arguments are described."""

    _parts: ClassVar[tuple[Any, Any]]
    _make_counts: Any

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 1,
        score_before_experts: bool = True,
        load_balance_coeff: float | None = None,
        sequence_partition_group: Any = None,
        shared_expert: Any = None,
        router_kwargs: Mapping[str, Any] | None = None,
        use_grouped_mm: bool = False,
    ) -> None:
        super().__init__()
        router, experts = self._parts
        self.router = router(dim, num_experts, top_k, **(router_kwargs or {}))
        self.experts = experts(dim, hidden_dim, num_experts, use_grouped_mm)
        self.shared_expert, self.score_before_experts = shared_expert, score_before_experts
        self.load_balance_coeff, self.sequence_partition_group = load_balance_coeff, sequence_partition_group
        self._make_counts(num_experts)
