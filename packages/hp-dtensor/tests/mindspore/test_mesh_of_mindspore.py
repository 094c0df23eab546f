"""What a mesh hands out is MindSpore's."""

from __future__ import annotations

import mindspore
import pytest

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_testing import device_type, on_ranks


@on_ranks(2)
def test_the_ranks_are_a_tensor():
    mesh = DeviceMesh(device_type(), [[1], [0]], ("a", "b"))
    assert isinstance(mesh.mesh, mindspore.Tensor) and mesh.mesh.dtype == mindspore.int32
    assert mesh.mesh.asnumpy().tolist() == mesh.ranks.tolist() == [[1], [0]]
    assert DeviceMesh(device_type(), mesh.mesh, ("a", "b")) == mesh


@on_ranks(2)
def test_a_mesh_over_the_first_ranks():
    mesh = init_device_mesh(device_type(), (1,), mesh_dim_names=("tp",))
    assert mesh.get_coordinate() == ((0,) if mesh.get_rank() == 0 else None)
    if mesh.get_rank():
        with pytest.raises(RuntimeError, match="rank 1 is not in DeviceMesh"):
            mesh.get_group()
