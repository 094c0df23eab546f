"""`hsdp`, `fully_shard` by ZeRO level, and `modules_by_size`, the modules to call it on.

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
from hp_dtensor.extend import TensorSpec
from hp_fsdp.api import check_module, shard
from hp_fsdp.groups.managed_params import spec_of
from hp_fsdp.options import GroupOptions, MixedPrecisionPolicy
from hp_fsdp.port import Anatomy, sharding
from hp_platform import get_platform

M = TypeVar("M")
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
