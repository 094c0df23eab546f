"""Names that other packages of this repository may import, in addition to the public ones."""

from __future__ import annotations

from hp_dtensor.creation.sharding_plan import matches, matching
from hp_dtensor.debugging.visualize import text_table
from hp_dtensor.layout.boxes import Box, boxes
from hp_dtensor.layout.placements import kind_of
from hp_dtensor.layout.sharding import cut_dim, intervals, local_shape
from hp_dtensor.layout.spec import (
    TensorSpec,
    gather_as,
    gathered_as,
    mark_summed_gradients,
    normalize,
    spec_named,
    sums_gradients,
)
from hp_dtensor.mesh.axes import axes_overlap, axis_within
from hp_dtensor.mesh.meshes import axes_within, check_member, in_one_root, slice_of

__all__ = [
    "Box",
    "TensorSpec",
    "axes_within",
    "boxes",
    "check_member",
    "in_one_root",
    "cut_dim",
    "gather_as",
    "gathered_as",
    "intervals",
    "kind_of",
    "local_shape",
    "matches",
    "matching",
    "mark_summed_gradients",
    "spec_named",
    "sums_gradients",
    "normalize",
    "slice_of",
    "axes_overlap",
    "text_table",
    "axis_within",
]
