"""Files of `torch.save` with a state: its tensors in place, its values, and no code of it run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hp_checkpoint.archives import TORCH_NAMES, Archive
from hp_checkpoint.errors import InvalidCheckpointError, shown
from hp_checkpoint.files import Chunk, Entry, Kind
from hp_checkpoint.manifest import FileSums, Manifest
from hp_checkpoint.pickles import StoredTensor, tensor_names
from hp_checkpoint.state import TensorPlace, address, top_part
from hp_checkpoint.storage import opened
from hp_checkpoint.unpickling import Ordered

__all__ = ["torch_file"]


def torch_file(path: Path) -> tuple[Manifest, Any]:
    """Return the tensors of a file of `torch.save`, and the state, with a `TensorPlace` for each tensor.

    Args:
        path: of the file.

    Raises:
        InvalidCheckpointError: it is damaged, of the format before PyTorch 1.6, or names code.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        archive = Archive(descriptor, path, 0, size, size, str(path))
        state = archive.content(tensor_names(Ordered))
        if not isinstance(state, Mapping):
            raise InvalidCheckpointError(f"{path} has a {type(state).__name__}, expected a dictionary")
        top = top_part(state)
        parts: dict[str, dict[str, Entry]] = {}

        def place(tensor: StoredTensor, keys: tuple[Any, ...]) -> TensorPlace:
            at = TensorPlace(address(keys, top))
            entry = _entry(path, archive, at[1], tensor)
            if parts.setdefault(at[0], {}).setdefault(at[1], entry) is not entry:
                raise InvalidCheckpointError(f"{path} has two tensors that are {shown(at[1])} in {at[0]!r} here")
            return at

        tree = _placed(state, (), place)
    return Manifest(None, parts, {path.name: FileSums(size, ())}), tree


def _placed(value: Any, keys: tuple[Any, ...], place: Callable[[StoredTensor, tuple[Any, ...]], TensorPlace]) -> Any:
    """Return a value with the place that ``place`` gives it in the place of each tensor."""
    if isinstance(value, StoredTensor):
        return place(value, keys)
    if isinstance(value, Mapping):
        return {key: _placed(inner, (*keys, key), place) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(inner, (*keys, number), place) for number, inner in enumerate(value))
    return value


def _entry(path: Path, archive: Archive, name: str, tensor: StoredTensor) -> Entry:
    where = f"{path}: {shown(name)}"
    if tensor.dtype not in TORCH_NAMES:
        raise InvalidCheckpointError(f"{where} has dtype {shown(tensor.dtype)}, which safetensors lacks")
    if any(size > 1 and not stride for size, stride in zip(tensor.size, tensor.stride, strict=True)):
        raise InvalidCheckpointError(f"{where} repeats elements (strides {tensor.stride}); save it after .contiguous()")
    kind = Kind(TORCH_NAMES[tensor.dtype], tensor.size)
    start = archive.place(tensor, kind.itemsize)
    if tensor.stride == tuple(prod(tensor.size[dim + 1 :]) for dim in range(len(tensor.size))):
        return Entry(name, kind, path.name, start)
    return Entry(
        name, kind, path.name, start, (Chunk((0,) * len(tensor.size), tensor.size, path.name, start, tensor.stride),)
    )
