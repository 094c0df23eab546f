"""Sequences that ranks of `cp` share or that hold several documents: what they need of the plan and the model.

Note [Whole sequences at the border]
The ranks of `cp` share each sample: a rank has a part of its tokens, and attention is over the parts of all
(`hp_styles.ContextParallel`). The caller passes whole sequences, the same on each of these ranks, and the model takes
its part of everything that belongs to a token. Labels are shifted before, since the token after the last of a part is
often on another rank. A rank's loss is the sum over its tokens, over the number of tokens that count on all ranks that
have other tokens, times the number of these ranks: the mean of the ranks' losses is the loss of one process over the
whole batch, however the tokens that count are distributed, and `fully_shard`, which takes the mean of the ranks'
gradients, has its gradient. Ranks that share samples are given the mean of theirs, so that what is computed of the loss
is the same on all. Without labels the outputs are whole sequences again; with labels, this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline, block_lists, generalise, matching
from hp_styles.extend import STYLES, DegreeError, kv_copies, split_degrees

_LAYERS = ("full_attention", "sliding_attention")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob", "attn_dropout_prob")


def check_context(plan: ParallelPlan) -> list[Diagnostic]:
    """Check [context]: that it has an effect, and that its degrees divide the axis."""
    section, cp = plan.context, plan.mesh.cp
    if cp == 1:
        options = [item.name for item in fields(section) if getattr(section, item.name) != item.default]
        mesh = plan.mesh.described
        message = f"{', '.join(options)} would have no effect: the mesh {mesh} has no cp axis"
        fix = "leave [context] out, or make mesh.cp at least 2"
        return [Diagnostic("context", message, fix)] if options else []
    try:
        split_degrees(cp, section.ulysses_degree, section.inner_ring_degree)
    except DegreeError as error:
        return [_refused_degree(error)]
    return []


def _refused_degree(error: DegreeError) -> Diagnostic:
    return Diagnostic(f"context.{error.name}", error.problem, f"make it one of {error.choices}")


def check_sequence(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that a sample divides over the ranks of `cp`."""
    cp, length = plan.mesh.cp, plan.data.sequence_length
    chunks = 2 * cp if plan.context.load_balance else cp
    if cp == 1 or length % chunks == 0:
        return []
    balanced = f" x 2 chunks (load_balance) = {chunks}" if plan.context.load_balance else ""
    message = f"{length} tokens do not divide over cp {cp}{balanced}"
    return [Diagnostic("data.sequence_length", message, f"make it {-(-length // chunks) * chunks}")]


def check_attention(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that only attention mixes the model's tokens, that it can be spread, and that the loss counts tokens.

    Args:
        plan: the plan.
        model: its model.
    """
    if plan.mesh.cp == 1:
        return []
    return [*_check_mixing(plan, model), *_check_heads(plan, model), *_check_loss(plan, model)]


def _refused(plan: ParallelPlan, message: str, fix: str) -> Diagnostic:
    return Diagnostic("mesh.cp", f"cp = {plan.mesh.cp}, but {message}", fix)


def _check_mixing(plan: ParallelPlan, model: ModelOutline) -> Iterator[Diagnostic]:
    """Refuse what mixes tokens and is no attention that a style spreads: each rank would mix its own part alone."""
    leave, config = "leave cp out", model.config
    blocks = next(iter(block_lists(model)), "")
    attention = [name for name, module in model.modules.items() if module.attention]
    without = [
        name for name in matching(blocks, model.names) if not any(each.startswith(f"{name}.") for each in attention)
    ]
    if not attention:
        message = f"{model.type_name} has no attention whose forward takes an attention_mask, as transformers' have"
        yield _refused(plan, message, leave)
        return
    if without:
        shown = f"{without[0]} and {len(without) - 1} more" if len(without) > 1 else without[0]
        yield _refused(plan, f"{shown}, a {model.modules[without[0]].type_name}, has no such attention", leave)
    convolutions = generalise(name for name, module in model.modules.items() if module.convolution)
    if convolutions:
        yield _refused(plan, f"{convolutions[0]} mixes neighbouring tokens, some of them on other ranks", leave)
    others = sorted(set(_each(config, "layer_types")) - set(_LAYERS))
    if others and not without:
        yield _refused(plan, f"layers are of the type {others[0]!r}; known are {', '.join(_LAYERS)}", leave)
    if getattr(config, "attn_temperature_tuning", False) and not all(_each(config, "no_rope_layers")):
        message = "attn_temperature_tuning scales queries by places that attention counts in what it is passed"
        yield _refused(plan, message, leave)
    if getattr(config, "alibi", False):
        yield _refused(plan, "alibi = true adds a bias to attention by the distance of tokens", leave)
    if getattr(config, "is_encoder_decoder", False):
        yield _refused(plan, f"{model.type_name} makes its decoder's inputs of what it is passed", leave)
    for name in _DROPOUTS:
        p = getattr(config, name, 0.0)
        if isinstance(p, float) and p > 0:
            message = f"{name} = {p:g}: a rank cannot draw the mask of its part of attention as one device would"
            yield _refused(plan, message, f"write {name} = 0.0 in [model.overrides], or leave cp out")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa" and not (implementation == "eager" and caps_logits(config)):
        message = f"attention is computed by {implementation!r}, and 'sdpa' is what can be spread over ranks"
        yield _refused(plan, message, "write attn_implementation = 'sdpa' in [model.overrides], or leave cp out")


def _check_heads(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that a rank's heads, of its part by `tp`, divide over the ranks of a Ulysses group."""
    config, tp, cp = model.config, plan.mesh.tp, plan.mesh.cp
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return []
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % tp or kv_heads % tp:
        return []  # said of tp already
    degree = plan.context.ulysses_degree or cp
    try:
        kv_copies(heads // tp, kv_heads // tp, degree, cp)
    except DegreeError as error:
        return [_refused_degree(error)] if cp % degree == 0 else []
    return []


def check_scattered(plan: ParallelPlan, styles: Mapping[str, str], model: ModelOutline) -> list[Diagnostic]:
    """Check that attention gets no part of a sequence that `tp` has scattered: it may have one of `cp` alone.

    Args:
        plan: the plan.
        styles: of the model's modules, by name.
        model: its model.
    """
    if plan.mesh.cp == 1 or {each.scattered for each in STYLES.values()}.isdisjoint(styles.values()):
        return []
    attention = [name for name, module in model.modules.items() if module.attention]
    bare = generalise(name for name in attention if not any(each.startswith(f"{name}.") for each in styles))
    message = f"{bare[0]} has no style, and would get parts of a sequence that tp scatters" if bare else ""
    return [_refused(plan, message, 'write styles = "auto", or leave cp out')] if bare else []


def _check_loss(plan: ParallelPlan, model: ModelOutline) -> Iterator[Diagnostic]:
    if not model.counts_tokens:
        message = (
            f"{model.type_name} has no loss_function that takes shift_labels and num_items_in_batch, as transformers'"
            " causal language models have: labels could not be shifted before the sequence is sharded"
        )
        yield _refused(plan, message, "leave cp out, or take such a model")


def caps_logits(config: Any) -> bool:
    """Return True for a model that caps its logits softly, which 'sdpa' does not and 'eager' does: Gemma 2."""
    return hasattr(config, "attn_logit_softcapping")


def _each(config: Any, name: str) -> list[Any]:
    value = getattr(config, name, None)
    return list(value) if isinstance(value, (list, tuple)) else [value] if value else []


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
