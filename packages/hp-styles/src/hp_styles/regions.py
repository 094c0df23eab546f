"""Styles of modules that compute on plain local tensors: experts with sharded weights, and parts that are replicated.

Note [Plain regions]
Inside such a module no operation is intercepted, so its code may do whatever torch can: loops over experts, kernels
that are not operations of a DTensor, writes through views. That is right where the layout of its result is known from
its inputs alone. A part whose parameters and inputs are the same on every rank computes the same everywhere, and so
does its backward. Experts whose inner features are sharded compute one term of a sum, and so do experts that are whole
and on one rank each: the inputs' gradients are terms of a sum as well.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh
from hp_styles import port
from hp_styles.base import ParallelStyle, claim


class PlainRegion(ParallelStyle):
    """A module that runs on full plain tensors, the same on every rank; its parameters are replicated.

    For parts that hold what no style shards, such as state spaces and short convolutions. See Note [Plain regions].
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        f.replicate(module, device_mesh, self.src_data_rank)
        claim(module, self)
        f.run_replicated(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "PlainRegion()"


class PointwiseRegion(ParallelStyle):
    """An elementwise module without parameters, which runs on this rank's part of its input.

    For activations that are an autograd function of their own. See Note [Plain regions].
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().run_pointwise(module)
        return module

    def __repr__(self) -> str:
        return "PointwiseRegion()"


class ExpertsParallel(ParallelStyle):
    """Experts that run on this rank's part of their weights, with results summed over the ranks.

    The module is called with the tokens ``[n, hidden]``, and the experts chosen for each and their weights
    ``[n, k]``. Its parameters are sharded by styles of their own, which name them: all inner features over the ranks,
    (``packed_colwise`` on ``gate_up_proj``, ``rowwise`` on ``down_proj``), or whole experts (``grouped_gemm``). A
    parameter called ``down_proj_bias``, which is added once to each expert's result, counts on one rank only.

    Raises:
        ValueError: experts that the ranks don't divide; inputs that are not tensors; a module that draws dropout.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().run_experts(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "ExpertsParallel()"


def runs_on_parts(module: Any) -> bool:
    """Return True if a module computes on local parts without a layout inside, as with ``ExpertsParallel``."""
    return getattr(module, "_parallel_style", None) == repr(ExpertsParallel())


class IdentityExpert(ParallelStyle):
    """An expert that returns its input, inside ``ExpertsParallel``: each rank's is one of equal terms of the sum."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().divide_inside(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "IdentityExpert()"
