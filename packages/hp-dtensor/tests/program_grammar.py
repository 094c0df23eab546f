"""A grammar of random tensor programs, as lines of Python that one device and DTensors both run.

A program is text: each line is run with ``exec``, once on plain tensors and once on DTensors, so a program that fails
can be read, shortened line by line and pasted into a test. Lines are drawn against the plain values made so far, hence
every program is valid on one device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SIZES = (1, 2, 3, 4, 5, 6)
LARGEST = 1e4
MAX_NUMEL = 400
Values = dict[str, torch.Tensor]
Draw = Callable[[random.Random, Values], "str | None"]


@dataclass(frozen=True)
class Leaf:
    """An input of a program.

    Attributes:
        name: its name in the lines.
        shape: its global shape.
        placements: a code for each axis: ``"S0"``, ``"R"``, ``"P"`` or ``"G"``, a RaggedShard of all dims.
        requires_grad: whether gradients with respect to it are compared.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Program:
    """Lines of Python over leaves.

    Attributes:
        seed: draws the leaves' values.
        leaves: the inputs.
        lines: ``v7 = torch.tanh(v3)``, or statements that write in place.
        roots: names of the values that enter the loss.
        mode: how gradients are taken: ``"backward"``, ``"twice"``, ``"grad"``, ``"double"`` or ``"none"``.
    """

    seed: int
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    roots: tuple[str, ...]
    mode: str

    def without(self, index: int) -> Program:
        """The program without one line and without what depends on it."""
        kept, lost = list(self.lines[:index]), _targets(self.lines[index])
        for line in self.lines[index + 1 :]:
            if lost & _names(line):
                lost |= _targets(line)
            else:
                kept.append(line)
        return replace(self, lines=tuple(kept), roots=tuple(root for root in self.roots if root not in lost))

    def __str__(self) -> str:
        read = set(self.roots).union(*map(_names, self.lines))
        leaves = [
            f"# {leaf.name}: {leaf.shape} {leaf.placements}{', requires_grad' if leaf.requires_grad else ''}"
            for leaf in self.leaves
            if leaf.name in read
        ]
        return "\n".join([f"# seed {self.seed}", *leaves, *self.lines, f"# roots {self.roots}, {self.mode}"])


def _targets(line: str) -> set[str]:
    left, equals, _ = line.partition(" = ")
    return {name.strip() for name in left.split(",")} if equals and left.replace(", ", "").isidentifier() else set()


def _names(line: str) -> set[str]:
    word, found = "", set()
    for letter in line + " ":
        if letter.isalnum() or letter == "_":
            word += letter
        else:
            found.add(word)
            word = ""
    return found


def namespace(move: Callable[..., Any], through_local: Callable[..., Any]) -> dict[str, Any]:
    """The names that lines may use.

    Args:
        move: ``move(x, "S0", "R")`` redistributes; the identity on one device.
        through_local: takes a tensor to its local part and back; the identity on one device.
    """

    def untied(x: Any) -> Any:
        """``x`` with no two elements alike: which of two equal ones is the largest is not defined."""
        return x + torch.arange(x.numel(), dtype=torch.float64).mul(0.37).sin().reshape(x.shape)

    return {
        "torch": torch,
        "F": F,
        "checkpoint": checkpoint,
        "move": move,
        "through_local": through_local,
        "untied": untied,
    }


# ---- drawing lines ----
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
        ]
    if values[x].dim() == 3:
        lines += [f"F.scaled_dot_product_attention({x}, {x}, {x})", f"torch.einsum('bij,bkj->bik', {x}, {x})"]
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


def _nested(rng: random.Random, values: Values) -> str | None:
    x = _some(rng, values, lambda value: value.requires_grad)
    if x is None:
        return None
    y = _some(rng, values, lambda value: value.shape == values[x].shape)
    return rng.choice(NESTED).format(x=x, y=y)


def moved(rng: random.Random, values: Values, axes: int = 1) -> str | None:
    """``move(x, ...)`` to random placements."""
    x = _some(rng, values)
    assert x is not None
    codes = ", ".join(map(repr, placements(rng, values[x].dim(), axes)))
    return rng.choice((f"move({x}, {codes})",) * 3 + (f"through_local({x})",))


