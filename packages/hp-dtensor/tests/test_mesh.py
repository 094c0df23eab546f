"""DeviceMesh."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from hp_dtensor import DeviceMesh, Shard, distribute_tensor, get_current_mesh, init_device_mesh
from hp_platform import count_collectives, get_platform
from hp_platform.port import port
from hp_testing import device_type, on_ranks


def _abstract(ranks, names=None) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, names, _init_groups=False)


# ---- values, without a process group ----
def test_meshes_are_values() -> None:
    mesh = _abstract([[0, 1], [2, 3]], ("dp", "tp"))
    assert mesh == _abstract(np.arange(4).reshape(2, 2), ["dp", "tp"])
    assert mesh == _abstract(torch.arange(4).reshape(2, 2), ("dp", "tp"))
    assert hash(mesh) == hash(_abstract([[0, 1], [2, 3]], ("dp", "tp")))
    for other in ([[0, 1], [2, 3]], ("dp", "x")), ([[0, 2], [1, 3]], ("dp", "tp")), ([[0, 1], [2, 3]], None):
        assert mesh != _abstract(*other)
    assert mesh != DeviceMesh("cuda", [[0, 1], [2, 3]], ("dp", "tp"), _init_groups=False) and mesh != "mesh"
    assert eval(repr(mesh), {"DeviceMesh": _eval}) == mesh, "the repr is the constructor"
    assert pickle.loads(pickle.dumps(mesh)) == mesh and copy.deepcopy(mesh) is mesh


def _eval(device_type: str, mesh: list, mesh_dim_names=None) -> DeviceMesh:
    return DeviceMesh(device_type, mesh, mesh_dim_names, _init_groups=False)


def test_sizes() -> None:
    mesh = _abstract(np.arange(24).reshape(2, 3, 4), ("a", "b", "c"))
    assert mesh.ndim == 3 and mesh.shape == (2, 3, 4) and mesh.size() == 24
    assert mesh.size(1) == mesh.size("b") == mesh.get_device_num_along_axis("b") == 3 and mesh.size(-1) == 4
    assert mesh.ranks.shape == (2, 3, 4) and mesh.mesh_dim_names == ("a", "b", "c") and mesh.device_type == "cpu"
    assert mesh.get_coordinate() == (0, 0, 0) and mesh.get_local_rank("c") == 0
    assert _abstract(5).shape == (1,)


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [
        ([0, 1, 1], None, r"ranks must be unique, \[1\] appear more than once in \[0, 1, 1\]"),
        ([0, 1], ("a", "b"), r"2 mesh_dim_names \('a', 'b'\) for a mesh of 1 axes \(2,\)"),
        ([[0], [1]], ("a", "a"), r"mesh_dim_names must be unique, got \('a', 'a'\)"),
    ],
)
def test_meshes_that_do_not_fit(ranks, names, message) -> None:
    with pytest.raises(ValueError, match=message):
        _abstract(ranks, names)


def test_axes_that_are_not_there() -> None:
    mesh = _abstract([[0, 1], [2, 3]], ("dp_shard", "tp"))
    with pytest.raises(
        KeyError, match=r"no axis 'dp_shrad' in a mesh with axes \('dp_shard', 'tp'\); did you mean 'dp_shard'\?"
    ):
        mesh.size("dp_shrad")
    with pytest.raises(IndexError, match=r"axis 2 of a mesh of 2 axes \(2, 2\)"):
        mesh.size(2)
    with pytest.raises(KeyError, match="no axis 'x'"):
        mesh["x"]
    with pytest.raises(KeyError, match=r"axis names must not repeat, got \('tp', 'tp'\)"):
        mesh["tp", "tp"]
    with pytest.raises(RuntimeError, match="this mesh has no mesh_dim_names"):
        _abstract([0, 1])["tp"]
    with pytest.raises(RuntimeError, match=r"get_local_rank: pass an axis; the mesh has 2: \('dp_shard', 'tp'\)"):
        mesh.get_local_rank()
    with pytest.raises(RuntimeError, match=r"get_group: pass an axis; the mesh has 2"):
        mesh.get_group()


def test_no_mesh_is_active() -> None:
    with pytest.raises(RuntimeError, match="no mesh is active: pass device_mesh, or call inside `with mesh:`"):
        get_current_mesh()
    with pytest.raises(RuntimeError, match="no mesh is active"):
        distribute_tensor(torch.ones(2))
    with _abstract([0, 1]) as mesh:
        assert get_current_mesh() is mesh


def test_the_innermost_mesh_is_active() -> None:
    a, b = _abstract([0, 1]), _abstract([0, 1, 2])
    with a as entered:
        assert entered is a and get_current_mesh() is a
        with b, pytest.raises(ZeroDivisionError), a:
            assert get_current_mesh() is a
            raise ZeroDivisionError
        with b:
            assert get_current_mesh() is b
        assert get_current_mesh() is a


# ---- with one ----
@on_ranks(1, 4)
def test_all_ranks_in_order(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("x",))
    me = get_platform().groups.rank()
    assert mesh.mesh.tolist() == list(range(ranks)) and mesh.get_rank() == me == mesh.get_local_rank()
    assert init_device_mesh(device_type(), (ranks,), ("x",)) == mesh, "names by position"
    assert mesh.get_coordinate() == (me,) and mesh.root is mesh
    assert get_platform().groups.ranks(mesh.get_group()) == list(range(ranks))
    with pytest.raises(ValueError, match=rf"mesh_shape \(7, 3\) has 21 ranks, but the world has {ranks} ranks"):
        init_device_mesh(device_type(), (7, 3))
    with pytest.raises(ValueError, match=r"device_type 'cpu:0' names one device; pass the kind, 'cpu'"):
        init_device_mesh("cpu:0", (ranks,))
    assert init_device_mesh("cpu", (ranks,)).size() == ranks
    assert mesh.get_local_rank("x") == me and mesh.get_group("x") is mesh.get_all_groups()[0]
    with mesh:
        assert distribute_tensor(torch.ones(2, device=device_type())).device_mesh is mesh
    assert distribute_tensor(torch.ones(2, device=device_type()), mesh).device_mesh is mesh


@on_ranks(4)
def test_slices_by_name() -> None:
    groups = get_platform().groups
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    me = mesh.get_rank()
    tp, dp = mesh["tp"], mesh["dp"]
    assert tp.mesh.tolist() == [me // 2 * 2, me // 2 * 2 + 1] and dp.mesh.tolist() == [me % 2, me % 2 + 2]
    assert tp.mesh_dim_names == ("tp",) and tp.root is mesh and tp.get_local_rank() == me % 2
    assert mesh["dp", "tp"] is mesh and mesh["tp", "dp"].mesh.tolist() == [[0, 2], [1, 3]]
    assert mesh["tp", "dp"].get_local_rank("tp") == me % 2
    assert mesh["tp"] == tp and hash(mesh["tp"]) == hash(tp)
    assert tp.get_group() is mesh.get_group("tp") is mesh.get_group(1)
    assert mesh.get_all_groups() == [mesh.get_group(0), mesh.get_group(1)]
    assert groups.ranks(mesh.get_group("dp")) == [me % 2, me % 2 + 2]


@on_ranks(4)
def test_groups_are_shared_by_rank_set() -> None:
    one = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    other = init_device_mesh(device_type(), (2, 2), ("a", "b"))
    assert one.get_group("tp") is other.get_group("b")
    assert init_device_mesh(device_type(), (1, 4)).get_group(1) is init_device_mesh(device_type(), (4,)).get_group()


@on_ranks(4)
def test_flattened_axes() -> None:
    mesh = init_device_mesh(device_type(), (1, 2, 2), ("pp", "dp", "cp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    assert flat.mesh.tolist() == [0, 1, 2, 3] and flat.mesh_dim_names == ("dp_cp",)
    assert mesh["dp_cp"] is flat and flat.get_local_rank() == mesh.get_rank() and flat.size() == 4
    assert mesh["dp", "cp"]._flatten("dp_cp") is flat, "the same again"
    assert mesh._flatten().mesh_dim_names == ("pp_dp_cp",)
    with pytest.raises(ValueError, match=r"_flatten: 'dp' is already an axis of the root mesh \('pp', 'dp', 'cp'\)"):
        mesh["dp", "cp"]._flatten("dp")
    with pytest.raises(ValueError, match=r"_flatten: 'dp_cp' is already the name of ranks \[0, 1, 2, 3\]"):
        mesh["pp", "dp"]._flatten("dp_cp")
    with pytest.raises(RuntimeError, match="give mesh_dim_name, this mesh has no mesh_dim_names to join"):
        init_device_mesh(device_type(), (2, 2))._flatten()
    assert init_device_mesh(device_type(), (2, 2))._flatten("all").size() == 4
    assert mesh["pp", "dp"]._flatten("another").size() == mesh["pp", "dp"].size()


@on_ranks(4)
def test_from_groups() -> None:
    groups = get_platform().groups
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    one = DeviceMesh.from_group(mesh.get_group("tp"), device_type())
    assert one.mesh.tolist() == mesh["tp"].mesh.tolist() and one.get_group() is mesh.get_group("tp")
    both = DeviceMesh.from_group(mesh.get_all_groups(), device_type(), mesh.mesh, mesh_dim_names=("dp", "tp"))
    assert both == mesh and both["tp"].get_group() is mesh.get_group("tp")
    with pytest.raises(ValueError, match="from_group: 2 groups need mesh="):
        DeviceMesh.from_group(mesh.get_all_groups(), device_type())
    with pytest.raises(ValueError, match="from_group: 1 groups for a mesh of 2 axes"):
        DeviceMesh.from_group([mesh.get_group("tp")], device_type(), mesh.mesh)
    with pytest.raises(ValueError, match=r"from_group: axis 0 has ranks .*, but its group has"):
        DeviceMesh.from_group([mesh.get_group("tp"), mesh.get_group("dp")], device_type(), mesh.mesh)
    assert groups.ranks(one.get_group()) == one.mesh.tolist()


@on_ranks(4)
def test_a_mesh_that_leaves_ranks_out() -> None:
    mesh = DeviceMesh(device_type(), [1, 3], ("x",)) if get_platform().groups.rank() in (1, 3) else None
    if mesh is None:
        mesh = DeviceMesh(device_type(), [1, 3], ("x",))
        assert mesh.get_coordinate() is None
        for call in (mesh.get_group, mesh.get_local_rank):
            with pytest.raises(RuntimeError, match=f"rank {mesh.get_rank()} is not in DeviceMesh"):
                call()
    else:
        assert mesh.get_coordinate() == (mesh.get_rank() // 2,)
        whole = torch.arange(5.0, device=device_type())
        x = distribute_tensor(whole, mesh, [Shard(0)])
        with count_collectives() as counted:
            assert torch.equal(x.full_tensor(), whole)
        assert sum(counted.values()) == 1


@pytest.mark.smoke
@on_ranks(2)
def test_ranks_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] of \[0, 1, 2, 3\] are not in the world of 2 ranks"):
        DeviceMesh(device_type(), [0, 1, 2, 3])


@on_ranks(2)
def test_an_unpickled_mesh_makes_its_groups_when_asked() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and again.get_group() is mesh.get_group()
    x = distribute_tensor(torch.arange(3.0, device=device_type()), again, [Shard(0)])
    assert (x + distribute_tensor(torch.ones(3, device=device_type()), mesh, [Shard(0)])).sum().item() == 6.0


# ---- hosts ----
@pytest.mark.parametrize(
    ("hosts", "levels"),
    [
        ("aaaa", ("host", "host", "host")),
        ("aabb", ("between", "host", "mixed")),
        ("abab", ("host", "between", "mixed")),
        ("abcd", ("between", "between", "between")),
        ("aaab", ("mixed", "mixed", "mixed")),  # not alike on each line
    ],
)
def test_level_of_an_axis(hosts, levels, monkeypatch) -> None:
    monkeypatch.setattr(port().groups, "networks", lambda ranks: [hosts[rank] for rank in ranks])
    mesh = _abstract([[0, 1], [2, 3]], ("dp", "tp"))
    assert (mesh.level("dp"), mesh.level(1), _abstract(range(4)).level(0)) == levels


def test_level_of_flattened_axes_and_single_ranks(monkeypatch) -> None:
    monkeypatch.setattr(port().groups, "networks", lambda ranks: ["aabb"[rank] for rank in ranks])
    mesh = _abstract([[0, 1], [2, 3]], ("dp", "tp"))
    mesh._flatten("all")
    assert mesh.level("all") == "mixed"
    assert _abstract([[0], [2]]).level(1) == "host"
    with pytest.raises(KeyError, match="no axis 'pp'"):
        mesh.level("pp")


def test_level_that_is_not_known(monkeypatch) -> None:
    monkeypatch.setattr(port().groups, "networks", lambda ranks: None)
    with pytest.raises(RuntimeError, match="on which hosts the ranks of .* are is not known"):
        _abstract([0, 1]).level(0)


@on_ranks(2)
def test_ranks_of_this_machine_share_a_host() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    with count_collectives() as counts:
        if get_platform().name == "torch":
            assert mesh.level("dp") == "host"
        else:
            with pytest.raises(RuntimeError, match="MindSpore's ranks don't"):
                mesh.level("dp")
    assert not counts
