"""Who holds what, against the parts that ranks really have; the text and the picture of it."""

from __future__ import annotations

import math
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor import Layout, Partial, RaggedShard, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from hp_dtensor.debugging.visualize import visualize_sharding
from hp_dtensor.layout.boxes import who_holds
from hp_dtensor.layout.sharding import take
from hp_testing import as_tensor, device_type, on_ranks

R = Replicate()
GRID = Layout((2, 2), ("dp", "tp"))


@pytest.fixture(autouse=True)
def _without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain table: one text, whatever is installed."""
    monkeypatch.setitem(sys.modules, "rich.box", None)


def _placed(*placements: Any, shape: tuple[int, ...] = (2, 2)) -> Layout:
    names = ("dp", "tp", "ep")[: len(shape)]
    return Layout(shape, names)._placed(tuple(placements), None)


@st.composite
def _cases(draw: Any) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...]]:
    """Placements of every kind, uneven ones and such as leave ranks without elements."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    dim = st.integers(0, len(shape) - 1)
    strided = st.builds(StridedShard, dim, st.integers(1, 3))
    plain = st.one_of(st.builds(Shard, dim), st.builds(Shard, dim), strided, st.just(R), st.just(Partial()))
    placements: list[Any] = [draw(plain) for _ in mesh]
    if draw(st.booleans()):
        axis, first = draw(st.integers(0, len(mesh) - 1)), draw(dim)
        dims = tuple(range(first, draw(st.integers(first, len(shape) - 1)) + 1))
        units = st.lists(st.integers(0, 3), min_size=mesh[axis], max_size=mesh[axis])
        counts = tuple(draw(units))
        owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
        placements[axis] = RaggedShard(
            dims, counts, tuple(draw(st.permutations(owners))) if draw(st.booleans()) else ()
        )
    return shape, tuple(placements), mesh


@settings(deadline=None)
@given(_cases())
def test_boxes_are_what_ranks_have(case: Any) -> None:
    shape, placements, mesh = case
    index = np.arange(math.prod(shape)).reshape(shape)
    try:
        have = [set(take(index, placements, mesh, at).reshape(-1).tolist()) for at in np.ndindex(*mesh)]
    except ValueError:
        with pytest.raises(ValueError):
            who_holds(shape, placements, mesh)
        return
    holders = who_holds(shape, placements, mesh)
    assert [boxes[-1][1] for boxes in holders.boxes if boxes] == [n for n in shape if n]
    assert holders.empty == tuple(place for place, mine in enumerate(have) if not mine)
    seen = []
    for held, box in zip(holders.positions, product(*holders.boxes), strict=True):
        elements = index[tuple(slice(*each) for each in box)].reshape(-1).tolist()
        seen += elements
        for place, mine in enumerate(have):
            assert mine.issuperset(elements) if place in held else mine.isdisjoint(elements)
    assert sorted(seen) == list(range(index.size))
    cells = np.empty([len(boxes) for boxes in holders.boxes], dtype=object)
    cells.reshape(-1)[:] = holders.positions
    for dim in range(len(shape)):  # no more boxes than needed
        lines = [list(line.reshape(-1)) for line in np.moveaxis(cells, dim, 0)[..., None]]
        assert all(one != other for one, other in zip(lines, lines[1:]))