def placements(rng: random.Random, ndim: int, axes: int) -> tuple[str, ...]:
    """Random placements of a tensor of ``ndim`` dims: replicated, partial, sharded on a dim, a RaggedShard."""
    if ndim and rng.random() < 0.08:
        ragged = rng.randrange(axes)
        return tuple("G" if axis == ragged else "R" for axis in range(axes))
    return tuple(rng.choice(["R", "R", "P", *[f"S{dim}" for dim in range(ndim)] * 2]) for _ in range(axes))


def _split(table: str) -> list[str]:
    return [part.strip() for line in table.strip().splitlines() for part in line.split(" | ")]


UNARY = _split("""
    torch.tanh({x}) | F.relu({x}) | F.silu({x}) | F.gelu({x}) | torch.sigmoid({x}) | {x} * 0.5 + 1 | {x}.pow(2)
    torch.exp({x} * 0.1) | {x}.abs() | torch.clamp({x}, -0.5, 0.5) | -{x} | torch.where({x} > 0, {x}, {x} * 0.1)
    {x}.detach() | {x}.detach() + {x} | {x}.clone() | {x}.contiguous() | {x} / 2 | 1 - {x} | {x}.sum()
    {x}.mean() | {x}.square().sum() | {x}[None] | {x}[..., None] | {x}.reshape(-1) | {x}.double() + 1
    {x}.max() | {x}.norm() | {x}.masked_fill({x} > 0.3, 0.25) | torch.addcmul({x}, {x}, {x}, value=0.5)
    torch.sin({x}) | torch.logical_or({x} > 0.2, {x} < -0.4) * {x} | {x}.requires_grad_({x}.requires_grad) * 1
    {x} + torch.ones_like({x}) | {x} * torch.full_like({x}, 0.5)
""")
ALONG = _split("""
    torch.softmax({x}, {d}) | F.log_softmax({x}, {d}) | {x}.sum({d}) | {x}.mean({d}, keepdim=True)
    {x}.cumsum({d}) * 0.3 | {x}.amax({d}) | {x}.flip({d}) | {x}.roll(1, {d}) | untied({x}).sort({d})[0]
    untied({x}).topk({k}, {d})[0] | {x}.std({d}, unbiased=False) | {x}.var({d}, keepdim=True, unbiased=False)
    {x}.logsumexp({d}) | {x}.norm(dim={d}) | F.normalize({x}, dim={d}) | untied({x}).max({d})[0]
    untied({x}).argmax({d}).double() | {x}.unsqueeze({d}) | {x}.squeeze({d}) | {x}.select({d}, {at})
    {x}.narrow({d}, {start}, {length}) | {x}.chunk(2, {d})[0] | {x}.chunk(2, {d})[-1] | {x}.split({k}, {d})[0]
    {x}.unbind({d})[{at}] | {x}.index_select({d}, torch.tensor({order})) | {x}.movedim({d}, {other})
    {x}.transpose({d}, {other}) | {x}.gather({d}, untied({x}).argsort({d})) | {x}.repeat_interleave(2, {d})
    torch.cat({x}.chunk(2, {d})[::-1], {d}) | torch.stack({x}.unbind({d})[::-1], {d})
    {x}.tril() if {x}.dim() > 1 else {x}.cumprod(0) | {x}[{at}] if {x}.shape[0] == {x}.shape[{d}] else {x}[0]
    {x}[..., ::2] | {x}[{order}] if {d} == 0 else {x} * 1 | {x}.diagonal() if {x}.dim() > 1 else {x}.flip(0)
    {x}.unfold({d}, {k}, 1).sum(-1) | {x}.sum({d}, keepdim=True) * {x} | {x} - {x}.mean({d}, keepdim=True)
    {x}.scatter_add({d}, torch.zeros({x}.shape, dtype=torch.int64), {x})
    {x}.index_fill({d}, torch.tensor([{start}]), 0.5)
    {x}.index_add({d}, torch.tensor([{start}]), {x}.narrow({d}, {start}, 1))
    F.glu(torch.cat([{x}, {x}], {d}), {d}) | torch.take_along_dim({x}, untied({x}).argsort({d}), {d})
    {x}.index_copy({d}, torch.tensor([{start}]), {x}.narrow({d}, 0, 1))
    {x}.prod({d}) | untied({x}).median({d})[0] | untied({x}).cummax({d})[0]
""")
BINARY = _split("""
    {x} + {y} | {x} - {y} | {x} * {y} | {y} * {x} | torch.sub({x}, {y}, alpha=0.5) | torch.maximum({x}, {y})
    torch.where({x} > {y}, {x}, {y}) | torch.lerp({x}, {y}, 0.3) | {x} / (1 + {y}.abs())
    torch.atan2({x}, 1.5 + {y}.abs()) | torch.hypot({x}, 0.5 + {y}.abs())
    torch.broadcast_tensors({x}, {y})[0] * 2 | ({x} > {y}).double() + {x} | torch.add({x}, {y})
""")
LIKE = _split("""
    torch.cat([{x}, {y}], {d}) | torch.stack([{x}, {y}]) | torch.stack([{x}, {y}], {d}).mean({d})
    ({x} * {y}).sum() | F.mse_loss({x}, {y}) | torch.addcmul({x}, {y}, {y}, value=0.5)
    F.l1_loss({x}, {y}, reduction='none') | torch.cat([{x}, {y}, {x}], {d}) | F.cosine_similarity({x}, {y}, {d})
    F.softplus({x} - {y})
""")
IN_PLACE = _split("""
    {x}.mul_(0.5) | {x}.add_({y}) | {x}.tanh_() | {x}.copy_({y}) | {x}.zero_() | {x}.masked_fill_({x} > 0.3, 0.25)
    {x}.add_(1) | {x}.fill_(0.3) | {x}.clamp_(-0.4, 0.4) | {x}.sub_({y}, alpha=0.5) | {x} += {y} | {x} *= 0.7
    {x}.addcmul_({y}, {y}, value=0.1) | {x}.neg_() | {x}.lerp_({y}, 0.5) | {x}.view(-1).mul_(0.6)
    {x}.reshape(-1).add_(0.1) | {x}.flatten().mul_(0.9) | {x}[...] = {y} | {x}.detach().mul_(0.8)
    {x}.data.add_(0.1) | {x}.t().mul_(0.5) if {x}.dim() <= 2 else {x}.transpose(0, 1).mul_(0.5)
    {x}.squeeze().mul_(0.5)
""")
IN_PLACE_PART = _split("""
    {row} = 0.5 | {row} *= 0.5 | {part} += 1 | {part} = 0.25 | {part} *= {part}
    {x}.narrow({d}, {start}, {length}).mul_(0.5) | {x}.select({d}, {start}).add_(0.3)
    {x}.chunk(2, {d})[0].mul_(0.4) | {x}.unbind({d})[{start}].zero_() | {x}.split({length}, {d})[0].tanh_()
    {x}.index_fill_({d}, torch.tensor([{start}]), 0.2) | {part}.mul_(2.0) | {part}.copy_({part} * 0.5)
    {x}.diagonal().mul_(0.5) if {x}.dim() > 1 else {x}.neg_() | {x}.transpose({d}, -1).mul_(0.9)
    {x}.movedim({d}, 0)[{start}].mul_(0.9)
""")
WRITTEN_LEAF = _split("""
    with torch.no_grad(): {x}.mul_(0.9) | {x}.data.mul_(0.9) | {x}.data = {x}.data * 0.9 | {x}.detach().add_(0.05)
    with torch.no_grad(): {x}.copy_({x} * 0.8) | with torch.no_grad(): {x}.view(-1).mul_(0.9)
    with torch.no_grad(): {x}[...] = {x} * 0.7
""")
WATCHED = _split("""
    {x}.register_hook(lambda g: g * 1.5) | {x}.register_hook(lambda g: g + 0.1) | {x}.retain_grad()
    {x}.register_hook(lambda g: None)
""")
NESTED = _split("""
    checkpoint(lambda a, b: torch.tanh(a * b) * a, {x}, {y}, use_reentrant=False)
    checkpoint(lambda a: torch.softmax(a, -1) @ a.mT if a.dim() > 1 else a * a, {x}, use_reentrant=False)
    checkpoint(lambda a: (a * {y}).sin(), {x}, use_reentrant=False)
    torch.autograd.grad(({x} ** 3).sum(), {x}, create_graph=True)[0]
    torch.autograd.grad(({x} * {x} * {y}).sum(), {x}, create_graph=True)[0]
    torch.autograd.grad({x}.tanh(), {x}, {y}.detach())[0]
""")


