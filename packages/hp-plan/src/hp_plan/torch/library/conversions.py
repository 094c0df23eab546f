"""The tensors of a model of transformers in a folder, as what its library renames and merges them into on a load.

See Note [Traced conversions] in `placed`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from hp_checkpoint.extend import Entry
from hp_plan.torch.library.placed import NotPlacedError, Placed


def conversions_of(model: Any) -> tuple[list[Any], list[Any]]:
    """Return what transformers renames, and what it merges or cuts, when it loads such a model."""
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    return renamings, [each for each in mapping if isinstance(each, loading.WeightConverter)]


def renamed(
    name: str, conversions: tuple[list[Any], list[Any]], model: Any, own: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return the name in a model of a tensor of its folder, and the pattern by which a conversion takes it, or None.

    Args:
        name: in the folder.
        conversions: as `conversions_of` returns them. Some depend on the names before, so names come in their order.
        model: the model.
        own: its tensors, by name.
    """
    rename: Any = importlib.import_module("transformers.core_model_loading").rename_source_key
    prefix = getattr(model, "base_model_prefix", None)
    target, pattern = rename(name, *conversions, prefix, own)
    if target not in own and name in own:  # it has the name that another one is given
        return rename(name, [], [], prefix, own)
    return target, pattern


def converted_entries(model: Any, saved: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return where the elements of a model's tensors are in a folder, by the model's names.

    Args:
        model: on meta, of transformers.
        saved: the folder's tensors.

    Raises:
        NotPlacedError: a conversion that computes, or names that are not the model's.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotPlacedError("quantized weights")
    order: Any = importlib.import_module("transformers.core_model_loading").dot_natural_key
    conversions, own = conversions_of(model), model.state_dict()
    by_pattern = {pattern: each for each in conversions[1] for pattern in each.source_patterns}
    groups: dict[str, Any] = {}
    found: dict[str, Entry] = {}
    for name in sorted(saved, key=order):
        target, pattern = renamed(name, conversions, model, own)
        if target not in own:
            raise NotPlacedError(f"'{name}', which is not in the model")
        if pattern is None:
            _add(found, dataclasses.replace(saved[name], name=target))
            continue
        if target not in groups:
            groups[target] = copy.deepcopy(by_pattern[pattern])
        groups[target].add_tensor(target, name, pattern, Placed.of(saved[name]))
    for target, converter in groups.items():
        for entry in _convert(converter, target, model):
            _add(found, entry)
    return found


def _convert(converter: Any, target: str, model: Any) -> list[Entry]:
    try:
        made = converter.convert(target, model=model, config=model.config)
        return [(value[0] if isinstance(value, list) else value).entry(name) for name, value in made.items()]
    except NotPlacedError as error:
        raise NotPlacedError(f"'{target}', which {converter.operations} make: {error}") from error
    except Exception as error:  # Of a conversion: whoever converts whole tensors reports it better.
        raise NotPlacedError(f"'{target}': {type(error).__name__}: {error}") from error


def _add(found: dict[str, Entry], entry: Entry) -> None:
    if entry.name in found:
        raise NotPlacedError(f"'{entry.name}', which several tensors of the folder are")
    found[entry.name] = entry
