"""Equal slices of different roots are one value; what is on them is joined by a root that has them all."""

from __future__ import annotations

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_dtensor.extend import in_one_root
from hp_testing import device_type, on_ranks


@on_ranks(2)
def test_meshes_of_two_models_are_joined_by_the_root_of_one():
    alone = init_device_mesh(device_type(), (2,), mesh_dim_names=("roots_tp",))
    another = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("rows", "columns"))["rows"]._flatten("roots_ep")
    root = DeviceMesh(device_type(), [[0], [1]], mesh_dim_names=("roots_tp", "rest"))
    assert in_one_root([another, alone]) is None
    both = root["roots_tp"]._flatten("roots_ep")
    assert both == another
    slices = in_one_root([another, alone])
    assert slices == [another, alone]
    assert all(each.root is root for each in slices)
