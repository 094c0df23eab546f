"""Models of folders that transformers wrote: configuration, class and weights."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_checkpoint.extend import open_checkpoint, steps_in
from hp_moe import register_experts
from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses
from hp_plan.sections import ModelSection
from hp_plan.torch.library import pretrained
from hp_plan.torch.library.placed import conversions_of, renamed

_SHOWN = 5
_OTHER = "take the folder of another model, or write weights = 'random' to draw the weights anew"


def check_folder(section: ModelSection) -> list[Diagnostic]:
    """Check that the folder has a configuration of transformers, a class for it, and weights, without reading these."""
    folder = Path(str(section.path))
    if not folder.is_dir():
        beside = [str(each) for each in folder.parent.glob("*") if each.is_dir()]
        near = near_misses(str(folder), beside) if beside else ""
        fix = near if near.startswith("did") else "give a folder on this machine: nothing is downloaded"
        return [Diagnostic("model.path", f"the folder {folder} does not exist", fix)]
    if not (folder / "config.json").is_file():
        return [Diagnostic("model.path", f"{folder} has no config.json", _folder_fix(folder))]
    try:
        config = _config_of(folder)
        _class_of(config, section.task)
    except PlanError as error:
        return list(error.diagnostics)
    diagnostics = pretrained.check_settings(type(config), section.overrides)
    if section.folder_has_weights:
        try:
            open_checkpoint(folder.absolute())
        except (OSError, ValueError) as error:
            fix = "download the safetensors, or write weights = 'random'"
            diagnostics.append(Diagnostic("model.path", str(error), fix))
    return diagnostics


def _folder_fix(folder: Path) -> str:
    """Say which folder has a model, where one is given that has something else."""
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter: write it as adapter.weights, or merge it by hyper-parallel checkpoint merge"
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if steps := steps_in(inner):
        newest = inner / f"step-{steps[-1]:08d}"
        return f"it has checkpoints: {_folder_fix(newest) if not (newest / 'config.json').is_file() else newest}"
    return "give a folder that save_pretrained wrote, or that was downloaded with all its files"


def _config_of(folder: Path) -> Any:
    """Read the configuration of a folder.

    Raises:
        PlanError: it can't be read, or is of no class of transformers.
    """
    library = pretrained.transformers()
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(named.get("model_type"))
    except (ValueError, AttributeError, OSError) as error:
        message = f"{folder / 'config.json'} can't be read: {error}"
        raise PlanError([Diagnostic("model.path", message, "download it again")]) from error
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if kind not in known:
        own = " (its code is in the folder, which is not run)" if "auto_map" in named else ""
        message = f"{folder / 'config.json'} has model_type {kind!r}, which transformers does not have{own}"
        fix = f"{near_misses(kind, known)} Or install a version of transformers that has it"
        raise PlanError([Diagnostic("model.path", message, fix)])
    try:
        return library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Whatever the validation of the class raises.
        message = f"{folder / 'config.json'} is no {kind} configuration: {type(error).__name__}: {error}"
        raise PlanError([Diagnostic("model.path", message, "correct it, or download it again")]) from error


def _class_of(config: Any, task: str | None) -> Any:
    """Return the model class: that of a task, else the one that the configuration names, else the causal one."""
    named, library = (getattr(config, "architectures", None) or [""])[0], pretrained.transformers()
    computes_a_loss = "For" in named or named.endswith("LMHeadModel")
    if task is None and computes_a_loss and hasattr(library, named):
        return getattr(library, named)
    return pretrained.model_class(type(config), task)


def _configured(section: ModelSection) -> Any:
    """Return the configuration of the folder with the overrides, those of a part merged into it."""
    config = _config_of(Path(str(section.path)))
    values, parts = config.to_dict(), getattr(config, "sub_configs", {})
    for name, value in section.overrides.items():
        merged = name in parts and isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = {**values[name], **value} if merged else value
    return type(config).from_dict(values)


def build(section: ModelSection, *, dtype: torch.dtype, empty: bool) -> nn.Module:
    """Build the model of a folder.

    Args:
        section: `[model]` with a `path`.
        dtype: of the weights.
        empty: don't read the weights, as the caller builds it on meta or draws them.

    Raises:
        PlanError: weights that the folder lacks, or has beyond the model.
    """
    register_experts()
    config = _configured(section)
    own = _class_of(config, section.task)
    if empty or not section.folder_has_weights:
        return pretrained.from_config(own, config, dtype=dtype)
    with no_progress_bars(), _only_errors():
        options = {"config": config, "dtype": dtype, "local_files_only": True, "use_safetensors": True}
        model, found = own.from_pretrained(str(section.path), output_loading_info=True, **options)
    diagnostics = _differences(str(section.path), found["missing_keys"], found["unexpected_keys"], model.state_dict())
    if diagnostics:
        raise PlanError(diagnostics)
    return model.train()


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Show none of transformers' progress bars."""
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """Show no table of what `_differences` reports."""
    logging = importlib.import_module("transformers.utils.logging")
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def saved_tensors(folder: str) -> Mapping[str, Any]:
    """Return the entries of a folder's tensors by name, from the headers of its files."""
    return open_checkpoint(Path(folder).absolute()).parts.get("model", {})