MAYBE_COPIES = ("move(", ".reshape(", ".contiguous(", ".flatten(")
"""Whether these give a copy or a view is not defined."""
RESULTS: list[tuple[int, Draw]] = [
    (6, _unary),
    (8, _along),
    (4, _reshaped),
    (6, _binary),
    (3, _like),
    (7, _product),
    (2, _nested),
]
STATEMENTS: list[Draw] = [_in_place, _in_place, _in_place_part, _in_place_part, _written_leaf, _watched]


def draw(seed: int, axes: int, steps: int = 14, calm: bool = False) -> Program:
    """Draw a program whose lines one device runs without an error.

    Args:
        seed: the program's number.
        axes: axes of the mesh that it will run on.
        steps: lines to draw.
        calm: without statements that write in place or register hooks.
    """
    rng = random.Random(f"{seed} {axes} {calm}")
    leaves = []
    for index in range(6):
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 3))))
        if index >= 3:  # shapes that fit those of earlier leaves
            last = rng.choice(leaves).shape[-1]
            shape = rng.choice(((last,), (rng.choice(SIZES), last), leaves[index % 3].shape))
        leaves.append(Leaf(f"v{index}", shape, placements(rng, len(shape), axes), rng.random() < 0.75))
    program = Program(seed, tuple(leaves), (), (), "none")
    values = inputs(program)
    names = namespace(lambda x, *to: x.view_as(x), lambda x: x.view_as(x))
    lines: list[str] = []
    shared: set[int] = set()  # memory that two values have, or have not, as the layout falls out: not written any more
    weights = [weight for weight, _ in RESULTS]
    while len(lines) < steps:
        written = not calm and rng.random() < 0.25
        moves = rng.random() < 0.2
        if written:
            line = rng.choice(STATEMENTS)(rng, values)
        else:
            code = moved(rng, values, axes) if moves else rng.choices([d for _, d in RESULTS], weights)[0](rng, values)
            line = None if code is None else f"v{len(leaves) + len(lines)} = {code}"
        if line is None or (written and shared & _memory(line, values)) or not _accepts(line, values, names):
            continue
        lines.append(line)
        if any(name in line for name in MAYBE_COPIES):
            shared |= _memory(line, values)
    program = replace(program, lines=tuple(lines))
    made = [name for name in values if name not in {leaf.name for leaf in leaves} and values[name].requires_grad]
    roots = tuple(rng.sample(made, min(3, len(made))))
    unseen = any(".data" in line for line in lines)  # autograd's own gradients are those of neither value then
    mode = rng.choice(("backward", "twice", "grad", "double")) if roots and not unseen else "none"
    return replace(program, roots=roots, mode=mode)


def _memory(line: str, values: Values) -> set[int]:
    """The storages of the values that a line names."""
    return {values[name].untyped_storage().data_ptr() for name in _names(line) & values.keys()}


def _accepts(line: str, values: Values, names: dict[str, Any]) -> bool:
    """Runs a line on the plain values; False where one device refuses it or its values grow out of hand."""
    space = {**names, **values}
    try:
        exec(line, space)
    except Exception:
        return False
    for name in _targets(line):
        value = space[name]
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype is not torch.float64
            or not 0 < value.numel() <= MAX_NUMEL
        ):
            return False
        if value.dim() > 4 or not math.isfinite(total := value.detach().abs().sum().item()) or total > LARGEST:
            return False
        values[name] = value
    return True


def inputs(program: Program) -> Values:
    """The leaves' plain values: normal numbers in float64."""
    generator = torch.Generator().manual_seed(program.seed)
    values = {}
    for leaf in program.leaves:
        value = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        values[leaf.name] = value.requires_grad_(leaf.requires_grad)
    return values
