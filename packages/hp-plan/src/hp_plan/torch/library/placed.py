"""Tensors of a model's folder as places in its files, without memory, and as transformers merges them on a load.

Note [Traced conversions]
    transformers merges, cuts and permutes the tensors of a folder by code that takes tensors. It is run here on tensors
    that have, in place of elements, the places of these: what comes out says which bytes of which files each element
    is. So whatever a conversion is made of, no rule of it is written twice, and a rank can read its shards alone. A
    function that does not only move elements raises, and the whole tensors are converted in its place.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from hp_checkpoint.extend import Chunk, Entry, Kind
from hp_checkpoint.torch.extend import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_AT_MOST = 1 << 16  # chunks of a tensor, of which each is a request of its own
aten: Any = torch.ops.aten


class NotPlacedError(Exception):
    """A function computes new elements, or scatters those of a file so widely that reading them one by one is slow."""


class Placed(torch.Tensor):
    """A tensor without elements: its chunks say where these are.

    Args:
        shape: its shape.
        dtype: its dtype.
        chunks: boxes that are the tensor, with their files and strides there.
    """

    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Iterable[Chunk]) -> Placed:
        """Make the tensor, contiguous as far as torch knows, so that a reshape is a view."""
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.chunks = tuple(chunks)
        if len(made.chunks) > _AT_MOST:
            raise NotPlacedError(f"a tensor of {len(made.chunks):,} parts")
        return made

    @staticmethod
    def of(entry: Entry) -> Placed:
        """Return the tensor of an entry."""
        strides = tuple(prod(entry.kind.shape[dim + 1 :]) for dim in range(len(entry.kind.shape)))
        whole = Chunk((0,) * len(strides), entry.kind.shape, entry.file, entry.offset, strides)
        return Placed(entry.kind.shape, DTYPES[entry.kind.dtype], entry.chunks or (whole,))

    def entry(self, name: str) -> Entry:
        """Return an entry of a checkpoint that has this tensor's elements.

        Raises:
            NotPlacedError: neighbours along the last dim are apart in the files.
        """
        for chunk in self.chunks:
            if len(chunk.sizes) > 1 and chunk.sizes[-1] > 1 and chunk.strides[-1] != 1:
                raise NotPlacedError("a transposed tensor")
        return Entry(name, Kind(_NAMES[self.dtype], tuple(self.shape)), "", 0, self.chunks)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Move the places as a function moves elements.

        Raises:
            NotPlacedError: it does something else.
        """
        if func not in _MOVES or kwargs:
            raise NotPlacedError(f"{func}")
        return _MOVES[func](*args)


