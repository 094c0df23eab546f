"""Distributed tensors: mesh, placements, layouts, sharding rules, redistribution, DTensor.

A DTensor has this rank's shard of a tensor and computes what the global tensor would. Names that need a framework are
loaded at first use.
"""

from typing import TYPE_CHECKING

from hp_dtensor.creation.creation import distribute_module, distribute_tensor, empty, full, ones, rand, randn, zeros
from hp_dtensor.creation.sharding_plan import shard_module
from hp_dtensor.debugging.visualize import visualize_sharding
from hp_dtensor.functions import (
    SkipDTensorDispatch,
    custom_shard,
    implicit_replication,
    local_map,
    parallelize_value_and_grad,
)
from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.spec import Layout
from hp_dtensor.mesh.device_mesh import DeviceMesh, get_current_mesh
from hp_dtensor.mesh.meshes import init_device_mesh
from hp_platform.extend import lazy_exports

if TYPE_CHECKING:
    from hp_dtensor.torch.dtensor import DTensor
    from hp_dtensor.torch.functions import DFunction, register_sharding
    from hp_dtensor.torch.modules import init_empty_weights, init_on_device, init_parameters

__all__ = [
    "DFunction",
    "DTensor",
    "DeviceMesh",
    "Layout",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "SkipDTensorDispatch",
    "StridedShard",
    "custom_shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_current_mesh",
    "implicit_replication",
    "init_device_mesh",
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
    "local_map",
    "ones",
    "parallelize_value_and_grad",
    "rand",
    "randn",
    "register_sharding",
    "shard_module",
    "visualize_sharding",
    "zeros",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DFunction": "functions",
        "DTensor": "dtensor",
        "init_empty_weights": "modules",
        "init_on_device": "modules",
        "init_parameters": "modules",
        "register_sharding": "functions",
    },
)
