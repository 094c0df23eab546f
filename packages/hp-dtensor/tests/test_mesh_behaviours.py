"""What a user may rely on of a DeviceMesh: ranks in any order, what makes it, threads, groups from before."""

from __future__ import annotations

import copy
import pickle
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_current_mesh,
    init_device_mesh,
)
from hp_dtensor.debugging.debug import CommDebugMode
from hp_platform import GroupOptions, get_platform, manual_seed
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def _abstract(ranks, names=None) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, names, _init_groups=False)


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


# ---- what a mesh is made of ----
@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ([], ValueError, r"a mesh needs at least one rank, got \[\] of shape \(0,\)"),
        (np.zeros((2, 0), int), ValueError, r"a mesh needs at least one rank"),
        ([0.0, 1.5], TypeError, r"ranks must be integers, got \[0.0, 1.5\] of float64"),
        (torch.tensor([True, False]), TypeError, "ranks must be integers"),
        ([[0, 1], [1, 2]], ValueError, r"ranks must be unique, \[1\] appear more than once"),
    ],
)
def test_ranks_that_make_no_mesh(ranks, error, message) -> None:
    with pytest.raises(error, match=message):
        _abstract(ranks)


def test_names_that_are_none() -> None:
    for names in ("dp", (0, 1), ("a", None)):
        with pytest.raises(TypeError, match=r"mesh_dim_names must be a sequence of strings, as \('dp', 'tp'\), got"):
            _abstract([[0, 1], [2, 3]], names)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mesh'"):
        DeviceMesh("cpu")  # type: ignore[call-arg]


def test_the_ranks_are_on_the_host_and_stay_as_they_are() -> None:
    given = torch.arange(4).reshape(2, 2)
    mesh = _abstract(given)
    given[0, 0] = 7
    assert isinstance(mesh.mesh, torch.Tensor) and mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert (mesh.mesh.dtype, mesh.mesh.device.type) == (torch.int, "cpu")
    mesh.mesh[0, 0] = 7
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="read-only"):
        mesh.ranks[0, 0] = 7
    with torch.device("meta"):
        assert _abstract([0, 1]).mesh.tolist() == [0, 1]


def test_errors_are_torchs_kind_too() -> None:
    """Each is what torch's DeviceMesh raises there, and what fits."""
    mesh = _abstract([[0, 1], [2, 3]], ("a", "b"))
    for error, call in (
        (RuntimeError, lambda: _abstract([0, 1], ("a", "b"))),
        (RuntimeError, lambda: _abstract([[0, 1]], ("a", "a"))),
        (ValueError, lambda: mesh._unflatten("c", (2,), ("x",))),
        (ValueError, lambda: mesh._unflatten(2, (2,), ("x",))),
        (RuntimeError, lambda: mesh._unflatten("b", (2, 1), ("x",))),
        (RuntimeError, lambda: DeviceMesh._concatenate([mesh["a"], _abstract([4, 5], ("c",))])),
        (RuntimeError, lambda: DeviceMesh._concatenate([mesh["a"], mesh["a", "b"]])),
    ):
        with pytest.raises(error):
            call()


@on_ranks(2)
def test_options_of_the_groups_of_an_axis() -> None:
    long, other = GroupOptions(timeout=timedelta(hours=1)), GroupOptions(timeout=timedelta(hours=2))
    groups = get_platform().groups
    groups.destroy(groups.new_group([groups.rank()]))  # another test's group has no such options
    backend = get_platform().groups.backend()
    mesh = DeviceMesh(
        device_type(), [[1], [0]], ("a", "b"), backend_override={"b": (backend, long), 0: backend.upper()}
    )
    assert DeviceMesh(device_type(), [[1], [0]], ("a", "b"), backend_override=(None, long)).get_all_groups() == (
        mesh.get_all_groups()
    )
    with pytest.raises(ValueError, match=r"pg_options=.*hours|already exists, created with"):
        DeviceMesh(device_type(), [[1], [0]], ("a", "b"), backend_override={"b": other})
    assert init_device_mesh(device_type(), (2,), backend_override={0: backend}).size() == 2
    with pytest.raises(ValueError, match=f"has 'mpi' for axis 'a', but the groups of a mesh use .* '{backend}'"):
        init_device_mesh(device_type(), (2,), ("a",), backend_override={"a": "mpi"})
    for override in ({"c": backend}, {2: backend}, {"a": backend, 0: backend}):
        with pytest.raises(RuntimeError, match=r"indices from 0 to 1 or names of \('a', 'b'\), each axis once, got \["):
            init_device_mesh(device_type(), (2, 1), ("a", "b"), backend_override=override)
    with pytest.raises(ValueError, match="backend_override needs one value for each of 1 axes, got"):
        DeviceMesh(device_type(), [0, 1], backend_override=(None, None))