def _stack(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    return _cat([_unsqueeze(each, dim) for each in tensors], dim)


def _cat(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    dim %= tensors[0].dim()
    shape, chunks, end = list(tensors[0].shape), [], 0
    for each in tensors:
        if not isinstance(each, Placed) or each.dtype != tensors[0].dtype:
            raise NotPlacedError("tensors of several dtypes")
        chunks += [_moved(chunk, dim, end) for chunk in each.chunks]
        end += each.shape[dim]
    shape[dim] = end
    return Placed(shape, tensors[0].dtype, chunks)


def _moved(chunk: Chunk, dim: int, by: int) -> Chunk:
    offsets = list(chunk.offsets)
    offsets[dim] += by
    return chunk._replace(offsets=tuple(offsets))


def _slice(x: Placed, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Placed:
    if step != 1:
        raise NotPlacedError("every other element")
    dim %= x.dim()
    low, high, _ = slice(start, stop).indices(x.shape[dim])
    chunks = []
    for chunk in x.chunks:
        first, last = max(low, chunk.offsets[dim]), min(high, chunk.offsets[dim] + chunk.sizes[dim])
        if first < last:
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            skipped = (first - offsets[dim]) * chunk.strides[dim] * x.element_size()
            offsets[dim], sizes[dim] = first - low, last - first
            chunks.append(Chunk(tuple(offsets), tuple(sizes), chunk.file, chunk.offset + skipped, chunk.strides))
    return Placed([*x.shape[:dim], max(0, high - low), *x.shape[dim + 1 :]], x.dtype, chunks)


def _split_with_sizes(x: Placed, sizes: Sequence[int], dim: int = 0) -> list[Placed]:
    ends = list(itertools.accumulate(sizes))
    return [_slice(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _split(x: Placed, size: int, dim: int = 0) -> list[Placed]:
    return [_slice(x, dim, at, at + size) for at in range(0, x.shape[dim], size)]


def _select(x: Placed, dim: int, index: int) -> Placed:
    dim, index = dim % x.dim(), index % x.shape[dim]
    return _squeeze(_slice(x, dim, index, index + 1), dim)


def _unbind(x: Placed, dim: int = 0) -> list[Placed]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _same(x: Placed) -> Placed:
    return Placed(x.shape, x.dtype, x.chunks)


def _squeeze(x: Placed, dim: int) -> Placed:
    if x.shape[dim] != 1:
        return _same(x)
    dim %= x.dim()

    def without(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:dim], *values[dim + 1 :])

    chunks = [Chunk(without(c.offsets), without(c.sizes), c.file, c.offset, without(c.strides)) for c in x.chunks]
    return Placed(without(x.shape), x.dtype, chunks)


def _unsqueeze(x: Placed, dim: int) -> Placed:
    dim %= x.dim() + 1

    def wider(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    chunks = [Chunk(wider(c.offsets, 0), wider(c.sizes, 1), c.file, c.offset, wider(c.strides, 0)) for c in x.chunks]
    return Placed(wider(x.shape, 1), x.dtype, chunks)


def _permute(x: Placed, dims: Sequence[int]) -> Placed:
    def turned(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    chunks = [Chunk(turned(c.offsets), turned(c.sizes), c.file, c.offset, turned(c.strides)) for c in x.chunks]
    return Placed(turned(x.shape), x.dtype, chunks)


def _transpose(x: Placed, one: int, other: int) -> Placed:
    dims = list(range(x.dim()))
    dims[one], dims[other] = dims[other], dims[one]
    return _permute(x, dims)


def _view(x: Placed, shape: Sequence[int]) -> Placed:
    known = prod(size for size in shape if size != -1)
    shape = tuple(x.numel() // known if size == -1 else size for size in shape)
    if prod(shape) != x.numel() or not x.numel():
        raise NotPlacedError(f"a view of {tuple(x.shape)} as {shape}")
    groups = list(_groups(tuple(x.shape), shape))
    chunks: list[Chunk] = []
    for chunk in x.chunks:
        parts: list[list[_Part]] = []
        for old, new in groups:
            own = [
                _cut(run, new) for run in _runs(x.shape[old], chunk.offsets[old], chunk.sizes[old], chunk.strides[old])
            ]
            parts.append([part for each in own for part in each])
        for chosen in itertools.product(*parts):
            first = sum(part.first for part in chosen) * x.element_size()
            offsets, sizes, strides = (
                tuple(value for part in chosen for value in getattr(part, name))
                for name in ("offsets", "sizes", "strides")
            )
            chunks.append(Chunk(offsets, sizes, chunk.file, chunk.offset + first, strides))
            if len(chunks) > _AT_MOST:
                raise NotPlacedError(f"a tensor of more than {_AT_MOST:,} parts")
    return Placed(shape, x.dtype, chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A box in some dims of a view, its first element's distance from the chunk's in the file, and its strides."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    strides: tuple[int, ...]


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """List neighbouring dims of one shape and those of another that hold the same elements, as few as possible."""
    at, start, begin = 0, 0, 0
    for end in range(len(new) + 1):
        while at < len(old) and prod(old[start:at]) < prod(new[begin:end]):
            at += 1
        if prod(old[start:at]) == prod(new[begin:end]) and (end > begin or at > start or end == len(new)):
            at = len(old) if end == len(new) else at
            yield slice(start, at), new[begin:end]
            start, begin = at, end


def _runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """List ranges of the row-major order of a box: first index, count, and first place and stride in the file."""
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1]
    inner, count, stride = len(dims), 1, 1
    while inner:
        dim = dims[inner - 1]
        if inner < len(dims) and (count != prod(shape[dim + 1 :]) or strides[dim] != stride * count):
            break  # The inner dims are not whole, or lie apart from their next ones.
        stride = strides[dim] if inner == len(dims) else stride
        count, inner = count * sizes[dim], inner - 1
    outer = dims[:inner]
    base = sum(offsets[dim] * prod(shape[dim + 1 :]) for dim in dims)
    for indices in itertools.product(*(range(sizes[dim]) for dim in outer)):
        index = sum(n * prod(shape[dim + 1 :]) for n, dim in zip(indices, outer, strict=True))
        yield base + index, count, sum(n * strides[dim] for n, dim in zip(indices, outer, strict=True)), stride


def _cut(run: tuple[int, int, int, int], shape: tuple[int, ...]) -> Iterator[_Part]:
    """Divide a range of the row-major order of a shape into boxes."""
    start, count, first, stride = run
    if not shape:
        yield _Part((), (), first, ())
        return
    inner = prod(shape[1:])
    while count:
        at, within = divmod(start, inner)
        whole = 0 if within else count // inner
        taken = whole * inner or min(count, inner - within)
        rest = (0, inner, first, stride) if whole else (within, taken, first, stride)
        for part in _cut(rest, shape[1:]):
            yield _Part((at, *part.offsets), (max(1, whole), *part.sizes), part.first, (stride * inner, *part.strides))
        start, count, first = start + taken, count - taken, first + taken * stride


_MOVES: dict[Any, Callable[..., Any]] = {
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.squeeze.dim: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
    aten.alias.default: _same,
    aten.detach.default: _same,
}


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
