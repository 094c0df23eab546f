"""A model of transformers as a line of units."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_pipeline.stages.partition import Unit
from hp_pipeline.torch.counting import count_unit
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
        raise ValueError(
            f"split_model: {name} is an encoder and a decoder, each with blocks of its own, and the decoder's take"
            " what the encoder returns; write the stages by hand as modules, and join them by boundaries=."
        )
    lists = [path for path, module in _outermost(model, "") if len(module) > 1]
    if blocks is not None:
        if blocks not in lists:
            raise ValueError(
                f"split_model: {name} has no list of blocks {blocks!r}; its lists of two modules or more are {lists}."
            )
        return blocks
    if not lists:
        raise ValueError(
            f"split_model: {name} has no list of blocks, a ModuleList of two modules or more; write its stages by hand."
        )
    if len(lists) > 1:
        raise ValueError(
            f"split_model: {name} has {len(lists)} lists of modules, {lists}; pass that of the blocks, blocks=."
        )
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
            raise ValueError(
                f"split_model: {type(module).__name__} has {own} of its own, beside its modules, so that it is not"
                " known which stage uses them; put them into a module."
            )
        if "forward" in vars(module):
            raise ValueError(
                f"split_model: the forward of this {type(module).__name__} has been replaced; split the model first,"
                " and wrap its stages."
            )
        module = module if part is None else module.get_submodule(part)
    sharded = [each for each, parameter in model.named_parameters() if hasattr(parameter, "placements")]
    if sharded:
        raise ValueError(
            f"split_model: {sharded[0]!r} of {name} is a DTensor; split the model first, and shard its stages."
        )
    configs = {"config": getattr(model, "config", None), "config.text_config": text_config(model)}
    for where, config in configs.items():
        for option in ("output_router_logits", "output_hidden_states", "output_attentions"):
            if getattr(config, option, False):
                raise ValueError(f"split_model: {name}.{where}.{option} is set: {REFUSED[option]}; set it to False.")
