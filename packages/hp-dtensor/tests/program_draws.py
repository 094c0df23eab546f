"""Draws a line of a random program against the plain values that are there so far, from the tables of templates."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from program_lines import (
    ALONG,
    BINARY,
    IN_PLACE,
    IN_PLACE_PART,
    LIKE,
    NESTED,
    PAIRS,
    PRODUCT,
    PRODUCT_OF_THREE,
    UNARY,
    WATCHED,
    WRITTEN_LEAF,
)

SIZES = (1, 2, 3, 4, 5, 6)
Values = dict[str, torch.Tensor]
Draw = Callable[[random.Random, Values], "str | None"]


def _some(
    rng: random.Random, values: Values, accept: Callable[[torch.Tensor], bool] = lambda value: True
) -> str | None:
    def usable(value: torch.Tensor) -> bool:
        try:
            return accept(value)
        except RuntimeError:  # a view that torch lets nobody read since its base was written
            return False

    names = [name for name, value in values.items() if usable(value)]
    if not names:
        return None
    return rng.choice(names[-6:] if rng.random() < 0.6 else names)


def _unary(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values)
    return rng.choice(UNARY).format(x=x)


def _along(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 0)
    if x is None:
        return None
    shape = tuple(values[x].shape)
    d = rng.randrange(-len(shape), len(shape))
    size = shape[d]
    start = rng.randrange(size)
    return rng.choice(ALONG).format(
        x=x,
        d=d,
        start=start,
        length=rng.randint(1, size - start),
        k=rng.randint(1, size),
        at=rng.randrange(-size, size),
        order=[rng.randrange(size) for _ in range(rng.randint(1, size + 1))],
        other=rng.randrange(-len(shape), len(shape)),
    )


def _reshaped(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 0)
    if x is None:
        return None
    left, sizes = values[x].numel(), []
    while left > 1 and len(sizes) < 3:
        size = rng.choice([n for n in range(1, left + 1) if left % n == 0])
        sizes.append(size)
        left //= size
    shape = (*sizes, left)
    dims = list(range(values[x].dim()))
    rng.shuffle(dims)
    large = (rng.choice(SIZES[:3]), *values[x].shape)
    pads = [rng.randint(0, 1) for _ in range(2)]
    return rng.choice(
        (
            f"{x}.reshape({shape})",
            f"{x}.view({shape})",
            f"{x}.contiguous().view({shape})",
            f"{x}.permute({tuple(dims)})",
            f"{x}.expand({large})",
            f"{x}.flatten()",
            f"F.pad({x}, {pads})",
            f"{x}.repeat({tuple([2] + [1] * (values[x].dim() - 1))})",
        )
    )


def _binary(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values)
    y = _some(rng, values, lambda value: _broadcasts(values[x], value))
    return None if y is None else rng.choice(BINARY).format(x=x, y=y)


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape)))


def _like(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 0)
    if x is None:
        return None
    y = _some(rng, values, lambda value: value.shape == values[x].shape)
    return rng.choice(LIKE).format(x=x, y=y, d=rng.randrange(values[x].dim()))


def _product(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 1)
    if x is None:
        return None
    inner = values[x].shape[-1]
    w = _some(rng, values, lambda value: value.dim() == 2 and value.shape[-1] == inner)
    y = _some(rng, values, lambda value: value.dim() > 1 and value.shape[-2] == inner)
    b = _some(rng, values, lambda value: value.dim() == 1 and w is not None and value.shape[0] == values[w].shape[0])
    n = _some(rng, values, lambda value: value.dim() == 1 and value.shape[0] == inner)
    lines = [f"{x} @ {x}.mT", f"{x}.mT @ {x}", f"F.rms_norm({x}, ({inner},))", f"F.layer_norm({x}, ({inner},))"]
    if w is not None:
        lines += [f"F.linear({x}, {w})", f"F.linear(F.silu({x}), {w})"]
    if w is not None and b is not None:
        lines += [f"F.linear({x}, {w}, {b})"] * 2
    if y is not None and (values[y].dim() == 2 or values[y].shape[:-2] == values[x].shape[:-2]):
        lines += [f"{x} @ {y}", f"torch.matmul({x}, {y})"]
    if n is not None:
        lines += [f"F.layer_norm({x}, ({inner},), {n})", f"F.rms_norm({x}, ({inner},), {n}, 1e-5)", f"{x} @ {n}"]
    if w is not None:
        rows = [rng.randrange(values[w].shape[0]) for _ in range(3)]
        lines += [f"F.embedding(torch.tensor({rows}), {w})", f"torch.outer({w}[:, 0], {w}[0])"]
    if values[x].dim() == 2:
        targets = [rng.randrange(inner) for _ in range(values[x].shape[0])]
        lines += [
            f"F.cross_entropy({x}, torch.tensor({targets}))",
            f"F.cross_entropy({x}, torch.tensor({targets}), reduction='sum')",
            f"torch.einsum('ij,ij->i', {x}, {x})",
            f"torch.addmm({x} @ {x}.mT, {x}, {x}.mT, beta=0.5)",
            f"F.conv1d({x}[None], {x}[None, :, :1])",
            f"torch.linalg.matrix_norm({x})",
            *[rng.choice(PRODUCT).format(x=x, targets=targets) for _ in range(9)],
        ]
    if values[x].dim() == 3:
        lines += [f"F.scaled_dot_product_attention({x}, {x}, {x})", f"torch.einsum('bij,bkj->bik', {x}, {x})"]
        lines += [rng.choice(PRODUCT_OF_THREE).format(x=x) for _ in range(9)]
    return rng.choice(lines)


def _in_place(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: not (value.is_leaf and value.requires_grad))
    if x is None:
        return None
    y = _some(rng, values, lambda value: value.shape == values[x].shape)
    line = rng.choice(IN_PLACE).format(x=x, y=y)
    if values[x].is_contiguous():  # else whether reshape gives a view depends on the layout
        return line
    return None if "reshape" in line or "flatten" in line else line


def _in_place_part(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 0 and not (value.is_leaf and value.requires_grad))
    if x is None:
        return None
    d = rng.randrange(values[x].dim())
    size = values[x].shape[d]
    start = rng.randrange(size)
    length = rng.randint(1, size - start)
    before = ":, " * d
    row = f"{x}[{before}{start}]"
    return rng.choice(IN_PLACE_PART).format(
        x=x, d=d, start=start, length=length, row=row, part=f"{x}[{before}{start}:{start + length}]"
    )


def _written_leaf(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.is_leaf)
    return None if x is None else rng.choice(WRITTEN_LEAF).format(x=x)


def _watched(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.requires_grad)
    return None if x is None else rng.choice(WATCHED).format(x=x)


def nested(rng: random.Random, values: Values, axes: int) -> str | None:
    x = _some(rng, values, lambda value: value.requires_grad)
    if x is None:
        return None
    y = _some(rng, values, lambda value: value.shape == values[x].shape)
    return rng.choice(NESTED).format(x=x, y=y, codes=_codes(rng, values[x], axes))


def pair(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.dim() > 0)
    return None if x is None else rng.choice(PAIRS).format(x=x)


def _codes(rng: random.Random, value: torch.Tensor, axes: int) -> str:
    return ", ".join(map(repr, placements(rng, value.dim(), axes)))


def moved(rng: random.Random, values: Values, axes: int = 1) -> str | None:
    """``move(x, ...)`` to random placements."""
    x = _some(rng, values)
    assert x is not None
    moves = (f"move({x}, {_codes(rng, values[x], axes)})",) * 4
    return rng.choice((*moves, f"through_local({x})", f"through_full({x})"))


def placements(rng: random.Random, ndim: int, axes: int) -> tuple[str, ...]:
    """Random placements of a tensor of ``ndim`` dims: replicated, partial, sharded on a dim, a RaggedShard."""
    if ndim and rng.random() < 0.08:
        ragged = rng.randrange(axes)
        return tuple("G" if axis == ragged else "R" for axis in range(axes))
    return tuple(rng.choice(["R", "R", "P", *[f"S{dim}" for dim in range(ndim)] * 2]) for _ in range(axes))


RESULTS: list[tuple[int, Draw]] = [
    (6, _unary),
    (8, _along),
    (4, _reshaped),
    (6, _binary),
    (3, _like),
    (7, _product),
]
STATEMENTS: list[Draw] = [_in_place, _in_place, _in_place_part, _in_place_part, _written_leaf, _watched]
