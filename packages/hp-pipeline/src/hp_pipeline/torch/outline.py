"""A model of transformers as a line of units, with their operations and bytes counted from shapes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_pipeline.stages.split import Operations, SplitError, Unit
from hp_pipeline.torch.stages import REFUSED, Cut, cut_stage
from hp_pipeline.torch.tracing import text_config, trace

T = torch.Tensor
_LENGTH = 128


class Outline:
    """A model as a line of units, and where it is cut.

    Args:
        cut: how stages are cut out of it.
        units: all before the blocks, each block, all after them.
    """

    def __init__(self, cut: Cut, units: tuple[Unit, ...]) -> None:
        self.cut, self.units = cut, units

    def stage(self, first: int, end: int) -> nn.Module:
        """Return the stage of the blocks from first to before end."""
        return cut_stage(self.cut, first, end)

    @functools.cached_property
    def uses(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Parameters that several units use: by the first name, each name and its unit."""
        names = {name: index for index, unit in enumerate(self.units) for name in unit.names}
        uses: dict[int, list[tuple[str, int]]] = {}
        for name, parameter in self.cut.model.named_parameters(remove_duplicate=False):
            unit = next(index for owner, index in names.items() if name.startswith(owner + "."))
            uses.setdefault(id(parameter), []).append((name, unit))
        return {listed[0][0]: tuple(listed) for listed in uses.values() if len({unit for _, unit in listed}) > 1}


def outline(model: nn.Module, example: Mapping[str, Any] | None, blocks: str | None) -> Outline:
    """Read a model: see ``split_model``."""
    path = _find_blocks(model, blocks)
    _refuse(model, path)
    inputs = {"input_ids": torch.zeros(1, _LENGTH, dtype=torch.int64)} if example is None else dict(example)
    cut = trace(model, path, inputs)
    ids = inputs.get("input_ids")
    rows, length = (1, _LENGTH) if ids is None else (ids.shape[0], ids.shape[-1])
    listed, config = model.get_submodule(path), text_config(model)
    parts = [cut.before, *([f"{path}.{name}"] for name, _ in listed.named_children()), cut.after]
    units = (count_unit(names, [model.get_submodule(name) for name in names], config, rows, length) for names in parts)
    return Outline(cut, tuple(units))


def _find_blocks(model: nn.Module, blocks: str | None) -> str:
    """Return the name of the list of blocks."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SplitError(
            f"{name} is an encoder and a decoder, each with blocks of its own, and the decoder's take"
            " what the encoder returns; write the stages by hand as modules, and join them by boundaries=."
        )
    lists = [path for path, module in _outermost(model, "") if len(module) > 1]
    if blocks is not None:
        if blocks not in lists:
            raise SplitError(f"{name} has no list of blocks {blocks!r}; its lists of two modules or more are {lists}.")
        return blocks
    if not lists:
        raise SplitError(
            f"{name} has no list of blocks, a ModuleList of two modules or more; write its stages by hand."
        )
    if len(lists) > 1:
        raise SplitError(f"{name} has {len(lists)} lists of modules, {lists}; pass that of the blocks, blocks=.")
    return lists[0]


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _refuse(model: nn.Module, path: str) -> None:
    """Raise for what stages would silently get wrong."""
    name, module = type(model).__name__, model
    for part in (*path.split("."), None):
        own = [each for each, _ in module.named_parameters(recurse=False)]
        if own:
            raise SplitError(
                f"{type(module).__name__} has {own} of its own, beside its modules, so that it is not"
                " known which stage uses them; put them into a module."
            )
        if "forward" in vars(module):
            raise SplitError(
                f"the forward of this {type(module).__name__} has been replaced; split the model first,"
                " and wrap its stages."
            )
        module = module if part is None else module.get_submodule(part)
    sharded = [each for each, parameter in model.named_parameters() if hasattr(parameter, "placements")]
    if sharded:
        raise SplitError(f"{sharded[0]!r} of {name} is a DTensor; split the model first, and shard its stages.")
    configs = {"config": getattr(model, "config", None), "config.text_config": text_config(model)}
    for where, config in configs.items():
        for option in ("output_router_logits", "output_hidden_states", "output_attentions"):
            if getattr(config, option, False):
                raise SplitError(f"{name}.{where}.{option} is set: {REFUSED[option]}; set it to False.")


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
