"""Layout: the same as a mesh and placements, by tensor dim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hp_dtensor import DTensor, Layout, Partial, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from hp_dtensor.layout.sharding import take
from hp_dtensor.layout.spec import as_placements
from hp_testing import device_type, on_ranks

R = Replicate()
LAYOUT = Layout((2, 4), ("dp", "tp"))


def test_layouts_of_tensors() -> None:
    assert LAYOUT("dp", "tp").placements == (Shard(0), Shard(1))
    assert LAYOUT("tp", "None").placements == (R, Shard(0))
    assert LAYOUT(("dp", "tp"), "None").placements == (Shard(0), Shard(0))
    assert LAYOUT().placements == (R, R) and LAYOUT("None", "None").placements == (R, R)
    assert LAYOUT.placements is None


def test_several_axes_on_one_dim_cut_in_the_order_given() -> None:
    assert LAYOUT(("tp", "dp")).placements == (StridedShard(0, 4), Shard(0))
    whole = np.arange(16)
    for i in range(2):
        for j in range(4):
            first = (i * 4 + j) * 2
            assert take(whole, LAYOUT(("dp", "tp")).placements, (2, 4), (i, j)).tolist() == [first, first + 1]
            first = (j * 2 + i) * 2
            assert take(whole, LAYOUT(("tp", "dp")).placements, (2, 4), (i, j)).tolist() == [first, first + 1]


def test_three_axes_on_one_dim() -> None:
    layout = Layout((2, 3, 2), ("a", "b", "c"))
    for order in (("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a"), ("c", "b", "a"), ("a", "c", "b"), ("b", "a", "c")):
        placements = layout(order).placements
        sizes = [{"a": 2, "b": 3, "c": 2}[name] for name in order]
        for place in np.ndindex(2, 3, 2):
            index = np.ravel_multi_index([dict(zip("abc", place))[name] for name in order], sizes)
            assert take(np.arange(24), placements, (2, 3, 2), place).tolist() == [2 * index, 2 * index + 1], order


def test_layouts_are_values() -> None:
    assert LAYOUT("dp", "tp") == Layout((2, 4), ("dp", "tp"))("dp", "tp") != LAYOUT("tp", "dp")
    assert hash(LAYOUT("dp")) == hash(Layout((2, 4), ("dp", "tp"))("dp"))
    assert LAYOUT != LAYOUT() and LAYOUT != Layout((2, 4), ("dp", "tp"), rank_list=[7, 6, 5, 4, 3, 2, 1, 0])
    for layout in (LAYOUT, LAYOUT("dp", "None"), LAYOUT(("dp", "tp"), "None"), Layout((2,), ("x",), (4, 5))("x")):
        assert eval(repr(layout), {"Layout": Layout}) == layout, "the repr is the constructor"
    assert repr(LAYOUT(("tp", "dp"))).endswith("with (StridedShard(dim=0, split_factor=4), Shard(0))")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 4), ("dp",)), r"Layout: 1 names \('dp',\) for mesh_shape \(2, 4\)"),
        (((2, 4), ("dp", "dp")), r"mesh_dim_names must be unique and not 'None', got \('dp', 'dp'\)"),
        (((2, 4), ("dp", "None")), "mesh_dim_names must be unique and not 'None'"),
        (((2, 2), ("dp", "tp"), [0, 1, 2]), r"mesh_shape \(2, 2\) needs 4 different ranks, rank_list has \(0, 1, 2\)"),
        (((2, 2), ("dp", "tp"), [0, 1, 2, 2]), "needs 4 different ranks"),
    ],
)
def test_ranks_that_do_not_fit(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


def test_axes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"unknown axis 'pp'; the axes are \('dp', 'tp'\) \(or 'None'\)"):
        LAYOUT("pp")
    with pytest.raises(ValueError, match=r"axis 'dp' shards two dims of \('dp', 'dp'\)"):
        LAYOUT("dp", "dp")
    with pytest.raises(ValueError, match="axis 'dp' shards two dims"):
        LAYOUT(("dp", "dp"))


@on_ranks(4)
def test_both_ways_without_loss() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    layout = Layout((2, 2), ("dp", "tp"))
    assert layout("dp", "tp") == (mesh, (Shard(0), Shard(1))) and (mesh, (Shard(0), Shard(1))) == layout("dp", "tp")
    assert layout("dp", "tp") != (mesh, (Shard(1), Shard(0))) and layout("dp") != (mesh["tp"], (Shard(0),))
    for placements in [(Shard(0), R), (R, Partial()), (StridedShard(0, 2), Shard(0)), (Shard(1), Shard(1))]:
        made = Layout.of(mesh, placements, 2)
        assert made.placements == placements and made.device_mesh(device_type()) == mesh
        assert made == (mesh, placements)
    unnamed = init_device_mesh(device_type(), (4,))
    assert Layout.of(unnamed, (R,)).mesh_dim_names == ("axis0",)


@on_ranks(4)
def test_a_layout_stands_for_mesh_and_placements() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    whole = torch.arange(24.0, device=device_type()).reshape(4, 6)
    x = distribute_tensor(whole, layout("dp", "tp"))
    assert x.placements == (Shard(0), Shard(1)) and x.device_mesh.mesh_dim_names == ("dp", "tp")
    assert x.sharding == layout("dp", "tp") and repr(x.sharding) == "Layout((2, 2), ('dp', 'tp'))('dp', 'tp')"
    y = x.redistribute(layout("tp", "None"))
    assert y.placements == (R, Shard(0)) and torch.equal(y.full_tensor(), whole)
    assert y.device_mesh == x.device_mesh
    z = DTensor.from_local(y.to_local(), layout("tp", "None"))
    assert z.shape == (4, 6) and torch.equal(z.full_tensor(), whole)
    with pytest.raises(ValueError, match="redistribute: a Layout has placements already; do not pass both"):
        x.redistribute(layout("dp"), [R, R])
    with pytest.raises(ValueError, match="describes ranks only; call it with the axis of each tensor dim"):
        distribute_tensor(whole, layout)
    with pytest.raises(
        TypeError, match="device_mesh must be a DeviceMesh or a Layout of hp_dtensor, got a builtins.str"
    ):
        as_placements("cpu", None, None, "f")  # type: ignore[arg-type]


def test_a_dim_that_is_no_name():
    with pytest.raises(TypeError, match=r"layout: dim 1 of \('dp', None\) is None; pass the mesh axis .* or 'None' if"):
        Layout((2, 2), ("dp", "tp"))("dp", None)
