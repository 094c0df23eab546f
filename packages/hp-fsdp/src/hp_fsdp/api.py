"""`fully_shard`, its checks, `hsdp`, the same by ZeRO level, and `modules_by_size`, the modules to call it on.

Note [Layouts on axes of data parallelism]
    A parameter that `shard_module` or `distribute_module` laid out on a mesh with the axes of data parallelism is part
    of one global program: its module computes with DTensors on that mesh, inputs are sharded over ``"dp"`` by their
    layouts, and the loss is that of the global batch. `fully_shard` changes the storage of such a parameter, not the
    computation. If it is replicated over those axes it is sharded into pieces and gathered, and its gradient is the
    program's: a partial sum on each rank, or the full one. Partial sums are multiplied by the number of ranks, so that
    the mean over the ranks that follows is the sum. A parameter that its own layout shards over those axes stays as it
    is: the operations that use it move it, and its gradient.

Note [Axes of hsdp]
    `hsdp` takes no mesh. Plain parameters are sharded over the ranks of the groups inside, or over all ranks if there
    are none. Parameters with a layout on a full mesh (`shard_module`) are sharded over the axes on which all parameters
    of the group are replicated; one that is sharded over these itself stays as it is. For layouts on a slice (styles on
    ``mesh["tp"]``), the axes are the others of the root mesh, if all have names of data parallelism: over another axis
    the ranks may hold other parameters (pipeline) or the same rows, which cannot be known here. A layout on a slice
    that has an axis of such a name (``mesh["dp", "tp"]``) gives the axes like one on the full mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_dtensor.extend import TensorSpec, sums_gradients
from hp_fsdp.axes import DataAxes, all_ranks, data_axes
from hp_fsdp.groups.managed_params import find_parameters, group_of, ignore, is_copy, spec_of
from hp_fsdp.options import GroupOptions, MixedPrecisionPolicy, OffloadPolicy, check_options
from hp_fsdp.port import Anatomy, Sharding, sharding
from hp_platform import get_platform

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


DATA_NAMES = frozenset("dp ddp fsdp hsdp data batch cp context rep replica replicas replicate shard".split())
PIPELINE_NAMES = frozenset("pp pipe pipeline stage stages".split())
LEVELS = ("level1", "level2", "level3")
TINY = 16
"""A group smaller than this fraction (one in ...) of ``max_bytes`` is not worth collectives of its own."""


def hsdp(
    module: M,
    shard_size: int = -1,
    threshold: int = 64,
    optimizer_level: str = "level1",
    enable_grad_accumulation: bool = False,
    grad_scale: float = 1.0,
    reduce_dtype: Any = None,
    comm_async: bool = False,
    comm_fusion: bool = False,
    bucket_size: int = -1,
) -> M:
    """Make one group of a module, as `fully_shard`, by ZeRO level and number of ranks.

    | level | sharded | parameters are gathered |
    | --- | --- | --- |
    | ``"level1"`` | optimizer states | once a step, at the first forward, and stay until the optimizer has stepped |
    | ``"level2"`` | gradients as well | the same |
    | ``"level3"`` | parameters as well | for each forward and for each backward (the outermost module's: once) |

    On MindSpore parameters stay until the step's last backward. Levels 1 and 2 are the same: gradients are
    reduce-scattered in both, with half the traffic of an all-reduce. Only under ``set_requires_gradient_sync(False)``
    do they accumulate unsharded, at any level.

    Example:
        >>> for layer in model.layers:
        ...     hsdp(layer, optimizer_level="level3")
        >>> hsdp(model, optimizer_level="level3")

    Args:
        module: inner modules first, the model last. Its parameters' own layouts give the axes of data parallelism: a
            layout on the full mesh (`shard_module`) those on which all are replicated, a layout on a slice (styles on
            ``mesh["tp"]``) the other axes of the mesh; plain parameters use all ranks.
        shard_size: ranks of a shard group; with fewer than all, groups are replicas of one another. 1 is plain data
            parallelism: parameters stay replicated, and their gradients are averaged. Default -1: all.
        threshold: unsharded size in KiB below which parameters stay replicated. Default 64.
        optimizer_level: see above. Default ``"level1"``.
        enable_grad_accumulation: backward passes add up gradients without communication, until
            ``set_requires_gradient_sync(True)`` asks for the next ones to reduce. Default False: all reduce.
        grad_scale: factor of the reduced gradients. Default 1.
        reduce_dtype: gradients are reduced in this dtype. Default: their own.
        comm_async: backward returns while reductions are under way: `hsdp_sync_stream` waits for them, as do an
            optimizer's step and `clip_grad_norm_`. Default False: backward waits. Not on MindSpore, whose backward
            passes return their gradients.
        comm_fusion: parameters are gathered, and their gradients reduced, together. Default False: one by one.
        bucket_size: with ``comm_fusion``, limit in KiB of parameters communicated together, but one at least; 0 is one
            by one. Default -1: no limit.

    Returns:
        ``module``.

    Raises:
        ValueError: an argument out of its range, a ``shard_size`` that does not divide the number of ranks, or a
            ``bucket_size`` without ``comm_fusion``.
        TypeError: an argument of another type, or not a module.
        NotImplementedError: ``comm_async=True`` on MindSpore.
    """
    port = sharding()
    check_module(module, port)
    if optimizer_level not in LEVELS:
        raise ValueError(f"hsdp: optimizer_level must be one of {', '.join(LEVELS)}, got {optimizer_level!r}")
    _check_sizes(threshold, shard_size, bucket_size)
    _check_switches(enable_grad_accumulation=enable_grad_accumulation, comm_async=comm_async, comm_fusion=comm_fusion)
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, (int, float)) or not 0 < grad_scale < math.inf:
        raise ValueError(f"hsdp: grad_scale must be a finite number above 0, got {grad_scale!r}")
    if reduce_dtype is not None and not isinstance(reduce_dtype, port.DTYPE):
        raise TypeError(f"hsdp: reduce_dtype must be a {port.DTYPE.__name__} or None, got {reduce_dtype!r}")
    if bucket_size > 0 and not comm_fusion:
        raise ValueError(
            f"hsdp: bucket_size={bucket_size} limits how much is communicated together, but comm_fusion=False"
            " communicates each parameter by itself. Use comm_fusion=True, or leave bucket_size out"
        )
    if comm_async and port.BACKWARD_RETURNS_GRADIENTS:
        raise NotImplementedError(
            "hsdp(comm_async=True): on MindSpore each backward pass returns its gradients, so its reductions are over"
            " when it is. Leave comm_async out; to put reductions off use enable_grad_accumulation=True"
        )
    stays = optimizer_level != "level3"
    options = GroupOptions(
        policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        reshard_after_forward=not stays,
        by_parameter=not comm_fusion or bucket_size == 0,
        threshold=math.inf if shard_size == 1 else threshold * 1024,
        bucket_bytes=bucket_size * 1024 if bucket_size > 0 else None,
    )
    shard([module], _mesh(module, port.anatomy(), shard_size), options)
    for group in module._groups(False):  # type: ignore[attr-defined]
        group.reshard_after_backward = not stays
        group.reduces = not enable_grad_accumulation
        group.scale = float(grad_scale)
        group.waits = not comm_async
    return module


def _check_sizes(threshold: Any, shard_size: Any, bucket_size: Any) -> None:
    if not _is_int(threshold) or threshold < 0:
        raise ValueError(f"hsdp: threshold must be a number of KiB, 0 or more, got {threshold!r}")
    if not _is_int(shard_size) or (shard_size < 1 and shard_size != -1):
        raise ValueError(f"hsdp: shard_size must be -1 or a number of ranks, got {shard_size!r}")
    if not _is_int(bucket_size) or bucket_size < -1:
        raise ValueError(f"hsdp: bucket_size must be -1 (no limit) or a number of KiB, got {bucket_size!r}")


def _check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"hsdp: {name} must be True or False, got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mesh(module: Any, anatomy: Anatomy, shard_size: int) -> DeviceMesh:
    """Return the axes over which `hsdp` shards a module's group: see Note [Axes of hsdp].

    Args:
        module: it holds the group's parameters.
        anatomy: the structure of modules.
        shard_size: the argument of `hsdp`; with 1 all ranks are replicas.

    Raises:
        ValueError: a ``shard_size`` that does not divide the ranks, or layouts on several meshes.
    """
    data = _data_axes([spec for each in anatomy.free(module) if (spec := spec_of(each)) is not None])
    if data is None:
        inside = (each for each in anatomy.modules(module) if isinstance(each, anatomy.sharded))
        data = next((_one_axis(group.axes.mesh) for each in inside for group in each._groups(False)), None)
    if data is None:
        groups = get_platform().groups
        if not groups.is_initialized():
            groups.init_process_group()
        data = init_device_mesh(get_platform().devices.kind, (groups.size(),), mesh_dim_names=("hsdp",))
    ranks = data.size()
    size = ranks if shard_size in (-1, 1) else shard_size
    if size > ranks or ranks % size:
        raise ValueError(
            f"hsdp: shard_size must be -1 or divide the {ranks} ranks of data parallelism, got {shard_size}"
        )
    if size == ranks:
        return data
    return data._unflatten(0, (ranks // size, size), ("hsdp_replicate", "hsdp_shard"))


def _data_axes(specs: Sequence[TensorSpec]) -> DeviceMesh | None:
    """Return the axes of data parallelism of parameters with layouts, as one axis; None if no parameter has one."""
    if not specs:
        return None
    root = specs[0].mesh.root
    for spec in specs:
        if spec.mesh.root != root or spec.mesh.mesh_dim_names is None:
            raise ValueError(
                f"hsdp: parameters are on {specs[0].mesh} and on {spec.mesh}; all must be on slices of one mesh with"
                ' names: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
            )
    candidates = [names for spec in specs if (names := _free_axes(spec, root))]
    common = [name for name in candidates[0] if all(name in each for each in candidates)] if candidates else []
    names = tuple(common or (candidates[0] if candidates else (root.mesh_dim_names or ())[:1]))
    stages = [name for name in names if _named(name, PIPELINE_NAMES)]
    if stages:
        _refuse_axes(stages, specs[0], "over which stages of a pipeline have other parameters")
    return root[names[0]] if len(names) == 1 else root[names]._flatten("hsdp_" + "_".join(names))


def _one_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of a group's axes on one axis."""
    if mesh.ndim == 1:
        return mesh
    return mesh.root if mesh.root.ndim == 1 else mesh._flatten("hsdp_all")


def _free_axes(spec: TensorSpec, root: DeviceMesh) -> list[str]:
    """Return the axes over which a parameter may be sharded further."""
    own = dict(zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=True))
    others = [name for name in root.mesh_dim_names or () if name not in own]
    explicit = not others or any(_named(name, DATA_NAMES) for name in own)
    unknown = [name for name in others if not _named(name, DATA_NAMES)]
    if unknown and not explicit:
        _refuse_axes(unknown, spec, "and hsdp cannot tell whether these are axes of data parallelism")
    free = [name for name, placement in own.items() if explicit and placement.is_replicate()]
    return [name for name in root.mesh_dim_names or () if name in free or (name in others and name not in unknown)]


