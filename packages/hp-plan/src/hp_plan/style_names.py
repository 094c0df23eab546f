"""The style strings of a plan, and the tables behind `styles = "auto"`."""

from __future__ import annotations

from collections.abc import Mapping

# What each string does to a module; `hp_plan.styles` has the style objects.
STYLES = {
    "colwise": "output features sharded, input replicated, output sharded",
    "colwise_gather_output": "output features sharded, output gathered",
    "rowwise": "input features sharded, output summed over the ranks",
    "rowwise_split_input": "input features sharded, a replicated input is split first, output summed",
    "rowwise_scatter_output": "input features sharded, output summed and scattered along the sequence",
    "embedding_rowwise": "vocabulary sharded, output summed",
    "embedding_rowwise_scatter_output": "vocabulary sharded, output summed and scattered along the sequence",
    "embedding_colwise": "embedding features sharded, output gathered",
    "sequence": "runs on its part of the sequence, parameters replicated",
    "sequence_gather_output": "runs on its part of the sequence, output gathered",
    "replicate": "the same on every rank",
}

# transformers' names that mean the same here. Gradients need no word of their own: they are right by construction.
ALIASES = {
    "replicated_with_grad_allreduce": "replicate",
    "sequence_parallel": "sequence",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}

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

_SCATTERED = {"rowwise": "rowwise_scatter_output", "embedding_rowwise": "embedding_rowwise_scatter_output"}


def canonical(style: str) -> str:
    """The style's name here; a name that isn't known comes back as it is."""
    return ALIASES.get(style, style)


def with_sequence(table: Mapping[str, str], *, base: str) -> dict[str, str]:
    """A tensor parallel table with sequence parallel between the blocks.

    The residual stream is sharded along the sequence: what would be summed is summed and scattered, the norms run on
    their part and gather once for the matrices that follow. The bytes moved are those of the plain table.

    Args:
        table: pattern -> style.
        base: name of the base model inside the model (`model`), empty when it is the model.
    """
    prefix = f"{base}." if base else ""
    scattered = {pattern: _SCATTERED.get(canonical(style), canonical(style)) for pattern, style in table.items()}
    scattered.setdefault(f"{prefix}embed_tokens", "embedding_rowwise_scatter_output")
    norms = {f"{prefix}{norm}": "sequence_gather_output" for norm in _SEQUENCE_NORMS}
    return {**scattered, **norms}
