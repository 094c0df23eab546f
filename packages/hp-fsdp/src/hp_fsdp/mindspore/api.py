"""fully_shard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from mindspore import Parameter, nn

from hp_dtensor import DeviceMesh
from hp_fsdp.axes import DataAxes
from hp_fsdp.mesh_dims import all_ranks
from hp_fsdp.mindspore.group import ParameterGroup
from hp_fsdp.mindspore.module import group_of, shard_class
from hp_fsdp.mindspore.optimizers import watch_optimizers
from hp_fsdp.mindspore.parameter import find_parameters
from hp_fsdp.mindspore.rewriting import refuse_rewriting
from hp_fsdp.optimizers import ignore
from hp_fsdp.options import GroupOptions, check_options
from hp_fsdp.policies import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["check_module", "fully_shard", "has_construct", "shard"]

M = TypeVar("M", bound=nn.Cell)


def fully_shard(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    comm_fusion: bool = True,
    comm_fusion_zero_copy: bool | None = None,
    shard_placement_fn: Callable[..., Any] | None = None,
    ignored_params: Collection[Parameter] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    deterministic: bool = False,
) -> M:
    """Shards a Cell's parameters, gradients and optimizer states over the ranks of data parallelism.

    The parameters that no sharded Cell inside has become one group: gathered together before the Cell's forward and
    backward, freed after them, their gradients reduced together. So call it on the blocks of a model first, and on the
    model last. Gradients are the mean over the ranks: those of a single process with the whole batch, where the loss is
    a mean and each rank has an equal share of the batch.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh)
        >>> fully_shard(model, mesh)
        >>> parameters = model.trainable_params()
        >>> step = parallelize_value_and_grad(lambda x: loss_of(model(x)), None, parameters)
        >>> with SkipDTensorDispatch():
        ...     optimizer = mindspore.experimental.optim.AdamW(parameters)
        >>> loss, gradients = step(x)
        >>> with SkipDTensorDispatch():
        ...     optimizer(gradients)

    Args:
        module: changed in place: its parameters, the same objects as before, become DTensors with a `RaggedShard`
            placement, its class becomes a subclass of its own and of `HSDPModule`.
        mesh: one axis to shard over, or two: replicate over the first, shard over the second (HSDP). Parameters that
            are DTensors on other axes of the same root mesh (tensor parallel) stay so. Those whose own layout is on
            these axes, too (``shard_module`` on the whole mesh), compute as that layout says, with DTensors on that
            mesh, and the loss and its gradients are the whole batch's. Default: all ranks, where no parameter is a
            DTensor on another mesh.
        reshard_after_forward: free the gathered parameters after forward and gather them again for backward. Default
            True, which spares the outermost Cell, whose backward follows at once. A number: groups of that many
            consecutive ranks of the shard axis, which it must divide, keep shards of what was gathered between forward
            and backward, and gather among themselves; 1 is False, the size of the axis is True.
        mixed_precision: dtypes of computation and communication. Default: the parameters' own.
        offload_policy: ``CPUOffloadPolicy()`` keeps sharded parameters and gradients on the host, so optimizer states,
            too; on CPU they are there anyway. Default: nothing is offloaded.
        comm_fusion: communicate by group. False: each parameter by itself.
        comm_fusion_zero_copy: None or False: shards are put together before a gather. True is PyTorch's.
        shard_placement_fn: gives a parameter's placement: ``Shard(0)`` cuts it between rows only, None anywhere.
        ignored_params: parameters to leave as they are.
        mp_policy: torch's name for ``mixed_precision``.
        deterministic: the same bits for any number of ranks that share the micro-batches of a step. A rank keeps the
            unsharded gradients of its micro-batches until the last one of a step.

    Returns:
        ``module``.

    Raises:
        ValueError: arguments that contradict each other, a mesh of more than two axes, a Cell that is sharded
            already, a parameter that another group has, a ``reshard_after_forward`` that does not divide the axis.
        TypeError: something that is not a Cell, a mesh or a policy; a placement that is no ``Shard``.
        NotImplementedError: a ``Shard`` of another dim than 0, ``comm_fusion_zero_copy=True``, or BatchNorm's running
            statistics.
    """
    check_module(module)
    options = check_options(
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        comm_fusion=comm_fusion,
        comm_fusion_zero_copy=comm_fusion_zero_copy,
        shard_placement_fn=shard_placement_fn,
        deterministic=deterministic,
        zero_copy=False,
    )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: mesh must be an hp_dtensor.DeviceMesh, got {type(mesh).__name__}")
    return shard(module, mesh, options, ignored_params or ())


def shard(module: M, mesh: DeviceMesh | None, options: GroupOptions, ignored_params: Collection[Parameter] = ()) -> M:
    """What `fully_shard` does with arguments that were checked.

    Args:
        module: changed in place.
        mesh: of one axis or two; None for all ranks.
        options: how the group communicates.
        ignored_params: parameters to leave as they are.
    """
    _check_statistics(module, {id(parameter) for parameter in ignored_params})
    ignored = list(ignored_params or ())
    found = find_parameters(module, ignored, lambda cell: group_of(cell) is not None)
    axes = DataAxes.of(all_ranks(found) if mesh is None else mesh)
    parameters = [parameter for parameter in found if not axes.divided(parameter.name, parameter.inner)]
    ignored += [parameter.parameter for parameter in found if axes.divided(parameter.name, parameter.inner)]
    watch_optimizers()
    refuse_rewriting()
    for parameter in ignored:
        ignore(parameter)
    group = ParameterGroup(module, parameters, axes, options, ignored)
    shard_class(module, group)
    return module


def _check_statistics(module: nn.Cell, ignored: Collection[int]) -> None:
    """Refuses BatchNorm's running statistics: Parameters, whose shards would not get what a forward writes."""
    for name, cell in module.cells_and_names():
        for key in ("moving_mean", "moving_variance", "running_mean", "running_var"):
            parameter = cell._params.get(key)
            if parameter is not None and id(parameter) not in ignored:
                raise NotImplementedError(
                    f"fully_shard: {name or 'the Cell'} is a {type(cell).__name__}, whose {key} is written in forward"
                    " and so can't be sharded: pass its running statistics in ignored_params, or take another norm"
                )


def has_construct(cell: nn.Cell) -> bool:
    """Whether a Cell computes something of its own, which a plain ``CellList`` does not."""
    inherited = (nn.CellList.construct, nn.CellDict.construct)
    return not (isinstance(cell, (nn.CellList, nn.CellDict)) and type(cell).construct in inherited)


def check_module(module: Any) -> None:
    """Raises for what `fully_shard` cannot be called on."""
    if not isinstance(module, nn.Cell):
        raise TypeError(f"fully_shard: expected a mindspore.nn.Cell, got {type(module).__name__}")
    name = type(module).__name__
    if not has_construct(module):
        raise ValueError(f"fully_shard: {name} has no construct of its own. Call fully_shard on each of its Cells")
    if group_of(module) is not None:
        raise ValueError(f"fully_shard: this {name} is sharded already")
