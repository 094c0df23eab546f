"""Styles of weights that hold several matrices one after the other, and of parameters that no Linear owns."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard, StridedShard
from hp_styles import port
from hp_styles.base import ParallelStyle, claim
from hp_styles.inputs import on_input, on_output


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
