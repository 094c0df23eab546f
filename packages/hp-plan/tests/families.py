"""Small random configurations of transformers' model families, and the inputs that each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

LENGTH, VOCABULARY, IMAGE, PATCH = 8, 40, 8, 4
PATCHES = (IMAGE // PATCH) ** 2
IMAGE_TOKEN = 39


@dataclass(frozen=True)
class Family:
    """One family at a size for tests.

    Attributes:
        config: configuration class.
        overrides: its arguments.
        task: what is built; None: the causal language model.
        inputs: makes the inputs of a number of samples from a generator; tensors have samples in dim 0.
        padded: its samples may be of different lengths.
    """

    config: str
    overrides: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    inputs: Callable[[int, torch.Generator], dict[str, torch.Tensor]] | None = None
    padded: bool = True


def tokens(samples: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    """Random tokens that are no special ones."""
    return torch.randint(4, VOCABULARY - 4, (samples, length), generator=generator)


def text(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tokens that predict the next ones."""
    ids = tokens(samples, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def two_texts(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """For an encoder and a decoder."""
    return {"input_ids": tokens(samples, generator), "labels": tokens(samples, generator, 6)}


def pictures(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Random pixels."""
    return torch.randn(samples, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float64)


def labelled_pictures(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """For a classifier."""
    return {"pixel_values": pictures(samples, generator), "labels": torch.randint(3, (samples,), generator=generator)}


def paired(samples: int, generator: torch.Generator) -> dict[str, Any]:
    """Pictures and their texts, for a contrastive loss."""
    return {
        "input_ids": tokens(samples, generator),
        "pixel_values": pictures(samples, generator),
        "return_loss": True,
    }


def sound(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A spectrogram and its text."""
    features = torch.randn(samples, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": tokens(samples, generator, 6)}


def seen(count: int = PATCHES, **others: Any) -> Callable[[int, torch.Generator], dict[str, Any]]:
    """A picture's places in the text, then words."""

    def make(samples: int, generator: torch.Generator) -> dict[str, Any]:
        ids = torch.cat([torch.full((samples, count), IMAGE_TOKEN), tokens(samples, generator)], 1)
        return {"input_ids": ids, "labels": ids.clone(), "pixel_values": pictures(samples, generator), **others}

    return make


def flat_patches(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Qwen's way: a picture is rows of patches, four of which are one token."""
    grid = torch.tensor([[1, 4, 4]]).repeat(samples, 1)
    ids = torch.cat([torch.full((samples, 4), IMAGE_TOKEN), tokens(samples, generator)], 1)
    pixels = torch.randn(samples * 16, 3 * 2 * PATCH * PATCH, generator=generator, dtype=torch.float64)
    kinds = (ids == IMAGE_TOKEN).int()
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The words that most causal language models use.
DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **SPECIAL,
}
HEADS = {"head_dim": 8}
WHOLE_HEADS = {name: value for name, value in DENSE.items() if name != "num_key_value_heads"}
NO_MLP_SIZE = {name: value for name, value in WHOLE_HEADS.items() if name != "intermediate_size"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **GROUPED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": PATCH,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
BERT = {**WHOLE_HEADS, "type_vocab_size": 2}


def causal(config: str, *parts: dict[str, Any], **more: Any) -> Family:
    """A causal language model."""
    merged: dict[str, Any] = {}
    for part in (*(parts or (DENSE,)), more):
        merged.update(part)
    return Family(config, merged, inputs=text)


def _mamba(**more: Any) -> dict[str, Any]:
    return {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        **more,
    }


FAMILIES: dict[str, Family] = {
    # Dense decoders with a table of their own.
    "llama": causal("LlamaConfig"),
    "mistral": causal("MistralConfig", DENSE, HEADS, sliding_window=5),
    "qwen2": causal("Qwen2Config"),
    "qwen3": causal("Qwen3Config", DENSE, HEADS, tie_word_embeddings=True),
    "gemma": causal("GemmaConfig", DENSE, HEADS),
    "gemma2": causal("Gemma2Config", DENSE, HEADS, query_pre_attn_scalar=8, sliding_window=5),
    "gemma3": causal("Gemma3TextConfig", DENSE, HEADS, query_pre_attn_scalar=8, sliding_window=5),
    "phi": causal("PhiConfig"),
    "phi3": causal("Phi3Config"),
    "olmo": causal("OlmoConfig"),
    "olmo2": causal("Olmo2Config"),
    "olmo3": causal("Olmo3Config", sliding_window=5),
    "starcoder2": causal("Starcoder2Config"),
    "cohere": causal("CohereConfig"),
    "granite": causal("GraniteConfig"),
    "glm4": causal("Glm4Config", DENSE, HEADS),
    "smollm3": causal("SmolLM3Config"),
    "gpt_neox": causal("GPTNeoXConfig", WHOLE_HEADS),
    "nemotron": causal("NemotronConfig"),
    "exaone4": causal("Exaone4Config", DENSE, HEADS),
    # Without a table.
    "stablelm": causal("StableLmConfig"),
    "gpt2": causal("GPT2Config", SPECIAL, vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4),
    "opt": causal("OPTConfig", NO_MLP_SIZE, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": causal("BloomConfig", SPECIAL, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "falcon": causal("FalconConfig", NO_MLP_SIZE, ffn_hidden_size=48, alibi=False, multi_query=True),
    "gptj": causal(
        "GPTJConfig", SPECIAL, vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
    ),
    # Experts.
    "mixtral": causal("MixtralConfig", DENSE, LOCAL_EXPERTS),
    "qwen2_moe": causal("Qwen2MoeConfig", DENSE, EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": causal("Qwen3MoeConfig", DENSE, EXPERTS, HEADS),
    "olmoe": causal("OlmoeConfig", DENSE, num_experts=4, num_experts_per_tok=2),
    "phimoe": causal("PhimoeConfig", DENSE, LOCAL_EXPERTS),
    "granitemoe": causal("GraniteMoeConfig", DENSE, LOCAL_EXPERTS),
    "deepseek_v2": causal("DeepseekV2Config", DENSE, LATENT, topk_method="greedy"),
    "deepseek_v3": causal("DeepseekV3Config", DENSE, LATENT),
    "gpt_oss": causal("GptOssConfig", DENSE, LOCAL_EXPERTS, HEADS, sliding_window=5),
    "glm4_moe": causal("Glm4MoeConfig", DENSE, GROUPED, HEADS),
    "ernie4_5_moe": causal(
        "Ernie4_5_MoeConfig", DENSE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=1
    ),
    # Hybrids of attention and state spaces, convolutions or linear attention.
    "lfm2": causal("Lfm2Config", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "mamba2": causal(
        "Mamba2Config",
        SPECIAL,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=4,
    ),
    "jamba": causal(
        "JambaConfig",
        DENSE,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": causal("BambaConfig", DENSE, _mamba(), attn_layer_indices=[1]),
    "granitemoehybrid": causal(
        "GraniteMoeHybridConfig",
        DENSE,
        LOCAL_EXPERTS,
        _mamba(),
        layer_types=["mamba", "attention"],
        shared_intermediate_size=16,
    ),
    "qwen3_next": causal(
        "Qwen3NextConfig",
        DENSE,
        EXPERTS,
        HEADS,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
    ),
    # Encoders, encoders with decoders.
    "bert": Family("BertConfig", BERT, "masked-lm", text),
    "roberta": Family("RobertaConfig", BERT, "masked-lm", text),
    "t5": Family(
        "T5Config",
        {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        "seq2seq-lm",
        two_texts,
    ),
    "bart": Family(
        "BartConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 2,
            **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        },
        "seq2seq-lm",
        two_texts,
    ),
    "whisper": Family(
        "WhisperConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "decoder_start_token_id": 2,
            **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        },
        "speech-seq2seq",
        sound,
    ),
    # Pictures.
    "vit": Family("ViTConfig", {**VISION, "num_labels": 3}, "image-classification", labelled_pictures, padded=False),
    "clip": Family(
        "CLIPConfig", {"text_config": WHOLE_HEADS, "vision_config": VISION, "projection_dim": 16}, "CLIPModel", paired
    ),
    "llava": Family(
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **DENSE},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
        },
        "image-text-to-text",
        seen(),
    ),
    "qwen2_vl": Family(
        "Qwen2VLConfig",
        {
            "text_config": {
                **DENSE,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH}
            | {"hidden_size": 32},
            "image_token_id": IMAGE_TOKEN,
        },
        "image-text-to-text",
        flat_patches,
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        {
            "text_config": {
                **DENSE,
                **HEADS,
                "rope_parameters": {**ROTARY, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": PATCH,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
            "image_token_id": IMAGE_TOKEN,
        },
        "image-text-to-text",
        flat_patches,
    ),
}
