"""The operations and bytes of modules, counted from their shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from hp_pipeline.stages.operations import Operations
from hp_pipeline.stages.partition import Unit


def count_operations(model: nn.Module, config: Any) -> Operations:
    """Count a causal model's operations by its shapes.

    Args:
        model: whole, on any device.
        config: the model's.
    """
    matrices, attention = 0.0, defaultdict[int | None, float](float)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        if heads := _heads(module, config):
            window = getattr(module, "sliding_window", None)
            attention[window if isinstance(window, int) else None] += 4 * heads
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                share = _share(module, config, parameter.shape[0]) if parameter.dim() == 3 else 1.0
                matrices += 2 * parameter.numel() * share
    return Operations(matrices, dict(attention))


def count_unit(names: Sequence[str], modules: Sequence[nn.Module], config: Any, rows: int, length: int) -> Unit:
    """Count what a unit costs for one micro-batch: see ``split_model``.

    Saved are counted as one output of each matrix, and the input and output of each norm.

    Args:
        names: of the modules.
        modules: those that run.
        config: the model's.
        rows: sequences of a micro-batch.
        length: tokens of a sequence.
    """
    tokens = rows * length
    matrices = attention = saved = 0.0
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, nn.Embedding):
            continue
        attention += 4 * tokens * _seen(module, length) * _heads(module, config)
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2:
                saved += 2 * tokens * parameter.numel() * parameter.element_size() * (not _has_matrix(module))
                continue
            share = _share(module, config, parameter.shape[0]) if parameter.dim() == 3 else 1.0
            matrices += 2 * tokens * parameter.numel() * share
            saved += tokens * _outputs(module, parameter) * share * parameter.element_size()
    unique = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    size = sum(parameter.numel() * parameter.element_size() for parameter in unique.values())
    return Unit(tuple(names), matrices + attention, matrices + 2 * attention, matrices, saved, size)


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _outputs(module: nn.Module, parameter: nn.Parameter) -> float:
    """Entries that a matrix returns for a token; of experts, all theirs."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
        return parameter.shape[0] * max(parameter.shape[1:])
    return max(parameter.shape[0], parameter.numel() // parameter.shape[0])


def _share(module: nn.Module, config: Any, experts: int) -> float:
    """Return the part of a stack of matrices that one token is multiplied by."""
    if isinstance(module, nn.Conv1d):
        return 1.0
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None)
    return min(1.0, chosen / experts) if isinstance(chosen, int) else 1.0


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name and "linear" not in name


def _heads(module: nn.Module, config: Any) -> float:
    """Return the entries of all heads of an attention; 0 for other modules, and for those around an attention.

    Where those of keys and of values differ, their mean.
    """
    if not _is_attention(module) or any(map(_is_attention, list(module.modules())[1:])):
        return 0
    heads = getattr(config, "num_attention_heads", None)
    keys, values = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
    if isinstance(heads, int) and isinstance(keys, int) and isinstance(values, int):
        return heads * (keys + values) / 2
    size = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    if isinstance(heads, int) and isinstance(size, int):
        return heads * size
    return getattr(config, "hidden_size", 0)


def _seen(module: nn.Module, length: int) -> float:
    """Return the tokens that a token sees, on average."""
    window = getattr(module, "sliding_window", None)
    return min(length / 2, window) if isinstance(window, int) else length / 2
