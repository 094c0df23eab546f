"""Models: a Hugging Face folder of all ranks' parameters, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_checkpoint.api import versions
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import local_folder
from hp_checkpoint.errors import shown
from hp_checkpoint.formats.conversions import dtype_named, name_of_dtype
from hp_checkpoint.formats.export import ADAPTER, MODEL, with_dtype
from hp_checkpoint.layout.state import State, flatten
from hp_checkpoint.layout.tensors import cast_to
from hp_checkpoint.layout.tied import checked_tensors
from hp_checkpoint.loading.loading import Verify, load_tensors
from hp_checkpoint.loading.sources import open_checkpoint
from hp_checkpoint.port import port
from hp_checkpoint.recovery.ranks import Ranks
from hp_checkpoint.saving.saving import save_state

__all__ = [
    "ADAPTER",
    "MODEL",
    "Adapter",
    "check_unexpected",
    "config_texts",
    "load_model",
    "model_names",
    "of_model",
    "save_model",
    "saved_part",
    "with_dtype",
]


@dataclass(frozen=True)
class Adapter:
    """What a checkpoint has of a model whose other tensors are in a folder of their own and stay as they are.

    Attributes:
        name: what a tensor of the model is called in the checkpoint; None for those that it leaves out.
        texts: the files beside it, in place of the model's configuration, by their names.
    """

    name: Callable[[str], str | None]
    texts: Mapping[str, bytes]


def save_model(model: Any, folder: str | os.PathLike[str], *, dtype: Any = None) -> Manifest:
    """Save a model as a Hugging Face folder, from all ranks.

    Args:
        model: its parameters and persistent buffers are saved, with its config if it has one.
        folder: a checkpoint there is replaced.
        dtype: save floating-point tensors as "float32", "bfloat16", "float16" or "float64", or the framework's dtype of
            that name. Default: as they are.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
    """
    ranks = Ranks()
    states: list[Any] = []
    places: list[Path] = []

    def collect() -> bytes:
        places.append(local_folder(folder))
        state = of_model(model)
        if dtype is not None:
            own = dtype_named(name_of_dtype(dtype))
            state.tensors = {at: cast_to(at[1], value, own) for at, value in state.tensors.items()}
        states.append(state)
        return b""

    ranks.agree(collect, "save_model")
    texts = config_texts(model)
    if dtype is not None:
        texts |= {name: with_dtype(texts[name], name_of_dtype(dtype)) for name in ("config.json",) if name in texts}
    return save_state(states[0], places[0], ranks, texts=texts, versions=versions(), layout="files")


def load_model(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
    verify: Verify = "read",
) -> None:
    """Load a model in place from a checkpoint, or from any folder with safetensors of a Hugging Face model.

    Args:
        model: with memory, in any layout.
        folder: that of a checkpoint or a model.
        strict: refuse tensors of the folder that no rank's model has. Default True.
        cast: convert floating-point tensors of another dtype to the model's. Default False: they are refused.
        verify: "read" compares what is read with its checksums, if the folder has some.

    Raises:
        CheckpointError: it failed on some rank; on all ranks.
        ValueError: names, shapes or dtypes that differ.
    """
    ranks = Ranks()
    opened: list[Any] = []

    def prepare() -> bytes:
        place = local_folder(folder)
        opened.extend([open_checkpoint(place), place])
        return json.dumps(sorted(model_names(model))).encode()

    names = {name for each in ranks.agree(prepare, "load_model") for name in json.loads(each)}
    if strict:
        check_unexpected(names, opened[0])
    manifest, place = opened
    tensors = checked_tensors(of_model(model, to_load=True), manifest, place, ranks)
    load_tensors(tensors, manifest, place, ranks, verify=verify, cast=cast)


def config_texts(model: Any) -> dict[str, bytes]:
    """Return the files beside a Hugging Face model's weights, of a model that has a config."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    content = json.loads(config.to_json_string())  # type: ignore[union-attr]
    if not content.get("architectures"):
        own = next((c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.")), None)
        content["architectures"] = [own] if own else None
    texts = {"config.json": json.dumps(content, indent=2, sort_keys=True).encode()}
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string().encode()  # type: ignore[union-attr]
    return texts


def model_names(model: Any) -> set[str]:
    """Return the names of a model's tensors, those of tied ones too."""
    return set(port().model_state(model))


def saved_part(model: Any, adapter: Adapter | None = None) -> tuple[str, dict[str, Any]]:
    """Return the part of a checkpoint that has a model, and the model's tensors by their names there.

    Args:
        model: of the framework.
        adapter: leaves out the tensors that are not its own.
    """
    state = port().model_state(model)
    if adapter is None:
        return MODEL, state
    names = {name: adapter.name(name) for name in state}
    return ADAPTER, {own: state[name] for name, own in names.items() if own is not None}


def of_model(model: Any, *, to_load: bool = False, adapter: Adapter | None = None) -> State:
    """Return the tensors of a model by address, each once, and their further names.

    Args:
        model: of the framework.
        to_load: as that of `flatten`.
        adapter: as that of `saved_part`.
    """
    part, state = saved_part(model, adapter)
    return flatten({part: state}, to_load=to_load)


def check_unexpected(names: set[str], manifest: Manifest, part: str = MODEL) -> None:
    """Refuse a checkpoint with tensors that no rank's model has.

    Args:
        names: of all ranks' models.
        manifest: of the checkpoint.
        part: of it that has the model.

    Raises:
        ValueError: it has some.
    """
    saved = manifest.parts.get(part, {})
    tied = {first for alias, first in manifest.aliases.get(part, {}).items() if alias in names}
    unexpected = [name for name in saved if name not in names and name not in tied]
    if unexpected:
        raise ValueError(
            f"load: the checkpoint has {len(unexpected)} of {len(saved)} tensors that the model lacks:"
            f" {', '.join(map(shown, unexpected[:5]))}. It is of another model"
        )
