"""What the tests of transfers share: meshes, tensors that count up, and what each rank is to hold."""

from __future__ import annotations

import numpy as np
import torch

from hp_dtensor import DeviceMesh, DTensor
from hp_dtensor.layout.sharding import take
from hp_testing import device_type

__all__ = ["check", "count_up", "mesh_of"]


def mesh_of(ranks, names=None) -> DeviceMesh:
    return DeviceMesh(device_type(), ranks, names)


def count_up(*shape: int, dtype=torch.float64) -> torch.Tensor:
    made = torch.arange(int(np.prod(shape)), device=device_type()).reshape(shape)
    return made % 2 == 0 if dtype is torch.bool else made.to(dtype)


def check(y: DTensor, whole: torch.Tensor, mesh: DeviceMesh, placements) -> None:
    """Each rank of the mesh holds its part, the others nothing."""
    assert type(y) is DTensor and y.device_mesh == mesh and y.placements == tuple(placements) and y.dtype is whole.dtype
    place = mesh.get_coordinate()
    if place is None:
        assert y.to_local().shape == (0,) * whole.dim()
        return
    index = take(np.arange(whole.numel()).reshape(whole.shape), placements, mesh.shape, place)
    expected = whole.reshape(-1)[torch.from_numpy(index.reshape(-1)).to(whole.device)].view(index.shape)
    assert torch.equal(y.to_local(), expected), (placements, place)