@on_ranks(4)
def test_a_mesh_over_the_first_ranks() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    rank = mesh.get_rank()
    assert mesh.mesh.tolist() == [0, 1] and mesh.size() == 2
    assert mesh.get_coordinate() == ((rank,) if rank < 2 else None)
    x = distribute_tensor(torch.arange(4.0, device=device_type()), mesh, [Shard(0)])
    assert x.to_local().numel() == (2 if rank < 2 else 0)
    if rank < 2:
        assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
    else:
        with pytest.raises(RuntimeError, match=f"rank {rank} is not in DeviceMesh"):
            mesh.get_group()


@on_ranks(2)
def test_what_init_device_mesh_refuses() -> None:
    for shape in ((-1, -2), (0,), (2, 2), (3,), ()):
        with pytest.raises(
            RuntimeError,
            match=r"mesh_shape \(.*\) has \d ranks, but the world has 2|sizes of mesh_shape must be positive",
        ):
            init_device_mesh(device_type(), shape)
    with pytest.raises(ValueError, match=r"mesh_dim_names must be unique, got \('dp', 'dp'\)"):
        init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "dp"))
    with pytest.raises(ValueError, match=r"2 mesh_dim_names \('dp', 'tp'\) for a mesh of 1 axes \(2,\)"):
        init_device_mesh(device_type(), (2,), mesh_dim_names=["dp", "tp"])
    with pytest.raises(TypeError, match="must be a sequence of strings"):
        init_device_mesh(device_type(), (1, 2), mesh_dim_names="dp")
    for kind in ("cuda:0", "cuda0"):
        with pytest.raises(RuntimeError, match=f"device_type '{kind}' names one device"):
            init_device_mesh(kind, (2,))
    assert init_device_mesh(device_type(), 2).shape == (2,)  # type: ignore[arg-type]


def test_a_mesh_makes_the_default_group_and_chooses_the_device(monkeypatch) -> None:
    platform, calls = get_platform(), []

    class Module:
        used = False

        @staticmethod
        def is_initialized() -> bool:
            return Module.used

    class Devices:
        kind = "cuda"
        device_module = staticmethod(lambda: Module)
        set_device = staticmethod(lambda index: calls.append(f"device {index}"))

    class Groups:
        is_initialized = staticmethod(lambda: "init" in calls)
        init_process_group = staticmethod(lambda: calls.append("init"))
        rank, size = staticmethod(lambda group=None: 1), staticmethod(lambda group=None: 2)
        new_group = staticmethod(lambda ranks, pg_options: tuple(ranks))

    class Platform:
        groups, devices = Groups, Devices

    for module in ("device_mesh", "axes", "meshes"):
        monkeypatch.setattr(f"hp_dtensor.mesh.{module}.get_platform", lambda: Platform)
    monkeypatch.setattr("hp_dtensor.mesh.device_mesh.own_rank", lambda: 1 if "init" in calls else 0)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    early = _abstract([0, 1])
    assert early.get_coordinate() == (0,) and early.get_rank() == 0 and not calls
    mesh = DeviceMesh("cuda", [0, 1])
    assert calls == ["device 1", "init"] and mesh.get_rank() == 1 and mesh.get_local_rank() == 1
    assert early.get_coordinate() == (1,) and early.get_rank() == 1, "a mesh from before finds its place"
    calls.clear()
    Module.used = True
    init_device_mesh("cuda", (2,))
    assert calls == ["init"], "a device that is used already stays"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    Module.used = False
    init_device_mesh("cuda", (2,))
    assert calls == ["init"]
    assert platform is not Platform


# ---- the active mesh ----
def test_threads_have_active_meshes_of_their_own() -> None:
    seen: list = []

    def work() -> None:
        try:
            get_current_mesh()
        except RuntimeError as error:
            seen.append(str(error))
        with _abstract([0, 1, 2]) as mesh:
            seen.append(get_current_mesh() == mesh)

    with _abstract([0, 1]) as mine:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert get_current_mesh() is mine
    assert seen[0].startswith("no mesh is active") and seen[1] is True