def test_a_tensor_of_a_billion_elements_costs_as_little_as_a_small_one() -> None:
    units = tuple(range(1, 32))  # 496 together, so that pieces end inside rows
    holders = who_holds((2**21, 496), (Shard(0), RaggedShard((0, 1), units)), (1, 31))
    held = dict.fromkeys(range(31), 0)
    for (place,), box in zip(holders.positions, product(*holders.boxes), strict=True):
        held[place] += math.prod(stop - start for start, stop in box)
    assert tuple(n // 2**21 for n in held.values()) == units


def test_two_dims_are_a_table() -> None:
    assert visualize_sharding(GRID("dp", "tp"), shape=(5, 4)).splitlines() == [
        "shape (5, 4) on 4 ranks",
        "dp=2: Shard(0)",
        "tp=2: Shard(1)",
        "dim 0 / dim 1 | 0:2 | 2:4",
        "--------------+-----+----",
        "0:3           | 0   | 1",
        "3:5           | 2   | 3",
    ]


def test_one_dim_is_a_list_and_ranks_without_elements_are_named() -> None:
    layout = Layout((4,), ("tp",), rank_list=(4, 5, 6, 7))
    assert visualize_sharding(layout("tp"), shape=(5,)).splitlines()[2:] == [
        "dim 0 | ranks",
        "------+------",
        "0:2   | 4",
        "2:4   | 5",
        "4:5   | 6",
        "no elements: 7",
    ]
    assert visualize_sharding(layout("tp"), shape=(0,)).splitlines()[2:] == ["the tensor has no elements"]


def test_a_dim_cut_by_the_later_axis_first_comes_in_strides() -> None:
    lines = visualize_sharding(GRID(("tp", "dp")), shape=(8,)).splitlines()
    assert lines[1] == "dp=2: StridedShard(dim=0, split_factor=2)"
    assert [line.split(" | ") for line in lines[5:]] == [
        ["0:2  ", "0"],
        ["2:4  ", "2"],
        ["4:6  ", "1"],
        ["6:8  ", "3"],
    ]


def test_more_dims_are_slices_along_those_that_are_not_shown() -> None:
    cube = Layout((2, 2, 2), ("a", "b", "c"))
    lines = visualize_sharding(cube("a", "None", "b", "c"), shape=(3, 5, 2, 2)).splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[0:2, :, :, :]", "[2:3, :, :, :]"]
    assert lines[-1] == "1:2           | 6   | 7" and lines[5].startswith("dim 2 / dim 3")
    flat = visualize_sharding(cube("a", "None", "b"), shape=(3, 5, 2)).splitlines()  # the dims that are cut
    assert flat[4].startswith("dim 0 / dim 2") and flat[-1] == "2:3           | 4, 5 | 6, 7"


def test_a_ragged_shard_ends_inside_a_row() -> None:
    assert visualize_sharding(_placed(RaggedShard((0, 1), (4, 8)), shape=(2,)), shape=(4, 3)).splitlines()[2:] == [
        "dim 0 / dim 1 | 0:1 | 1:3",
        "--------------+-----+----",
        "0:1           | 0   | 0",
        "1:2           | 0   | 1",
        "2:4           | 1   | 1",
    ]


def test_partial_and_replicated_ranks_are_told_apart() -> None:
    lines = visualize_sharding(_placed(Partial("max"), R), shape=()).splitlines()
    assert lines[1:] == [
        "dp=2: Partial('max'), each rank has a term of the max",
        "tp=2: Replicate(), every rank has the same",
        "ranks",
        "--------------------",
        "max(0, 2), max(1, 3)",
    ]
    assert visualize_sharding(_placed(Partial(), Partial()), shape=(1,)).splitlines()[-1] == "0:1   | sum(0-3)"
    mixed = _placed(Partial("max"), Partial("sum"))
    assert visualize_sharding(mixed, shape=(1,)).splitlines()[-1] == "0:1   | max of sum(0-3)"
    assert visualize_sharding(GRID(), shape=(1,)).splitlines()[-1] == "0:1   | 0-3"


def test_rich_draws_the_table_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("rich", reason="rich prints the table")
    text = visualize_sharding(GRID("dp", "tp"), shape=(5, 4))
    assert "│ 3:5           │ 2   │ 3   │" in text and "\x1b" not in text


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_is_written(tmp_path: Any, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    path = tmp_path / f"sharding.{suffix}"
    cube = Layout((2, 2, 2), ("a", "b", "c"))
    for layout, shape in [(cube("a", "b", "c"), (3, 4, 5)), (GRID("dp"), (3,)), (GRID(), ()), (GRID("dp"), (0,))]:
        text = visualize_sharding(layout, shape=shape, path=path)
        assert text == visualize_sharding(layout, shape=shape)
        assert path.read_bytes().startswith(start)


def test_a_picture_shows_each_box_once(tmp_path: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    path = tmp_path / "sharding.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        visualize_sharding(_placed(RaggedShard((0, 1), (4, 8)), shape=(2,)), shape=(4, 3), path=path)
    texts = [line.split(">")[-2].split("<")[0] for line in path.read_text().splitlines() if "</text>" in line]
    assert texts.count("dim 0") == texts.count("dim 1") == 1
    boxes = [text for text in texts[texts.index("dim 0") + 1 :] if text in ("0", "1")]
    assert sorted(boxes) == ["0", "0", "0", "1", "1", "1"]


def test_what_cannot_be_shown_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="a DTensor or a Layout is needed, got list"):
        visualize_sharding([1])
    with pytest.raises(TypeError, match="has no shape; pass shape=, the tensor's global shape"):
        visualize_sharding(GRID("dp"))
    with pytest.raises(ValueError, match="describes ranks only; call it with the axis of each tensor dim"):
        visualize_sharding(GRID, shape=(4,))
    visualize_sharding(GRID("dp"), shape=(4,))
    with pytest.raises(ValueError, match=r"has 1 dims, but shape \(4, 4\) has 2"):
        visualize_sharding(GRID("dp"), shape=(4, 4))
    with pytest.raises(ValueError, match=r"Shard\(1\): dim 1 is out of range for a tensor of shape \(4,\)"):
        visualize_sharding(_placed(Shard(1), R), shape=(4,))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'hp-dtensor\[plot\]'"):
        visualize_sharding(GRID("dp"), shape=(4,), path=tmp_path / "a.png")


@on_ranks(2)
def test_a_dtensor_says_it_all() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    x = distribute_tensor(as_tensor(np.zeros((3, 2)), "float32"), mesh, [Shard(0)])
    text = visualize_sharding(x)
    assert text == visualize_sharding(Layout((2,), ("tp",))("tp", "None"), shape=(3, 2))
    assert "shape (3, 2) on 2 ranks\ntp=2: Shard(0)\n" in text
    with pytest.raises(TypeError, match=r"shape=\(2, 2\) is for a Layout; the DTensor's is \(3, 2\)"):
        visualize_sharding(x, shape=(2, 2))
