"""`dp_mesh_dims`: the axes of data parallelism of a whole mesh, by name."""

from __future__ import annotations

import pytest
import torch.distributed.fsdp as torchs
from fsdp_models import Net, pair, seeded, train

from hp_dtensor import init_device_mesh
from hp_fsdp import DataParallelMeshDims, FSDPModule, fully_shard, hsdp
from hp_testing import device_type, on_ranks

NAMES = ("replicate", "a", "b", "tp")


@on_ranks(2)
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("dims", [{"shard": ("a", "b")}, {"shard": "a", "replicate": "replicate"}])
def test_training_on_named_axes(shape, dims):
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=NAMES)
    reference, model = pair(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    axes = model._hsdp_group.axes  # type: ignore[union-attr]
    assert (axes.shard_size, axes.replicate_size) == (shape[1], shape[0] if "replicate" in dims else 1)
    assert isinstance(model, FSDPModule)
    if axes.shard_size * axes.replicate_size == 2:
        train(reference, model, steps=2)


@on_ranks(1)
def test_names_that_cannot_be():
    mesh = init_device_mesh(device_type(), (1, 1), mesh_dim_names=("dp", "tp"))
    cases = [
        (
            mesh,
            DataParallelMeshDims(shard="no"),
            ValueError,
            r"dp_mesh_dims names \['no'\], the mesh has \('dp', 'tp'\)",
        ),
        (None, DataParallelMeshDims(shard="dp"), ValueError, "names axes of mesh, got no mesh. Give mesh= with mesh_"),
        (
            mesh,
            DataParallelMeshDims(replicate="dp"),
            NotImplementedError,
            r"no axis to shard over.*hsdp\(module, shard",
        ),
        (mesh, "dp", TypeError, "must be a DataParallelMeshDims, got str"),
    ]
    for each, dims, error, text in cases:
        with pytest.raises(error, match=text):
            fully_shard(seeded(Net), each, dp_mesh_dims=dims)
    fully_shard(seeded(Net), mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    fully_shard(seeded(Net), mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp", shard="tp"))
    hsdp(seeded(Net), shard_size=1)
    with pytest.raises(ValueError, match="name at least one axis"):
        DataParallelMeshDims()
    if hasattr(torchs, "DataParallelMeshDims"):
        fully_shard(seeded(Net), mesh, dp_mesh_dims=torchs.DataParallelMeshDims(shard="dp"))