def check_fit(model: Any, section: ModelSection) -> list[Diagnostic]:
    """Check by the headers of a folder's files that its tensors are those of the model.

    Args:
        model: on any device.
        section: `[model]` whose folder has the weights.
    """
    folder, own, ties = str(section.path), model.state_dict(), ties_of(model)
    saved = saved_tensors(folder)
    conversions = conversions_of(model)
    found, unexpected, diagnostics, split = set(), [], [], False
    for name, entry in saved.items():
        target, converted = renamed(name, conversions, model, own)
        split = split or any(
            converted in each.source_patterns and len(each.target_patterns) > 1 for each in conversions[1]
        )
        if target not in own:
            unexpected.append(name)
            continue
        found.update(ties.get(target, (target,)))
        got, wanted = tuple(entry.kind.shape), tuple(own[target].shape)
        if converted is None and got != wanted:
            message = f"'{name}' has shape {got} in {folder}, but {wanted} in the model"
            diagnostics.append(Diagnostic("model.path", message, "leave out the [model.overrides] that change it"))
    missing = [] if split else [name for name in own if name not in found]  # names don't tell what a tensor is cut into
    may_lack, may_have = ignored_names(model)
    differences = _differences(folder, _without(missing, may_lack), _without(unexpected, may_have), own)
    return [*diagnostics[:_SHOWN], *differences]


def ignored_names(model: Any) -> tuple[set[str], set[str]]:
    """Return patterns of names that a folder may lack, and of those that it may have beyond the model."""
    missing: set[str] = set(model._keys_to_ignore_on_load_missing or ())
    unexpected: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
    return missing, unexpected | {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}  # of older versions of transformers


def _without(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _differences(
    folder: str, missing: Iterable[str], unexpected: Iterable[str], own: Mapping[str, Any]
) -> list[Diagnostic]:
    """Report names that only one of a folder and the model has, some of them."""
    missing, unexpected, diagnostics = sorted(missing), sorted(unexpected), []
    for name in missing[:_SHOWN]:
        near = near_misses(name, unexpected) if unexpected else ""
        diagnostics.append(_difference(f"{folder} has no '{name}'", near))
    for name in unexpected[:_SHOWN]:
        near = near_misses(name, missing or own)
        diagnostics.append(_difference(f"{folder} has '{name}', but the model does not", near))
    more = max(0, len(missing) - _SHOWN) + max(0, len(unexpected) - _SHOWN)
    return [*diagnostics, _difference(f"{more} more names differ", "")] if more else diagnostics


def _difference(message: str, near: str) -> Diagnostic:
    return Diagnostic("model.path", message, near if near.startswith("did") else _OTHER)


def ties_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of a tensor that has several -> all of them."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {name: tuple(each) for each in names.values() if len(each) > 1 for name in each}