def test_copies_and_printing() -> None:
    mesh = _abstract([[3, 1], [2, 0]], ("a", "b"))
    assert repr(mesh) == "DeviceMesh('cpu', [[3, 1], [2, 0]], mesh_dim_names=('a', 'b'))" == str(mesh)
    assert repr(_abstract([1, 0])) == "DeviceMesh('cpu', [1, 0])"
    assert copy.copy(mesh) == mesh and copy.deepcopy([mesh])[0] is mesh and pickle.loads(pickle.dumps(mesh)) == mesh
    assert len({mesh, _abstract([[3, 1], [2, 0]], ("a", "b")), _abstract([[0, 1], [2, 3]], ("a", "b"))}) == 2


# ---- groups that were there before ----
@on_ranks(4)
def test_from_groups_of_every_form() -> None:
    world = torch.distributed.group.WORLD
    one = DeviceMesh.from_group(world, device_type())
    assert one.mesh.tolist() == [0, 1, 2, 3] and one.get_group() is world and one.mesh_dim_names is None
    named = DeviceMesh.from_group(world, device_type(), mesh_dim_names=("x",))
    assert named["x"] is named and named.get_local_rank("x") == named.get_rank()
    for ranks in (torch.arange(4), [0, 1, 2, 3], np.arange(4)):
        assert DeviceMesh.from_group(world, device_type(), ranks) == one
    turned = DeviceMesh.from_group(world, device_type(), [3, 2, 1, 0])
    assert turned.get_local_rank() == 3 - turned.get_rank() and turned.group_order(0) == (3, 2, 1, 0)
    here = one.get_rank() < 2
    message = (
        r"axis 0 has ranks \[0, 1\], but its group has \[0, 1, 2, 3\]" if here else r"rank \d is not in DeviceMesh"
    )
    with pytest.raises(ValueError, match=f"from_group: {message}"):
        DeviceMesh.from_group(world, device_type(), [0, 1])
    with pytest.raises(ValueError, match="at least one process group is needed, got an empty list"):
        DeviceMesh.from_group([], device_type(), [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="mesh_dim_names must be unique"):
        DeviceMesh.from_group([world, world], device_type(), [[0, 1], [2, 3]], mesh_dim_names=("a", "a"))
    x = distribute_tensor(_rand(7), turned, [Shard(0)])
    torch.testing.assert_close(x.full_tensor(), x.redistribute(turned, [R]).to_local())


@on_ranks(4)
def test_a_group_in_another_order_than_the_ranks() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    whole = torch.arange(4.0, device=device_type())
    turned = DeviceMesh(device_type(), [2, 0, 3, 1])
    assert turned.get_group() is mesh.get_group() and turned.group_order(0) == (1, 3, 0, 2)
    gathered = torch.empty(4, device=device_type())
    get_platform().collectives.all_gather(
        gathered, distribute_tensor(whole, turned, [Shard(0)]).to_local(), group=turned.get_group()
    )
    assert gathered.tolist() == [float(place) for place in turned.group_order(0)], "collectives follow the group"
    assert mesh.group_order(0) is None and init_device_mesh(device_type(), (1, 4)).group_order(0) is None


# ---- ranks in any order ----
ORDERS = {2: [[1, 0]], 4: [[2, 0, 3, 1], [[3, 1], [0, 2]]]}


@on_ranks(2, 4)
def test_a_program_on_ranks_in_any_order(ranks: int) -> None:
    manual_seed(3)
    for order in ORDERS[ranks]:
        mesh = DeviceMesh(device_type(), order)
        x, w, b = _rand(5, 6), _rand(7, 6), _rand(7)
        plain = [t.clone().requires_grad_() for t in (x, w, b)]
        want = F.linear(*plain).softmax(-1).square().sum()
        want.backward()
        for placement in (Shard(0), Shard(1), R):
            placed = [distribute_tensor(t, mesh, [placement, R][: mesh.ndim]) for t in (x, w)]
            placed = [t.requires_grad_() for t in (*placed, distribute_tensor(b, mesh, [R, Shard(0)][-mesh.ndim :]))]
            got = F.linear(*placed).softmax(-1).square().sum()
            got.backward()
            torch.testing.assert_close(got.full_tensor(), want)
            for mine, theirs in zip(placed, plain, strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)
        drawn = torch.nn.init.normal_(
            distribute_tensor(torch.zeros(9, device=device_type()), mesh, [Shard(0)] * mesh.ndim)
        )
        assert drawn.to_local().shape == drawn.local_shape
        same = drawn.full_tensor()
        assert torch.equal(distribute_tensor(same, mesh, drawn.placements).to_local(), drawn.to_local())


@on_ranks(4)
def test_whose_values_count_on_ranks_in_any_order() -> None:
    mesh = DeviceMesh(device_type(), [[3, 1], [0, 2]])
    mine = torch.full((4,), float(mesh.get_rank()), device=device_type())
    for source, rank in ((0, 3.0), (1, 2.0)):
        x = distribute_tensor(mine, mesh, [Shard(0), R], src_data_rank=source)
        assert x.full_tensor().unique().tolist() == [rank]
    first = torch.nn.functional.one_hot(torch.tensor(mesh.get_coordinate()[0]), 2).double().to(device_type())
    total = DTensor.from_local(first, mesh, [Partial(), R])
    assert total.full_tensor().tolist() == [1.0, 1.0]
    x = DTensor.from_local(mine, mesh, [Shard(0), Shard(0)])
    assert x.full_tensor()[::4].tolist() == [3.0, 1.0, 0.0, 2.0]


@on_ranks(4)
def test_between_meshes_of_one_shape_and_other_orders() -> None:
    whole = _rand(6, 5)
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]
    meshes = [DeviceMesh(device_type(), order) for order in orders]
    for a in meshes:
        for b in meshes:
            x = distribute_tensor(whole, a, [Shard(0)]).requires_grad_()
            y = x.redistribute(b, [Shard(1)])
            assert y.device_mesh == b and torch.equal(y.to_local(), distribute_tensor(whole, b, [Shard(1)]).to_local())
            (y * distribute_tensor(whole, b, [Shard(1)])).sum().backward()
            assert x.grad.device_mesh == a
            torch.testing.assert_close(x.grad.full_tensor(), whole)
    two = [DeviceMesh(device_type(), [[0, 1], [2, 3]]), DeviceMesh(device_type(), [[3, 1], [2, 0]])]
    moved = distribute_tensor(whole, two[0], [Shard(0), Shard(1)]).redistribute(two[1], [Shard(1), Partial()])
    torch.testing.assert_close(moved.full_tensor(), whole)


