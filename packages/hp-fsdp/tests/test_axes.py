"""Which axes are those of data parallelism: refused where nothing tells, before anything is communicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fsdp_models import Net, batch, same_gradients, seeded
from torch import nn

from hp_dtensor import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh, shard_module
from hp_fsdp import HSDPModule, fully_shard, hsdp
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    return init_device_mesh(device_type(), shape, mesh_dim_names=names or None)


def laid_out(mesh: Any, *placements: Any) -> nn.Linear:
    module = nn.Linear(4, 4, bias=False, device=device_type())
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return module


def refused(text: str, call: Any, *args: Any, **options: Any) -> None:
    with count_collectives() as counts, pytest.raises(ValueError, match=text):
        call(*args, **options)
    assert not counts and not isinstance(args[0], HSDPModule)


@on_ranks(2)
def test_a_distributed_model_without_a_mesh_is_refused():
    whole, rows = mesh_of((2, 1), "dp", "tp"), mesh_of((2,), "unsliced")
    first = r"sharded over all 2 ranks, but 1 of its 1 parameters are DTensors already, the first 'weight', placed"
    named = r"those of \('dp', 'tp'\) over which the ranks have different rows, such as fully_shard\(module, mesh\[\"dp"
    refused(rf"{first} \(Replicate\(\), Shard.*{named}", fully_shard, laid_out(whole, R, Shard(0)))
    refused(rf"{first} \(Shard.*{named}", fully_shard, laid_out(whole["tp"], Shard(0)))
    alone = r"Its mesh has no named axis.*mesh_dim_names=\(\"dp\", \"tp\"\).*pass it"
    refused(rf"{first}.*{alone}", fully_shard, laid_out(rows, Shard(0)))
    refused(rf"{first}.*{alone}", fully_shard, laid_out(mesh_of((2, 1)), R, R))
    mixed = nn.Sequential(nn.Linear(4, 4, device=device_type()), laid_out(rows, R))
    refused("1 of its 3 parameters are DTensors already, the first '1.weight'", fully_shard, mixed)
    ignored = mixed[1].weight
    assert isinstance(fully_shard(mixed, ignored_params=[ignored]), HSDPModule)
    assert isinstance(fully_shard(laid_out(whole, R, Shard(0)), whole["dp"]), HSDPModule)


@on_ranks(2)
def test_a_layout_on_the_axis_of_all_ranks_needs_no_mesh():
    reference = seeded(Net)
    model = distribute_module(copy.deepcopy(reference), mesh_of((2,), "dp_shard"))
    assert isinstance(fully_shard(model), HSDPModule)


@on_ranks(4)
def test_a_slice_that_the_mesh_of_data_parallelism_holds_is_refused():
    """Gradients of a part on tp would be each replica's own."""
    mesh = mesh_of((2, 2), "dp", "tp")
    text = r"'weight' is placed \(Shard\(0\),\).*divides it over 2 of 4 ranks.*Pass the other axes alone"
    refused(text, fully_shard, laid_out(mesh["tp"], Shard(0)), mesh)
    assert isinstance(fully_shard(laid_out(mesh["tp"], Shard(0)), mesh["dp"]), HSDPModule)
    assert isinstance(fully_shard(laid_out(mesh, R, Shard(0)), mesh), HSDPModule)


@on_ranks(2)
def test_hsdp_refuses_axes_that_it_cannot_tell():
    """Each mesh has names of its own: equal slices are one value, whatever they were cut from."""
    staged, odd = mesh_of((1, 2, 1), "pp", "dp", "tp1"), mesh_of((2, 1), "rows", "tp2")
    told = r"a slice of a mesh of \('pp', 'dp', 'tp1'\), with \['pp'\], .*fully_shard\(module, mesh\['dp'\]\)"
    refused(rf"hsdp: .*{told}", hsdp, laid_out(staged["tp1"], Shard(0)))
    refused(rf"{told}", hsdp, laid_out(staged, R, R, Shard(0)))
    refused(r"with \['rows'\], and hsdp cannot tell.*mesh\['rows'\]", hsdp, laid_out(odd["tp2"], Shard(0)))
    model = hsdp(laid_out(staged["dp", "tp1"], R, Shard(0)), threshold=0)
    assert model._hsdp_group.axes.mesh == staged["dp"], "the layouts tell"
    model = hsdp(laid_out(odd, R, Shard(0)), threshold=0)
    assert model._hsdp_group.axes.mesh == odd["rows"], "on the whole mesh the layouts tell"
    model = hsdp(laid_out(mesh_of((2, 1), "dp_shard_cp", "tp3")["tp3"], Shard(0)), threshold=0)
    assert model._hsdp_group.axes.mesh.mesh_dim_names == ("dp_shard_cp",)


@on_ranks(2)
def test_hsdp_trains_on_the_axes_that_layouts_on_a_slice_tell():
    staged = mesh_of((1, 2, 1), "pp", "dp", "tp4")
    reference = seeded(Net)
    rows = (staged["dp", "tp4"], [Shard(0), R])
    model = shard_module(copy.deepcopy(reference), {"forward": {"input": rows, "output": rows}})
    for block in model.blocks:
        hsdp(block, threshold=0)
    hsdp(model, threshold=0)
    assert model.first.weight.to_local().numel() < reference.first.weight.numel()
    whole, own = batch()
    for net, x in ((reference, whole), (model, own)):
        net(x).pow(2).mean().backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_a_rank_that_the_mesh_leaves_out():
    mesh, module = mesh_of((1,), "first"), nn.Linear(4, 4, device=device_type())
    if mesh.get_coordinate() is None:
        refused("rank 1 is not in DeviceMesh.*on the ranks of the mesh alone", fully_shard, module, mesh)
    else:
        assert isinstance(fully_shard(module, mesh), HSDPModule)