def _named(name: str, words: Collection[str]) -> bool:
    """Tell whether one of ``words`` is in an axis' name: ``"dp_shard"``, ``"data-parallel"``, ``"dp0"``."""
    return any(word.strip("0123456789") in words for word in name.lower().replace("-", "_").split("_"))


def _refuse_axes(names: Sequence[str], spec: TensorSpec, why: str) -> NoReturn:
    axes = tuple(spec.mesh.root.mesh_dim_names or ())
    data = [name for name in axes if name not in names and name not in (spec.mesh.mesh_dim_names or ())]
    data = data or [name for name in axes if _named(name, DATA_NAMES)] or names
    raise ValueError(
        f"hsdp: parameters are on {spec.mesh}, a slice of a mesh of {axes}, with {list(names)}, {why}. Name the"
        f" axes: fully_shard(module, mesh[{', '.join(map(repr, data))}]), or lay the parameters out on a slice that has"
        " them (replicated there)"
    )


def modules_by_size(model: M, max_bytes: int) -> list[M]:
    """List the modules to call `fully_shard` on, so that groups hold at most ``max_bytes`` where modules allow it.

    From the model down, the first modules that are small enough are groups. A module without a forward of its own
    (``ModuleList``, ``CellList``), with a parameter shared with others, or with very few parameters is not one: its
    parameters fall to the group around it.

    Example:
        >>> for module in modules_by_size(model, 64 << 20):
        ...     fully_shard(module, mesh)

    Args:
        model: not sharded yet.
        max_bytes: of parameters. A single module that directly holds more is a group of its own.

    Returns:
        The modules, inner before outer, ``model`` last.

    Raises:
        ValueError: ``max_bytes`` below one.
        TypeError: ``max_bytes`` is not an int.
    """
    if not isinstance(max_bytes, int):
        raise TypeError(f"modules_by_size: max_bytes must be a number of bytes, got {max_bytes!r}")
    if max_bytes < 1:
        raise ValueError(f"modules_by_size: max_bytes must be at least 1, got {max_bytes}")
    anatomy = sharding().anatomy()
    shared = _uses(anatomy, model)
    chosen: dict[int, Any] = {}
    taken: set[int] = set()  # ids of parameters that have a group

    def take(module: Any) -> None:
        if id(module) not in chosen:
            chosen[id(module)] = module
            taken.update(id(parameter) for parameter in anatomy.uses(module))

    for module in _inner_first(anatomy, model, lambda module: anatomy.bytes_of(module, taken) > max_bytes):
        worth = anatomy.bytes_of(module, taken) * TINY >= max_bytes
        if module is not model and worth and _fits(anatomy, module, shared):
            take(module)
    take(model)
    return list(chosen.values())


def _inner_first(anatomy: Anatomy, module: Any, enters: Callable[[Any], bool]) -> Iterator[Any]:
    """List a module after the modules inside; those of a module are listed if ``enters`` says so when it is reached."""
    if enters(module):
        for child in anatomy.children_of(module):
            yield from _inner_first(anatomy, child, enters)
    yield module


def _uses(anatomy: Anatomy, module: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for parameter in anatomy.uses(module):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _fits(anatomy: Anatomy, module: Any, shared: dict[int, int]) -> bool:
    """Tell whether a module can be a group: it computes, and no other module shares its parameters."""
    inside = _uses(anatomy, module)
    return anatomy.computes(module) and all(shared[key] == count for key, count in inside.items())
