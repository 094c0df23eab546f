"""Models as Hugging Face folders: of all ranks' parameters and back, or of a checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_checkpoint.api import versions
from hp_checkpoint.disk.files import File, Kind, casts_to, converted, dtype_named, index_of, lay_out, name_of_dtype
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.disk.storage import (
    check_space,
    local_folder,
    make_folder,
    opened,
    part_folder,
    read_small,
    sync,
    sync_folder,
    write_at,
    write_small,
)
from hp_checkpoint.errors import Ranks, shown
from hp_checkpoint.layout.state import State, flatten
from hp_checkpoint.layout.tensors import cast_to
from hp_checkpoint.loading.loading import (
    Verify,
    checked_tensors,
    load_tensors,
    open_checkpoint,
    open_source,
    verify_files,
)
from hp_checkpoint.loading.reads import stream
from hp_checkpoint.port import port
from hp_checkpoint.saving.saving import save_state

MODEL = "model"
ADAPTER = "adapter_model"
"""The part of a checkpoint that has an adapter, in place of a model: peft's name of the file."""

# What transformers' tokenizers save beside a model; which of them there are depends on the tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
_TEXTS = ("config.json", "adapter_config.json", "generation_config.json", *TOKENIZER_FILES)


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


def to_hugging_face(folder: Path, target: Path, *, dtype: str | None = None) -> list[str]:
    """Write a checkpoint's model, or adapter, alone as a Hugging Face folder, from checked bytes; return its files.

    Args:
        folder: a checkpoint, one of torch.distributed.checkpoint, a Hugging Face folder, or a file, as `open_source`
            takes it.
        target: a folder that doesn't exist.
        dtype: of floating-point tensors, as "bfloat16". Default None: as they are.

    Raises:
        FileExistsError: the target exists.
        InvalidCheckpointError: a file differs from its checksums.
    """
    own = None if dtype is None else dtype_named(dtype)
    manifest, folder = opened_model(folder)
    part = model_part(manifest)
    entries = manifest.parts[part]
    kinds = {}
    for name, entry in entries.items():
        changed = own is not None and casts_to(name, entry.kind.dtype, own)
        kinds[name] = Kind(str(own), entry.kind.shape) if changed else entry.kind
    files = lay_out(part, kinds)

    def content(name: str) -> Iterator[np.ndarray]:
        for data in stream(entries[name], folder):
            yield converted(data, entries[name].kind.dtype, kinds[name].dtype)

    with new_folder(target, sum(file.size for file in files)) as place:
        names = write_files(place, files, content)
        for name in _TEXTS:
            if (folder / name).is_file():
                text = read_small(folder / name)
                write_small(place / name, with_dtype(text, dtype) if dtype and name == "config.json" else text)
                names.append(name)
    return sorted(names)


def model_part(manifest: Manifest) -> str:
    """Return the name of the part that has the model, or its adapter."""
    return ADAPTER if MODEL not in manifest.parts and ADAPTER in manifest.parts else MODEL


def opened_model(source: Path) -> tuple[Manifest, Path]:
    """Open a folder or a file that has a model, and verify the model's files; return their folder, too.

    Raises:
        ValueError: it has tensors of other parts alone.
        InvalidCheckpointError: a file differs from its checksums.
    """
    manifest, folder, _ = open_source(source)
    own = model_part(manifest)
    if own not in manifest.parts:
        raise ValueError(f"{source} has no tensors under 'model', but the parts {', '.join(manifest.parts) or 'none'}")
    if any(file.rows for file in manifest.files.values()):
        used = {file for entry in manifest.parts[own].values() for file in entry.files} | {*_TEXTS}
        files = {name: file for name, file in manifest.files.items() if name in used}
        verify_files(Manifest(None, manifest.parts, files, {}, manifest.block_bytes), folder)
    return manifest, folder


@contextmanager
def new_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """Make a folder that is renamed once it is complete and on the disk, and removed if it does not come to that.

    Args:
        target: its name, of a folder that doesn't exist.
        needed: bytes.

    Raises:
        FileExistsError: it exists.
    """
    local_folder(target)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; name a folder that doesn't")
    part = part_folder(target, f"{os.getpid():x}")
    make_folder(part.parent)
    part.mkdir()
    try:
        check_space(part, needed)
        yield part
        sync_folder(part)
        os.rename(part, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_files(folder: Path, files: Iterable[File], content: Callable[[str], Iterator[np.ndarray]]) -> list[str]:
    """Write safetensors, and their index where there are several; return their names.

    Args:
        folder: to write to.
        files: as `lay_out` gives them.
        content: gives the bytes of a tensor in parts, by its name.
    """
    files = list(files)
    for file in files:
        path = folder / file.name
        with opened(path, write=True) as descriptor:
            write_at(descriptor, np.frombuffer(file.header, np.uint8), 0, path)
            for entry in file.entries:
                at = entry.offset
                for data in content(entry.name):
                    write_at(descriptor, data, at, path)
                    at += len(data)
                if at != entry.offset + entry.kind.nbytes:
                    raise AssertionError(f"{entry.name!r} has {at - entry.offset} bytes, not {entry.kind.nbytes}")
            sync(descriptor, path)
    names = [file.name for file in files]
    if len(files) > 1:
        write_small(folder / f"{MODEL}.safetensors.index.json", json.dumps(index_of(files), indent=2).encode())
        names.append(f"{MODEL}.safetensors.index.json")
    return names


def with_dtype(content: bytes, dtype: str) -> bytes:
    """Return a config.json that says the dtype of the weights beside it."""
    config = json.loads(content)
    changed: Mapping[str, str] = {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    return json.dumps({**config, **changed}, indent=2, sort_keys=True).encode() if changed else content
