"""Styles that names alone make: regions that run on plain tensors, packed matrices, experts.

Note [Plain regions]
Inside such a module no operation is intercepted, so its code may do whatever torch can: loops over experts, kernels
that are not operations of a DTensor, writes through views. That is right where the layout of its result is known from
its inputs alone. A part whose parameters and inputs are the same on every rank computes the same everywhere, and so
does its backward. Experts whose inner features are sharded compute one term of a sum, and so do experts that are whole
and on one rank each: the inputs' gradients are terms of a sum as well.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard, StridedShard
from hp_styles import port
from hp_styles.base import ParallelStyle, claim
from hp_styles.inputs import on_input, on_output
from hp_styles.tensor.styles import PrepareModuleOutput, SequenceParallel


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


class PackedColwiseParallel(ParallelStyle):
    """Column parallelism of a Linear that packs several matrices (gate and up): each rank has a shard of each.

    On a parameter ``[..., out, in]``, such as experts' ``gate_up_proj``, it shards the dim before the last.

    Args:
        count: number of matrices; default 2.

    Raises:
        NotImplementedError: applied to a module that is not Linear.
    """

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        if f.kind(module) != "linear":
            raise NotImplementedError(
                f"PackedColwiseParallel shards Linear modules, got {f.described(module)}; name the Linear module, or"
                " the parameter, as in 'mlp.experts.gate_up_proj'"
            )
        cut = (StridedShard(0, self.count),)
        f.partition(module, device_mesh, {"weight": cut, "bias": cut}, self.src_data_rank)
        claim(module, self)
        on_input(module, device_mesh, Replicate(), Replicate())
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return StridedShard(max(ndim - 2, 0), self.count)

    def __repr__(self) -> str:
        return f"PackedColwiseParallel(count={self.count})"


class PackedRowwiseParallel(ParallelStyle):
    """Sharding of a parameter ``[..., in, out]`` that packs several matrices: each rank has a shard of each.

    Args:
        count: number of matrices; default 2.

    Raises:
        NotImplementedError: applied to a module.
    """

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        raise NotImplementedError(
            f"PackedRowwiseParallel is for a parameter, got {port.modules().described(module)}; name the parameter, as"
            " in 'mlp.experts.gate_up_proj'"
        )

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Replicate() if name == "bias" else StridedShard(ndim - 1, self.count)

    def __repr__(self) -> str:
        return f"PackedRowwiseParallel(count={self.count})"


class WholeExperts(ParallelStyle):
    """Sharding of a parameter ``[experts, ...]`` by expert, for a module with ``ExpertsParallel``.

    Raises:
        NotImplementedError: applied to a module.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        raise NotImplementedError(
            f"WholeExperts is for a parameter, got {port.modules().described(module)}; name the parameter, as"
            " in 'mlp.experts.gate_up_proj'"
        )

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Shard(0)

    def __repr__(self) -> str:
        return "WholeExperts()"


class Reduced(ParallelStyle):
    """Replication of a module's output: summed if it is partial, gathered if it is sharded."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        on_output(module, device_mesh, Replicate(), False)
        return module


class Untouched(ParallelStyle):
    """A style that does nothing: the module computes with its parameters as other styles shard them."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return module


class Replicated(ParallelStyle):
    """The parameters that the module itself holds are replicated, and a batch norm's statistics."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        port.modules().replicate_statistics(module, device_mesh, self.src_data_rank)
        port.modules().partition(module, device_mesh, {}, self.src_data_rank)
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Replicate()


class GatheredSequence(SequenceParallel):
    """SequenceParallel whose output is gathered: once for all modules that read it."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super().apply(module, device_mesh)
        gather = PrepareModuleOutput(
            output_layouts=self.sequence_sharding, desired_output_layouts=Replicate(), use_local_output=False
        )
        return gather.apply(module, device_mesh)