@on_ranks(4)
def test_layouts_of_ranks_in_any_order() -> None:
    layout = Layout((2, 2), ("dp", "tp"), rank_list=[1, 0, 3, 2])
    whole = _rand(4, 6)
    x = distribute_tensor(whole, layout("dp", "tp"))
    assert x.device_mesh.mesh.tolist() == [[1, 0], [3, 2]] and x.sharding == layout("dp", "tp")
    assert repr(x.sharding) == "Layout((2, 2), ('dp', 'tp'), rank_list=(1, 0, 3, 2))('dp', 'tp')"
    row, column = x.device_mesh.get_coordinate()
    assert torch.equal(x.to_local(), whole.chunk(2)[row].chunk(2, 1)[column])
    assert torch.equal(x.redistribute(layout("tp", "dp")).full_tensor(), whole)
    straight = Layout((2, 2), ("dp", "tp"))
    assert layout != straight and torch.equal(x.redistribute(straight("dp", "tp")).full_tensor(), whole)
    with pytest.raises(ValueError, match=r"needs 4 different ranks, rank_list has \(1, 1, 3, 2\)"):
        Layout((2, 2), ("dp", "tp"), rank_list=[1, 1, 3, 2])


@on_ranks(4)
def test_communication_is_named_after_axes_in_any_order() -> None:
    mesh = DeviceMesh(device_type(), [[3, 1], [0, 2]], ("up", "down"))
    with CommDebugMode() as comm:
        distribute_tensor(_rand(4, 4), mesh, [Shard(0), R], src_data_rank=None).full_tensor()
    assert len(comm.events) == 1 and "up" in comm.events[0].axis.split("|")


# ---- ranks outside ----
@on_ranks(4)
def test_ranks_outside_a_mesh() -> None:
    mesh = DeviceMesh(device_type(), [[2, 0]], ("a", "b"))
    inside = mesh.get_rank() in (0, 2)
    assert (mesh.get_coordinate() is not None) is inside and mesh.size() == 2
    if inside:
        assert mesh["b"].mesh.tolist() == [2, 0] and mesh.get_all_groups()
        return
    assert mesh.group_order(1) is None
    with pytest.raises(RuntimeError, match="it has no sub-mesh there"):
        mesh["b"]
    with pytest.raises(RuntimeError, match="it has no group there"):
        mesh.get_all_groups()
    x = distribute_tensor(torch.ones(4, device=device_type()), mesh, [R, Shard(0)])
    assert x.to_local().numel() == 0
