"""Small mixtures of experts of transformers, and plans for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hp_plan import ParallelPlan, PlanError, verify

TOLERANCE = 1e-10

_COMMON: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SHARED = {"moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_LINEAR = {f"linear_{kind}": 4 for kind in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}

# Arguments of each configuration, and the name of that for the number of experts.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3MoeConfig": ({"moe_intermediate_size": 8}, "num_experts"),
    "MixtralConfig": ({}, "num_local_experts"),
    "DeepseekV3Config": (
        {**_SHARED, **_LATENT, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
        "n_routed_experts",
    ),
    "Glm4MoeConfig": ({**_SHARED, "n_group": 1, "topk_group": 1}, "n_routed_experts"),
    "GptOssConfig": ({"layer_types": ["full_attention"] * 2}, "num_local_experts"),
    "Qwen3NextConfig": (
        {
            **_LINEAR,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "num_experts",
    ),
    "OlmoeConfig": ({}, "num_experts"),
}


def plan_of(config: str, mesh: dict[str, int], *, experts: int = 8, **tables: Any) -> ParallelPlan:
    """Return a plan for a small model of a family.

    Args:
        config: the configuration class.
        mesh: sizes of the axes.
        experts: number of experts in a layer; each token chooses two.
        tables: further sections; `overrides` of the model.
    """
    own, number = FAMILIES[config]
    if config == "DeepseekV3Config":
        own = {**own, "n_group": 2 if experts % 2 == 0 else 1}
    overrides = {**_COMMON, **own, number: experts, "num_experts_per_tok": 2, **tables.pop("overrides", {})}
    if config == "DeepseekV3Config":
        overrides.pop("head_dim")
    parts = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    return ParallelPlan.from_dict(
        {
            "model": {"config": config, "overrides": overrides},
            "mesh": mesh,
            "fsdp": {"groups": ["model.layers.*"]} if parts > 1 or "cp" in mesh else {},
            "data": {"batch_size": parts * (4 if "pp" in mesh else 2), "sequence_length": 2 * mesh.get("cp", 3)},
            "run": {"grad_clip": 0.5},
            **tables,
        }
    )


@dataclasses.dataclass(frozen=True)
class Cell:
    """A product of axes.

    Attributes:
        mesh: sizes of the axes.
        experts: number of experts in a layer.
        styles: of the plan.
    """

    mesh: dict[str, int]
    experts: int = 8
    styles: Any = "auto"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return ParallelPlan.from_dict({"mesh": self.mesh}).mesh.world_size


FEATURES = {"model.layers.*.mlp.experts": "expert_tensor_parallel"}
CELLS = {
    "ep 2": Cell({"dp_shard": 2, "ep": 2}),
    "ep 4, uneven": Cell({"dp_shard": 4, "ep": 4}, experts=6),
    "ep 2 x fsdp 2": Cell({"dp_shard": 4, "ep": 2}),
    "ep 2 x fsdp 2, uneven": Cell({"dp_shard": 4, "ep": 2}, experts=7),
    "hsdp, ep 2": Cell({"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "tp 2, ep 2": Cell({"tp": 2, "ep": 2}),
    "fsdp 2 x tp 2, ep 4": Cell({"dp_shard": 2, "tp": 2, "ep": 4}),
    "ep 2 x tp 2": Cell({"dp_shard": 2, "tp": 2, "ep": 2}, styles=FEATURES),
    "pp 2, ep 2": Cell({"pp": 2, "dp_shard": 2, "ep": 2}),
    "pp 2 x tp 2, ep 2": Cell({"pp": 2, "tp": 2, "ep": 2}),
    "cp 2, ep 2": Cell({"cp": 2, "ep": 2}),
    "fsdp 2 x cp 2, ep 4": Cell({"dp_shard": 2, "cp": 2, "ep": 4}),
    "pp 2, ep 2 x fsdp 2": Cell({"pp": 2, "dp_shard": 4, "ep": 2}),
    "pp 2 x fsdp 2 x tp 2, ep 4": Cell({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}),
    "fsdp 2 x cp 2 x tp 2, ep 4": Cell({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}),
}


def judge(config: str, cell: Cell) -> dict[str, Any]:
    """Verify a plan on this rank: `verdict`, and the largest differences, or what it was refused for."""
    try:
        result = verify(plan_of(config, cell.mesh, experts=cell.experts, styles=cell.styles), tolerance=TOLERANCE)
    except PlanError as error:
        return {"verdict": "refused", "detail": "; ".join(map(str, error.diagnostics))}
    worst = {
        "loss": max(result.losses),
        "gradient": max(row.gradient for row in result.rows),
        "weight": max(row.weight for row in result.rows),
    }
    if result.passed:
        return {"verdict": "right", **worst}
    return {"verdict": "wrong", **worst, "detail": f"{result.first} differs by {result.largest:.1e}"}
