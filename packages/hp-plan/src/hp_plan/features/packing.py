"""Samples of several documents, or of answers to train: which models a plan can take for them."""

from __future__ import annotations

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline

# Families of transformers that are tested to compute packed documents as they compute each alone.
PACKING = (
    *("cohere", "ernie4_5", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_neox", "granite", "llama", "mistral"),
    *("mixtral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm"),
    "starcoder2",
)
_LEAVE = "write packing = false in [data]"


def check_answers(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Refuse examples to fine-tune on for models whose loss is not known to leave tokens out."""
    section = plan.data
    if section.format == "text" or model.config is not None:
        return []
    message = f"the loss of {model.type_name} is not known to leave out the tokens of a prompt"
    return [
        Diagnostic("data.format", message, "write format = 'text', or take a causal language model of transformers")
    ]


def check_packing(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Refuse packing for models whose documents would see each other."""
    if not plan.data.packing:
        return []
    family = getattr(model.config, "model_type", None)
    if family not in PACKING:
        name = model.type_name if family is None else repr(family)
        message = f"{name} is not tested to keep documents of a sample apart"
        return [Diagnostic("data.packing", message, f"{_LEAVE}, or take one of {', '.join(PACKING)}")]
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        message = f"attention is computed by {implementation!r}; packing is tested with 'sdpa' and 'eager'"
        return [
            Diagnostic("data.packing", message, f"{_LEAVE}, or write attn_implementation = 'sdpa' in [model.overrides]")
        ]
    return []
