"""Random pairs of layouts: a state is saved on some ranks in one, and loaded on others in the other, bit for bit.

A pair follows from its number, so any process of any framework makes the same one. Its axes are pp, dp and tp or ep:
the stages of a pipeline have different tensors, and the ranks of a stage shard theirs over the other two in any way.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_layouts import choose_placements, choose_shape

from hp_checkpoint import load
from hp_checkpoint.disk.manifest import Manifest
from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.layout.tensors import read_bytes
from hp_checkpoint.saving.saving import save_state
from hp_dtensor import Placement, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_tensor, device_type

WORLDS = (1, 2, 3, 4, 8)
_DTYPES = ("float32", "float32", "bfloat16", "float16", "int64", "bool")
_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",), "sgd": ()}
_AXES = ("pp", "dp", "tp")
_meshes: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True)
class Side:
    """One side of a pair: the ranks on each axis, placements over the last two, and the layout of the files."""

    axes: tuple[int, int, int]
    placements: tuple[tuple[Placement, ...], ...]
    layout: Any = "files"

    @property
    def ranks(self) -> int:
        return math.prod(self.axes)


@dataclass(frozen=True)
class Pair:
    """A state, and the two layouts of it."""

    number: int
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    optimizer: str
    sides: tuple[Side, Side]
    block_bytes: int
    verify: Any


def pair(number: int, worlds: Sequence[int] = WORLDS) -> Pair:
    """Make a pair; five numbers in sequence are saved on each of five worlds, and 25 are loaded on each, too."""
    choice = random.Random(number)
    count = len(worlds)
    kinds = tuple((choice.choice(_DTYPES), choose_shape(choice.choice)) for _ in range(3))
    sides = tuple(_side(choice, world, kinds) for world in (worlds[number % count], worlds[number // count % count]))
    block_bytes, verify = choice.choice([64, 1024, 1 << 20]), choice.choice(["read", "all"])
    optimizer = choice.choice(list(_STATES))
    first, second = (replace(side, layout=choice.choice(["files", "shards"])) for side in sides)
    return Pair(number, kinds, optimizer, (first, second), block_bytes, verify)


def save_pairs(pairs: Sequence[Pair], folder: str, side: int = 0) -> None:
    """Save states in the layouts of one side, from all ranks of its world."""
    for each in pairs:
        _save(each, _state(each, side), Path(folder) / str(each.number), each.sides[side].layout)


def load_pairs(pairs: Sequence[Pair], folder: str, again: str, side: int = 1) -> None:
    """Load states in the layouts of one side, compare their bits, and save them from there: each in its own.

    Of shared files the bytes are the same.
    """
    for each in pairs:
        new, truth = _state(each, side, empty=True), _state(each, side)
        load(new, checkpoint_id=Path(folder) / str(each.number), verify=each.verify)
        found, expected = flatten(new).tensors, flatten(truth).tensors
        for address, value in expected.items():
            assert read_bytes(found[address]).tobytes() == read_bytes(value).tobytes(), (each, address)
        assert new["step"] == each.number, each
        _save(each, new, Path(again) / str(each.number), each.sides[side].layout)
        if get_platform().groups.rank() == 0 and {own.layout for own in each.sides} == {"files"}:
            assert contents(Path(again) / str(each.number)) == contents(Path(folder) / str(each.number)), each


def _save(each: Pair, state: dict[str, Any], folder: Path, layout: Any) -> None:
    save_state(flatten(state), folder, Ranks(), block_bytes=each.block_bytes, layout=layout)
    if get_platform().groups.rank() == 0:
        _check_files(each, folder, layout)


def contents(folder: Path) -> dict[str, Any]:
    """Return the sums of a checkpoint's tensors, and its values, whose order is that of the stages."""
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    return {**sums, "state.json": json.loads((folder / "state.json").read_bytes())}


def _side(choice: random.Random, world: int, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> Side:
    stages = choice.choice([n for n in (1, 1, 2, 3, 4) if world % n == 0])
    first = choice.choice([n for n in (1, 2, 3, 4, 8) if world // stages % n == 0])
    axes = (stages, first, world // stages // first)
    return Side(axes, tuple(choose_placements(choice.choice, shape, axes[1:]) for _, shape in kinds))


def _state(each: Pair, side: int, *, empty: bool = False) -> dict[str, Any]:
    """Return this rank's part of a state: the tensors of its stage."""
    own = each.sides[side]
    if own.axes not in _meshes:
        _meshes[own.axes] = init_device_mesh(device_type(), own.axes, mesh_dim_names=_AXES)
    mesh = _meshes[own.axes]
    stage, inner = mesh.get_local_rank("pp"), mesh["dp", "tp"]
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": None if empty else each.number}
    for at, placements in enumerate(own.placements):
        if at % own.axes[0] == stage:
            name = f"layers.{at}.weight"

            def value(key: str, at: int = at, placements: Any = placements) -> Any:
                array = np.zeros_like(_array(each, at, key)) if empty else _array(each, at, key)
                return distribute_tensor(as_tensor(array, each.kinds[at][0]), inner, placements)

            state["model"][name] = value("weight")
            states = {key: value(key) for key in _STATES[each.optimizer]}
            if each.optimizer == "adamw":
                states["step"] = as_tensor(np.float32(0 if empty else each.number))
            state["optimizer"][name] = states
    return state


def _array(each: Pair, at: int, key: str) -> np.ndarray:
    """Return a tensor's values, exact in its dtype; bfloat16's as float32."""
    dtype, shape = each.kinds[at]
    values = np.random.default_rng([each.number, at, *key.encode()])
    if dtype in ("int64", "bool"):
        return values.integers(0, 2 if dtype == "bool" else 2**60, shape).astype(dtype)
    array = values.standard_normal(shape).astype("float16" if dtype == "float16" else "float32")
    return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if dtype == "bfloat16" else array


def _check_files(each: Pair, folder: Path, layout: str) -> None:
    """Compare the files with the arrays, without any of the package's reading: each element is in them once."""
    expected: dict[str, np.ndarray] = {}
    for at, (dtype, _) in enumerate(each.kinds):
        name = f"layers.{at}.weight"
        places = {"weight": f"model: {name}"} | {k: f"optimizer: {name}.{k}" for k in _STATES[each.optimizer]}
        for key, place in places.items():
            array = _array(each, at, key)
            expected[place] = (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else array
        if each.optimizer == "adamw":
            expected[f"optimizer: {name}.step"] = np.float32(each.number).reshape(())
    found = {name: np.zeros(array.shape, np.int64) for name, array in expected.items()}
    complete = set()
    for path in folder.glob("*.safetensors"):
        part, _, rank = path.stem.partition("-rank-")
        assert bool(rank) == (layout == "shards"), path
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__")
        for key, described in header.items():
            name, _, box = key.partition("[")
            place = f"{part}: {name}"
            slices = tuple(slice(*map(int, each.split(":"))) for each in box[:-1].split(",")) if box else ()
            begin, end = described["data_offsets"]
            values = expected[place][slices]
            assert list(values.shape) == described["shape"], (each, key)
            assert values.tobytes() == data[start + begin : start + end], (each, key)
            found[place][slices] += 1
            complete.add(place)
    assert all((counts == 1).all() for counts in found.values()), each
    assert complete == {name for name, array in expected.items() if layout == "files" or array.size}, each
    Manifest.from_bytes((folder / "manifest.json").read_bytes(), str(folder))
