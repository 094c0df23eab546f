"""The tables behind `styles = "auto"`; what the styles' names mean is in `hp_styles.names`."""

from __future__ import annotations

from collections.abc import Mapping

from hp_plan.outline import ModelOutline
from hp_plan.patterns import matching
from hp_styles.extend import sequence_parallel_plan

_BLOCK = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
_HEADS_NORMALISED = {
    "model.layers.*.self_attn.q_norm": "replicate",
    "model.layers.*.self_attn.k_norm": "replicate",
}
_ENDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}

# By transformers' `config.model_type`.
TABLES: dict[str, dict[str, str]] = {
    "llama": {**_ENDS, **_BLOCK},
    "mistral": {**_ENDS, **_BLOCK},
    "qwen3": {**_ENDS, **_BLOCK, **_HEADS_NORMALISED},
}

# What sits on the residual stream between the blocks' matrices, relative to the base model.
_SEQUENCE_NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")
SEQUENCE_FAMILIES = ("llama", "mistral", "qwen3")


def with_sequence(table: Mapping[str, str], *, base: str) -> dict[str, str]:
    """A tensor parallel table with sequence parallel between the blocks.

    Args:
        table: pattern -> style.
        base: name of the base model inside the model (`model`), empty when it is the model.
    """
    prefix = f"{base}." if base else ""
    norms = [f"{prefix}{norm}" for norm in _SEQUENCE_NORMS]
    others = {pattern: style for pattern, style in table.items() if pattern not in norms}
    return sequence_parallel_plan(others, norms=norms, embedding=f"{prefix}embed_tokens")


def scattered(table: Mapping[str, str], model: ModelOutline) -> dict[str, str]:
    """A tensor parallel table whose sums are scattered along the sequence, where tokens are embedded and processed.

    Norms need no style: they run on what they are given, and what reads one takes the whole sequence.

    Args:
        table: pattern -> style.
        model: its token embedding, and those tied with it, tell which parts process tokens.
    """
    shared = {model.embedding}
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        if model.embedding in modules:
            shared.update(module for module in modules if model.modules[module].kind == "embedding")
    inside = tuple({name.rpartition(".")[0] for name in shared if name})
    tokens = {
        pattern: style
        for pattern, style in table.items()
        if pattern.startswith(inside) and matching(pattern, model.names)
    }
    return {**table, **sequence_parallel_plan(tokens, norms=())}
