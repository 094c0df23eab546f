"""Functions of rows that give a row the same bits whatever rows are beside it, and however many.

Note [Tiles and probes]
    A kernel adds up a row's terms in an order that may depend on the number of rows: one row is a product of a matrix
    and a vector, few rows are packed otherwise than many. The bits of a row are defined by a tile: a fixed number of
    rows, filled up with zeros. Any other number of rows is computed at once where a probe shows that each row has the
    bits that it has in a tile, and cut into numbers of rows that do where not. A probe is one computation of rows whose
    terms cancel out: the exact result is zero, so what is computed is the error of rounding, which another order of
    additions changes in almost every place, in bfloat16 as in float32. Kernels do not choose an order by the values,
    so what holds for a probe holds for all rows of its shape, dtype and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

T = torch.Tensor
Function = Callable[[T], T]

_TILES = (16, 32, 64)
_LARGEST = 4096  # rows that are computed at once
_PROBED = 64  # numbers of rows that are probed for one kernel, beside powers of two
_LANES = 128  # elements, a multiple of what vector units take at once; the rest of a tensor has code of its own


@dataclass
class _Kernel:
    """What is known of one kernel.

    Attributes:
        tile: rows whose bits define those of a row.
        same: number of rows -> whether a row has the bits of the tile.
        cuts: number of rows -> numbers that it is cut into.
    """

    tile: int
    same: dict[int, bool]
    cuts: dict[int, list[int]] = field(default_factory=dict)


_kernels: dict[Hashable, _Kernel] = {}


def by_rows(rows: T, function: Function, name: str, *shape: Hashable, probe: Function | None = None) -> T:
    """Apply a function of rows so that a row's bits do not depend on the others; see Note [Tiles and probes].

    Args:
        rows: (rows, columns), or (matrices, rows, columns).
        function: of such a tensor, with one result (..., rows, any) for each row.
        name: of the function, for the error.
        shape: all that the kernel may depend on beside the columns, dtype and device of rows: sizes of weights.
        probe: what is computed in place of the function of rows that cancel out; of 2 matrices, where there are
            matrices. Default: the function.

    Raises:
        NotImplementedError: the bits of a row depend on its place in the tile.
    """
    count = rows.shape[-2]
    if not count:
        return function(rows)
    key = (name, *shape, rows.dim(), rows.shape[-1], rows.dtype, rows.device, torch.get_num_threads())
    kernel = _kernels.get(key)
    if kernel is None or count not in kernel.same:
        with torch.no_grad():
            kernel = _kernels[key] = kernel or _first_probes(rows, probe or function, name)
            if count <= _LARGEST and len(kernel.same) < _PROBED:
                kernel.same[count] = _agrees(rows, probe or function, kernel.tile, count)
    if kernel.same.get(count):
        return function(rows)
    cuts = kernel.cuts.get(count)
    if cuts is None:
        cuts = kernel.cuts[count] = _cut(kernel, count)
    parts, at = [], 0
    for size in cuts:
        found = min(size, count - at)
        part = rows if found == count else rows.narrow(-2, at, found)
        part = torch.constant_pad_nd(part, (0, 0, 0, size - found)) if found < size else part.contiguous()
        result = function(part)
        parts.append(result.narrow(-2, 0, found) if found < size else result)
        at += found
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


def elementwise(values: T, function: Function) -> T:
    """Apply a function of elements to a number of them that vector units take without a rest."""
    count, lanes = values.numel(), _LANES * torch.get_num_threads()
    if values.is_contiguous() and count % lanes == 0:
        return function(values)
    flat = values.contiguous().view(-1)
    return function(F.pad(flat, (0, -count % lanes)))[:count].view(values.shape)


def _cut(kernel: _Kernel, count: int) -> list[int]:
    """Return numbers of rows that have the tile's bits, at least as many as there are rows."""
    sizes = sorted((size for size, same in kernel.same.items() if same and size % kernel.tile == 0), reverse=True)
    found = []
    for size in sizes:
        if size >= 2 * kernel.tile or size == sizes[-1]:
            times = count // size
            found += [size] * times
            count -= size * times
    if count:
        found.append(min(size for size in sizes if size >= count))
    return found


def _first_probes(rows: T, function: Function, name: str) -> _Kernel:
    """Choose the tile, by how large numbers of rows are computed, and probe powers of two."""
    kernels = []
    for tile in _TILES:
        sample = _sample(rows, tile)
        if not function(sample.roll(5, -2)).equal(function(sample).roll(5, -2)):
            continue
        powers = [tile << power for power in range(_LARGEST.bit_length()) if tile << power <= _LARGEST]
        kernels.append(_Kernel(tile, {size: _agrees(rows, function, tile, size) for size in powers}))
        if all(kernels[-1].same.values()):
            return kernels[-1]
    if not kernels:
        raise NotImplementedError(
            f"generation = 'exact': on {rows.device.type} with {torch.get_num_threads()} threads {name} of"
            f" {rows.dtype} with {rows.shape[-1]} columns gives a row other bits at another place of a tile of"
            f" {', '.join(map(str, _TILES))} rows, so no tile defines them; take another number of threads or dtype,"
            " or leave run.generation out"
        )
    return max(kernels, key=lambda kernel: sum(kernel.same.values()))


def _agrees(rows: T, function: Function, tile: int, count: int) -> bool:
    """Tell whether each of so many rows has the bits that it has in a tile."""
    sample = _sample(rows, count)
    found = function(sample)
    for start in range(0, count, tile):
        part = sample[..., start : start + tile, :]
        size = part.shape[-2]
        expected = function(F.pad(part, (0, 0, 0, tile - size)).contiguous())[..., :size, :]
        if not found[..., start : start + size, :].equal(expected):
            return False
    return True


def _sample(rows: T, count: int) -> T:
    return cancelling((*(2,) * (rows.dim() - 2), count, rows.shape[-1]), rows.dtype, rows.device)


def cancelling(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, signed: bool = True) -> T:
    """Return rows whose products with another's, of which one is signed, cancel out; see Note [Tiles and probes].

    Args:
        shape: the last size is that of a row.
        dtype: of the result.
        device: of the result.
        signed: whether pairs of terms have opposite signs, or the same.
    """
    columns, generator = shape[-1], torch.Generator().manual_seed(int(signed))
    half = torch.randn(*shape[:-1], columns // 2, generator=generator)
    half *= torch.exp2(torch.randint(-3, 4, half.shape, generator=generator).float())
    places = torch.randperm(columns // 2 * 2, generator=torch.Generator().manual_seed(columns))
    whole = torch.cat([half, -half if signed else half], -1)[..., places]
    return F.pad(whole, (0, columns % 2), value=2.0**-20).to(device, dtype)
