"""A grammar of random tensor programs, as lines of Python that one device and DTensors both run.

A program is text: each line is run with ``exec``, once on plain tensors and once on DTensors, so a program that fails
can be read, shortened line by line and pasted into a test. Lines are drawn against the plain values made so far, hence
every program is valid on one device.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from program_draws import (
    RESULTS,
    SIZES,
    STATEMENTS,
    Values,
    moved,
    nested,
    pair,
    placements,
)
from program_names import namespace

LARGEST = 1e4
MAX_NUMEL = 400


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


MAYBE_COPIES = ("move(", "through_full(", ".reshape(", ".contiguous(", ".flatten(", ".ravel(")
"""Whether these give a copy or a view is not defined."""


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
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3))))
        if index >= 3:  # shapes that fit those of earlier leaves
            last = rng.choice(leaves).shape[-1:]
            shape = rng.choice((last, (rng.choice(SIZES), *last), leaves[index % 3].shape))
        leaves.append(Leaf(f"v{index}", shape, placements(rng, len(shape), axes), rng.random() < 0.75))
    program = Program(seed, tuple(leaves), (), (), "none")
    values = inputs(program)
    names = namespace()
    lines: list[str] = []
    # Memory that two values have, or have not, as the layout falls out: not written any more. Kept alive, so that no
    # other value gets its address.
    shared: dict[int, Any] = {}
    kinds = [*RESULTS, (2, lambda rng, values: nested(rng, values, axes))]
    weights = [weight for weight, _ in kinds]
    while len(lines) < steps:
        written = not calm and rng.random() < 0.25
        moves = rng.random() < 0.2
        if written:
            line = rng.choice(STATEMENTS)(rng, values)
        else:
            code = moved(rng, values, axes) if moves else rng.choices([d for _, d in kinds], weights)[0](rng, values)
            name = f"v{len(leaves) + len(lines)}"
            line = None if code is None else f"{name} = {code}"
        if not written and not moves and rng.random() < 0.05:
            code = pair(rng, values)
            line = None if code is None else f"{name}, {name}b = {code}"
        if (
            line is None
            or (written and shared.keys() & _memory(line, values).keys())
            or not _accepts(line, values, names)
        ):
            continue
        lines.append(line)
        if any(name in line for name in MAYBE_COPIES):
            shared.update(_memory(line, values))
    program = replace(program, lines=tuple(lines))
    made = [name for name in values if name not in {leaf.name for leaf in leaves} and values[name].requires_grad]
    roots = tuple(rng.sample(made, min(3, len(made))))
    unseen = any(".data" in line for line in lines)  # autograd's own gradients are those of neither value then
    mode = rng.choice(("backward", "twice", "grad", "double")) if roots and not unseen else "none"
    return replace(program, roots=roots, mode=mode)


def _memory(line: str, values: Values) -> dict[int, Any]:
    """The storages of the values that a line names, by address."""
    storages = (values[name].untyped_storage() for name in _names(line) & values.keys())
    return {storage.data_ptr(): storage for storage in storages}


def _accepts(line: str, values: Values, names: dict[str, Any]) -> bool:
    """Runs a line on the plain values; False where one device refuses it or its values grow out of hand."""
    space = {**names, **values}
    try:
        exec(line, space)
    except Exception:
        return False
    made = {name: space[name] for name in sorted(_targets(line))}  # sets of strings have another order in each process
    for value in made.values():
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype is not torch.float64
            or not 0 < value.numel() <= MAX_NUMEL
        ):
            return False
        if value.dim() > 4 or not math.isfinite(total := value.detach().abs().sum().item()) or total > LARGEST:
            return False
    values.update(made)
    return True


def inputs(program: Program, shaken: int = 0) -> Values:
    """The leaves' plain values: normal numbers in float64, changed by 1e-13 of them where ``shaken`` draws a change."""
    generator = torch.Generator().manual_seed(program.seed)
    values = {}
    for leaf in program.leaves:
        value = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        if shaken:
            change = torch.Generator().manual_seed(1000 * program.seed + shaken)
            value *= 1 + 1e-13 * torch.randn(leaf.shape, generator=change, dtype=torch.float64)
        values[leaf.name] = value.requires_grad_(leaf.requires_grad)
    return values
