"""Meshes made of a mesh: slices, flattened axes in slices, split axes, joined slices; what is refused."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_dtensor.mesh.axes import axes_overlap, axis_layouts, ranks_along, split_axis
from hp_platform import get_platform
from hp_testing import device_type, on_ranks


def _abstract(shape, names) -> DeviceMesh:
    """A mesh seen by rank 0, without process groups."""
    return DeviceMesh("cpu", np.arange(int(np.prod(shape))).reshape(shape), names, _init_groups=False)


# ---- axes as terms ----
@pytest.mark.parametrize("shape", [(2, 3, 4), (4,), (1, 5, 1), (2, 2, 2)])
def test_cuts_are_what_numpy_takes(shape) -> None:
    ranks = np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape)
    for count in range(1, len(shape) + 1):
        for axes in itertools.permutations(range(len(shape)), count):
            for place in range(ranks.size):
                at = np.unravel_index(place, shape)
                index = tuple(slice(None) if axis in axes else at[axis] for axis in range(len(shape)))
                kept = sorted(axes)
                want = np.transpose(ranks[index], [kept.index(axis) for axis in axes])
                terms = [axis_layouts(shape)[axis] for axis in axes]
                assert ranks_along(ranks, place, terms).tolist() == want.tolist()
                joined = tuple(term for each in terms for term in each)
                assert ranks_along(ranks, place, [joined]).tolist() == want.reshape(-1).tolist()


def test_axes_that_overlap() -> None:
    (a,), (b,), (c,) = axis_layouts((2, 3, 4))
    assert not axes_overlap([(a,), (c,)]) and not axes_overlap([(c, a), (b,)])
    assert axes_overlap([(a, b), (b,)]) and axes_overlap([(c,), (a, c)])
    six_as_2_3, six_as_3_2 = axis_layouts((2, 3)), axis_layouts((3, 2))
    assert axes_overlap([six_as_2_3[0], six_as_3_2[1]]), "two ways of splitting one term"
    assert not axes_overlap([((1, 5),), ((4, 1),)]), "an axis of one rank lies on nothing"


def test_split_axes() -> None:
    assert split_axis(((12, 1),), (2, 3, 2)) == [((2, 6),), ((3, 2),), ((2, 1),)]
    assert split_axis(((2, 12), (6, 1)), (4, 3)) == [((2, 12), (2, 3)), ((3, 1),)], "across what was joined"
    assert split_axis(((4, 1),), (1, 4, 1)) == [((1, 1),), ((4, 1),), ((1, 1),)]
    assert (
        split_axis(((4, 1),), (3,)) is None
        and split_axis(((4, 1),), (2,)) is None
        and split_axis(((4, 1),), (2, 4)) is None
    )
    assert split_axis(((2, 12), (3, 1)), (3, 2)) is None, "2 and 3 do not come apart as 3 and 2"


# ---- slices ----
def test_slices_keep_the_order_given() -> None:
    mesh = _abstract((2, 3, 4), ("a", "b", "c"))
    for count in (1, 2, 3):
        for names in itertools.permutations("abc", count):
            sub = mesh[names]
            assert sub.mesh_dim_names == names and sub.shape == tuple(mesh.size(name) for name in names)
            assert sub == mesh[list(names)] and hash(sub) == hash(mesh[names]) and sub.root is mesh
            for name in names:
                assert sub[name] == mesh[name] and sub.size(name) == mesh.size(name)
    assert mesh["c", "a"].mesh.tolist() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert mesh["a", "b", "c"] is mesh and mesh[["a", "b", "c"]] is mesh and mesh["c", "a"]["a", "c"] == mesh["a", "c"]


def test_slices_that_are_refused() -> None:
    mesh = _abstract((2, 3, 4), ("a", "b", "c"))
    with pytest.raises(KeyError, match=r"no axis 'b' in a mesh with axes \('c', 'a'\)"):
        mesh["c", "a"]["b"]
    with pytest.raises(KeyError, match=r"no axis 'd' in a mesh with axes \('a', 'b', 'c'\)"):
        mesh["a", "d"]
    with pytest.raises(KeyError, match=r"axis names must not repeat, got \('a', 'b', 'a'\)"):
        mesh["a", "b", "a"]
    with pytest.raises(KeyError, match=r"name at least one axis of \('a', 'b', 'c'\)"):
        mesh[()]
    with pytest.raises(TypeError, match="an axis is named by a string or an index, got 1.5"):
        mesh.size(1.5)  # type: ignore[arg-type]


# ---- flattened axes ----
def test_flattened_axes_that_lie_apart() -> None:
    mesh = _abstract((2, 3, 4), ("a", "b", "c"))
    flat = mesh["a", "c"]._flatten()
    assert flat.mesh_dim_names == ("a_c",) and flat.mesh.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    turned = mesh["c", "a"]._flatten("c_a")
    assert turned.mesh.tolist() == [0, 12, 1, 13, 2, 14, 3, 15]
    assert mesh["a_c"] is flat and mesh.size("a_c") == 8 and mesh.get_local_rank("c_a") == 0
    assert flat.root is mesh and flat["a_c"] is flat


def test_flattened_axes_in_slices() -> None:
    mesh = _abstract((2, 3, 4), ("a", "b", "c"))
    mesh["a", "b"]._flatten("ab")
    both = mesh["ab", "c"]
    assert both.shape == (6, 4) and both.mesh.tolist() == np.arange(24).reshape(6, 4).tolist()
    assert mesh["c", "ab"].mesh.tolist() == np.arange(24).reshape(6, 4).T.tolist()
    assert mesh["b", "a"]["ab"] is mesh["ab"], "of a slice that has the axes"
    every = both._flatten("all")
    assert every.mesh.tolist() == list(range(24)) and mesh["all"] is every and both["c", "ab"].shape == (4, 6)
    for names in (("ab", "a"), ("b", "ab"), ("ab", "all")):
        with pytest.raises(KeyError, match=r"axes .* overlap: no rank may lie on two of them"):
            mesh[names]
    with pytest.raises(KeyError, match=r"no axis 'ab' in a mesh with axes \('a', 'c'\)"):
        mesh["a", "c"]["ab"]
    with pytest.raises(KeyError, match=r"no axis 'abc' in a mesh with axes \('a', 'b', 'c', 'ab', 'all'\)"):
        mesh.size("abc")


def test_names_of_flattened_axes() -> None:
    mesh = _abstract((2, 3), ("a", "b"))
    assert mesh["a"]._flatten() == mesh["a"] and mesh["a"]._flatten("a") == mesh["a"]
    assert not mesh._flattened, "that is no new axis"
    with pytest.raises(ValueError, match=r"_flatten: 'b' is already an axis of the root mesh \('a', 'b'\)"):
        mesh["a"]._flatten("b")
    renamed = mesh["a"]._flatten("data")
    assert renamed.mesh.tolist() == [0, 3] and mesh["data"] is renamed
    assert mesh["a"]._flatten("data") is renamed
    with pytest.raises(ValueError, match=r"'data' is already the name of ranks \[0, 3\], asked for \[0, 1, 2\]"):
        mesh["b"]._flatten("data")
    mesh._flatten("x")
    with pytest.raises(ValueError, match=r"'x' is already the name of ranks .*, asked for \[0, 3, 1, 4, 2, 5\]"):
        mesh["b", "a"]._flatten("x")


@on_ranks(4)
def test_groups_of_flattened_axes() -> None:
    groups = get_platform().groups
    mesh = init_device_mesh(device_type(), (2, 1, 2), ("dp", "pp", "tp"))
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    assert mesh.get_group("dp_tp") is flat.get_group() is mesh["dp", "tp"].get_group("dp_tp")
    assert groups.ranks(flat.get_group()) == [0, 1, 2, 3] and mesh.get_local_rank("dp_tp") == mesh.get_rank()
    both = mesh["pp", "dp_tp"]
    assert both.shape == (1, 4) and both.get_all_groups() == [mesh.get_group("pp"), flat.get_group()]
    turned = mesh["tp", "dp"]._flatten("turned")
    assert turned.mesh.tolist() == [0, 2, 1, 3] and turned.get_group() is flat.get_group(), "one group for one set"
    assert turned.get_local_rank() == [0, 2, 1, 3][mesh.get_rank()] and turned.group_order(0) == (0, 2, 1, 3)
    with pytest.raises(KeyError, match="no axis 'dp_pt' .*; did you mean 'dp_tp'"):
        mesh.get_group("dp_pt")


# ---- split and joined axes ----
@on_ranks(4)
def test_split_axes_of_a_mesh() -> None:
    groups = get_platform().groups
    mesh = init_device_mesh(device_type(), (4, 1), ("dp", "tp"))
    me = mesh.get_rank()
    fine = mesh._unflatten("dp", (2, 2), ("replicate", "shard"))
    assert fine.mesh_dim_names == ("replicate", "shard", "tp") and fine.shape == (2, 2, 1) and fine.root is mesh
    assert fine["shard"].mesh.tolist() == [me // 2 * 2, me // 2 * 2 + 1]
    assert groups.ranks(fine.get_group("replicate")) == [me % 2, me % 2 + 2]
    assert fine.get_group("tp") is mesh.get_group("tp")
    assert fine == mesh._unflatten(0, (2, 2), ("replicate", "shard")) and fine["replicate", "shard"]._flatten(
        "again"
    ).mesh.tolist() == list(range(4))
    sub = mesh["dp"]._unflatten(0, (2, 2), ("x", "y"))
    assert sub.mesh.tolist() == [[0, 1], [2, 3]] and sub["y", "x"].get_local_rank("x") == me // 2
    joined = DeviceMesh._concatenate([sub["y"], mesh["tp"], sub["x"]])
    assert joined.mesh_dim_names == ("y", "tp", "x") and joined.mesh.tolist() == [[[0, 2]], [[1, 3]]]
    assert joined.get_group("x") is sub.get_group("x")
    plain = DeviceMesh(device_type(), [[0, 1, 2, 3]])._unflatten(1, (2, 2))
    assert plain.shape == (1, 2, 2) and plain.mesh_dim_names is None


def test_what_split_and_join_refuse() -> None:
    mesh = _abstract((4, 6), ("a", "b"))
    for sizes in ((2, 3), (4, 2), (2,), (0, 4), (-2, -2), ()):
        with pytest.raises(ValueError, match=r"_unflatten: sizes \(.*\) do not fit axis 'a' of size 4"):
            mesh._unflatten("a", sizes, tuple("xyz"[: len(sizes)]))
    with pytest.raises(ValueError, match=r"_unflatten: 1 mesh_dim_names for 2 mesh_sizes \(2, 2\)"):
        mesh._unflatten("a", (2, 2), ("x",))
    with pytest.raises(ValueError, match="mesh_dim_names None for a mesh with names"):
        mesh._unflatten("a", (2, 2))
    with pytest.raises(ValueError, match=r"mesh_dim_names must be unique, got \('b', 'x', 'b'\)"):
        mesh._unflatten("a", (2, 2), ("b", "x"))
    with pytest.raises(KeyError, match="no axis 'c'"):
        mesh._unflatten("c", (2, 2), ("x", "y"))
    with pytest.raises(IndexError, match="axis 2 of a mesh of 2 axes"):
        mesh._unflatten(2, (2, 2), ("x", "y"))
    with pytest.raises(KeyError, match="overlap"):
        DeviceMesh._concatenate([mesh["a"], mesh._unflatten("a", (2, 2), ("x", "y"))["y"]])
    with pytest.raises(ValueError, match=r"mesh_dim_names must be unique, got \('a', 'a'\)"):
        DeviceMesh._concatenate([mesh["a"], mesh["a"]])
    other = _abstract((2, 12), ("a", "b"))
    for meshes in ([mesh["a"], other["b"]], [], [_abstract((2,), None)]):
        with pytest.raises(ValueError, match="_concatenate: pass sub-meshes with names of one root mesh"):
            DeviceMesh._concatenate(meshes)


# ---- pickled ----
def test_a_pickled_slice_knows_its_root() -> None:
    mesh = _abstract((2, 3, 4), ("a", "b", "c"))
    mesh["a", "b"]._flatten("ab")
    for each in (mesh, mesh["c", "a"], mesh["ab"], mesh["ab", "c"]):
        again = pickle.loads(pickle.dumps(each))
        assert again == each and again.root == mesh and again.root["ab"] == mesh["ab"]
        assert again.root["ab"].root is again.root and again.root["b", "c"] == mesh["b", "c"]
