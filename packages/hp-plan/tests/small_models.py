"""Small random configurations of all text models of transformers, found by the names of their settings."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from families import LENGTH, VOCABULARY
from products import Product

from hp_plan import ParallelPlan, PlanError, build_model
from hp_plan.torch.compared import Float64

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
LARGEST = 3_000_000  # parameters
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "word_embed_proj_dim")
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")
_INNER += ("dense_intermediate_size", "intermediate_size_mlp")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth")
_LAYERS += ("num_decoder_layers", "num_encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PLACES = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels"), 8),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(_PLACES, 64),
    **dict.fromkeys(("sliding_window", "attention_window"), 6),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_dt_rank", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("image_size", "patch_size"), 8),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
NESTED = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


@dataclass(frozen=True)
class Swept(Product):
    """A class of transformers under a plan.

    Attributes:
        task: of `TASKS`.
        overrides: of its configuration.
    """

    task: str = "causal-lm"
    overrides: Any = None

    def plan(self) -> ParallelPlan:
        """The plan."""
        model = {"config": self.family, "task": self.task, "overrides": self.overrides}
        return ParallelPlan.from_dict({"model": model, **self.tables})

    def inputs(self, samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Text alone, for models of pictures as well."""
        ids, labels = (torch.randint(4, VOCABULARY - 4, (samples, LENGTH), generator=generator) for _ in range(2))
        return {"input_ids": ids, "labels": labels if self.task == "seq2seq-lm" else ids.clone()}


def all_configs() -> list[tuple[str, str]]:
    """List the pairs of a task and a configuration class."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    pairs = [(task, names[kind]) for task, mapping in TASKS.items() for kind in getattr(auto, mapping) if kind in names]
    return list(dict.fromkeys(pairs))


def small(config: type) -> dict[str, Any]:
    """Return arguments that make a configuration small: those of `SIZES` that it has a setting for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default: Any = config()
    known = {**vars(default), **dict.fromkeys(inspect.signature(config.__init__).parameters)}
    aliases: Any = getattr(config, "attribute_map", {})
    found = {name: size for name, size in SIZES.items() if name in known and name not in aliases}
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1:
        found["layer_types"] = kinds[:2]
    for name in NESTED:
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            found[name] = {**small(type(part)), "model_type": part.model_type}
    return found


def build(task: str, name: str) -> Swept:
    """Find how a class is built small, and try it: its plan in one process has a loss with gradients.

    Raises:
        Exception: it is not built so, or wants more than text.
    """
    overrides = small(getattr(importlib.import_module("transformers"), name))
    for _ in range(len(SIZES)):
        made = Swept(name, {"run": {"dtype": "float64"}}, task=task, overrides=overrides)
        try:
            empty = build_model(made.plan(), device="meta")
            break
        except PlanError as error:
            unknown = re.search(r"model\.overrides\.([\w.]+): \w+ has no setting", str(error))
            if unknown is None:
                raise
            *around, last = unknown[1].split(".")
            inside: Any = overrides
            for part in around:
                inside = inside[part]
            del inside[last]
    size = sum(parameter.numel() for parameter in empty.parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    model = build_model(made.plan()).train()
    with Float64() as mode:
        mode.trains = True
        loss = model(**made.inputs(2, torch.Generator().manual_seed(0)))["loss"]
        loss.backward()
    if not loss.isfinite():
        raise ValueError(f"its loss is {loss.item()}")
    drawn = [note for note in mode.notes if "was called" in note]
    if drawn:
        raise ValueError(f"it draws at random in training: {drawn[0]}")
    return made
