"""fully_shard: the function, its checks, and the order of its work.

Note [Layouts on axes of data parallelism]
    A parameter that `shard_module` or `distribute_module` laid out on a mesh with the axes of data parallelism is part
    of one global program: its module computes with DTensors on that mesh, inputs are sharded over ``"dp"`` by their
    layouts, and the loss is that of the global batch. `fully_shard` changes the storage of such a parameter, not the
    computation. If it is replicated over those axes it is sharded into pieces and gathered, and its gradient is the
    program's: a partial sum on each rank, or the full one. Partial sums are multiplied by the number of ranks, so that
    the mean over the ranks that follows is the sum. A parameter that its own layout shards over those axes stays as it
    is: the operations that use it move it, and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import sums_gradients
from hp_fsdp.groups.managed_params import find_parameters, group_of, ignore, is_copy
from hp_fsdp.options import GroupOptions, MixedPrecisionPolicy, OffloadPolicy, check_options
from hp_fsdp.port import Sharding, sharding
from hp_fsdp.ranks.axes import DataAxes, all_ranks, data_axes

M = TypeVar("M")


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
    ignored_params: Collection[Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    deterministic: bool = False,
    dp_mesh_dims: Any = None,
) -> M:
    """Shard a module's parameters, gradients and optimizer states over the ranks of data parallelism.

    Parameters outside of sharded modules inside form one group: gathered together before the module's forward and
    backward, freed after them, their gradients reduced together. So call it on the blocks of a model first, and on the
    model last. Gradients are the mean over the ranks: those of a single process with the global batch, if the loss is a
    mean and each rank has an equal share of the batch.

    Example:
        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh)
        >>> fully_shard(model, mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())       # or before: the parameters are the same objects

        On MindSpore gradients are returned, and an optimizer sees the shards only:

        >>> parameters = model.trainable_params()
        >>> step = parallelize_value_and_grad(lambda x: loss_of(model(x)), None, parameters)
        >>> with SkipDTensorDispatch():
        ...     optimizer = mindspore.experimental.optim.AdamW(parameters)
        >>> loss, gradients = step(x)
        >>> with SkipDTensorDispatch():
        ...     optimizer(gradients)

    Args:
        module: a module, or on PyTorch a list of modules whose parameters form one group: gathered before the first of
            them that is called, freed after the last. Changed in place: parameters become DTensors with a `RaggedShard`
            placement, a module's class becomes a subclass of its own and of `HSDPModule`.
        mesh: one axis to shard over, or two: replicate over the first, shard over the second (HSDP). Parameters that
            are DTensors on other axes of the same root mesh (tensor parallel) stay so. Those whose own layout includes
            these axes (``shard_module`` on the full mesh) compute as that layout says, with DTensors on that mesh, and
            the loss and its gradients are the global batch's: Note [Layouts on axes of data parallelism]. Default: all
            ranks, provided that no parameter is a DTensor on another mesh.
        reshard_after_forward: free the gathered parameters after forward and gather them again for backward. Default
            True, except for the outermost module, whose backward follows at once. A number of ranks that divides the
            shard axis reshards to groups of that many consecutive ranks: they gather again among themselves, and each
            keeps a shard of the parameters in between (1 keeps them gathered).
        mixed_precision: dtypes of computation and communication. Default: the parameters' own.
        offload_policy: ``CPUOffloadPolicy()`` keeps sharded parameters, their gradients and so the optimizer's step and
            states on the host. Default: no offload.
        comm_fusion: communicate by group (the default). False communicates each parameter by itself.
        comm_fusion_zero_copy: leave it out. On PyTorch collectives read and write the parameters' memory (True); on
            MindSpore shards are concatenated before a gather (False).
        shard_placement_fn: called with each parameter. ``Shard(0)`` shards it between rows only, ``Shard(d)`` along
            another dim, with that placement; both are communicated by themselves: Note [Sharded along another dim] of
            PyTorch. None, the default, shards it at any element, with the group.
        ignored_params: parameters to leave as they are.
        mp_policy: torch's name for ``mixed_precision``.
        deterministic: gradients, and norms of `clip_grad_norm_`, are the same bits for any number of ranks that divides
            the micro-batches of a step, consecutive ones on each rank in the mesh's order. A backward pass is a
            micro-batch. Each micro-batch's loss must be computed alike, so give it the weight that it has in the global
            batch: ``loss / micro_batches_of_all_ranks`` with ``set_reduce_op_type("sum")``; the number of threads
            matters as well. Before the last backward pass of a step a rank keeps the unsharded gradients of each of its
            micro-batches; in the last one their sums are exchanged, see `hp_platform.values`.
        dp_mesh_dims: names of the axes of data parallelism, if ``mesh`` has others: a `DataParallelMeshDims`, or
            torch's. Default: all axes of ``mesh``.

    Returns:
        ``module``, or the list of modules: for a type checker of the type that it was, so that its own attributes and
        methods are completed. ``assert isinstance(model, FSDPModule)`` adds the methods of `HSDPModule` to them.

    Raises:
        ValueError: arguments that contradict each other, a mesh of more than two axes, a module that is sharded
            already, a parameter of another group, a size to reshard to that does not divide the shard axis.
        TypeError: another type than a module, a mesh or a policy.
        NotImplementedError: the ``comm_fusion_zero_copy`` that the framework lacks; with ``deterministic`` or on
            MindSpore, a ``Shard`` of another dim than 0; on MindSpore BatchNorm's running statistics.
    """
    port = sharding()
    modules = port.modules_of(module)
    for each in modules:
        check_module(each, port)
    options = check_options(
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        comm_fusion=comm_fusion,
        comm_fusion_zero_copy=comm_fusion_zero_copy,
        shard_placement_fn=shard_placement_fn,
        deterministic=deterministic,
        zero_copy=port.ZERO_COPY,
        any_dim=port.ANY_DIM,
    )
    mesh = data_axes(mesh, dp_mesh_dims)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh must be an hp_dtensor.DeviceMesh, got {type(mesh).__module__}.{type(mesh).__name__}."
            " Make it with hp_dtensor.init_device_mesh(device_type, shape, mesh_dim_names=...)"
        )
    shard(modules, mesh, options, ignored_params or ())
    return module


def check_module(module: Any, port: Sharding) -> None:
    """Raise TypeError or ValueError for an argument that `fully_shard` cannot be called on."""
    cls, name = port.MODULE, type(module).__name__
    if not isinstance(module, cls):
        expected = f"{cls.__module__.partition('.')[0]}.nn.{cls.__name__}"
        raise TypeError(f"fully_shard: expected a {expected}, got {name}")
    if not port.anatomy().computes(module):
        inside = f"{cls.__name__.lower()}s"
        raise ValueError(
            f"fully_shard: {name} has no {port.FORWARD} of its own. Call fully_shard on each of its {inside}"
        )
    if group_of(module) is not None:
        raise ValueError(f"fully_shard: this {name} is sharded already")


def shard(
    modules: Sequence[Any], mesh: DeviceMesh | None, options: GroupOptions, ignored_params: Collection[Any] = ()
) -> None:
    """Shard modules as one group, in place, with checked arguments."""
    port = sharding()
    port.check_contents(modules, ignored_params)
    ignored = list(ignored_params)
    candidates = find_parameters(modules, ignored, port.MANAGED)
    mesh = all_ranks(candidates) if mesh is None else mesh
    axes = DataAxes.of(mesh)
    parameters = []
    for parameter in candidates:
        original = parameter.facts().original
        if is_copy(original) or not axes.divided(parameter.name, parameter.inner):
            parameters.append(parameter)
        else:
            _refuse_experts(parameter, axes.mesh)
            ignored.append(original)
    device = port.device_of(modules, parameters, mesh)
    port.watch_optimizers()
    for parameter in ignored:
        ignore(parameter)
    port.make_group(modules, parameters, axes, device, options, ignored)


def _refuse_experts(parameter: Any, mesh: DeviceMesh) -> None:
    """Refuse experts that are spread over a group's ranks: no group would take the mean of their gradients.

    Raises:
        ValueError: such experts.
    """
    if any(sums_gradients(module) for module, _ in parameter.places):
        raise ValueError(
            f"fully_shard: parameter {parameter.name!r} of experts is spread over ranks of {mesh} as"
            f" {parameter.inner.placements}, and in no group of its own: its gradient would be the sum over the ranks'"
            " losses where all others get the mean. Call fully_shard on the experts first, with the mesh of the other"
            " ranks, which may be an axis of size 1"
        )
