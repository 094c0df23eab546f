"""The public functions: parallelize_module and loss_parallel, the same on PyTorch and on MindSpore."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from hp_dtensor import DeviceMesh, get_current_mesh
from hp_dtensor.extend import check_member, matches, matching
from hp_styles import port
from hp_styles.base import ParallelStyle, applying, check_mesh
from hp_styles.inputs import comparing_in_calls_of
from hp_styles.names import named_style


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | str | Mapping[str, ParallelStyle | str] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Apply styles to a module or its submodules, in place.

    Modules that share a parameter share it afterwards too.

    Args:
        module: the module.
        device_mesh: a mesh of one axis, for ``TwoDimensionalParallel`` of two or three, for
            ``ThreeDimensionalParallel`` of three; default that of ``with mesh:``.
        parallelize_plan: a style for the module itself, or ``{name or fnmatch pattern: style}``; patterns match dotted
            names of submodules part by part: ``layers.*.mlp.up``; ``layers.*`` is the layers, not what is inside them.
            ``""`` is the module itself. Where no submodule matches, a key may name parameters
            (``mlp.experts.gate_up_proj``), which are sharded and nothing else. A style may be a name, such as
            ``"colwise"``, as in a transformers model's ``base_model_tp_plan``: `hp_styles.names` lists them; named
            styles keep activations DTensors, so that what else the model computes with is replicated.
        src_data_rank: the rank along the axis whose parameters count; None takes each rank's own.

    Returns:
        ``module``.

    Raises:
        ValueError: a mesh that does not hold this rank, or of another number of axes than a style is for, a key that
            matches no submodule (near misses are listed), a name that is not a style's, a module that two keys match,
            or modules that share a parameter and get different placements.
        TypeError: something that is not a style, plan or mesh; a style or a mesh of torch's own.
        NotImplementedError: a style that is not for such a module.
        RuntimeError: no ``device_mesh``, and none is active; or a module has a style that shards parameters already.

    Warns:
        UserWarning: without a plan nothing is done.
    """
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    check_mesh(mesh, "parallelize_module")
    check_member(mesh, "parallelize_module")
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module: there is no parallelize_plan, so the module is unchanged; pass a style or"
            " {pattern: style}",
            stacklevel=2,
        )
        return module
    refused_below = _of_torch(type(parallelize_plan)) is not None
    if not isinstance(parallelize_plan, (ParallelStyle, str, Mapping)) and not refused_below:
        raise TypeError(
            "parallelize_module: parallelize_plan must be a ParallelStyle or {pattern: style}, got"
            f" {type(parallelize_plan).__name__}"
        )
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    modules = port.modules().named_modules(module)
    parameters = port.modules().named_parameters(module)
    chosen: dict[int, tuple[str, str, ParallelStyle]] = {}
    placed: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        style = _style(style, pattern)
        if mesh.ndim != style.mesh_axes:
            raise ValueError(
                f"parallelize_module: a mesh of {'one axis' if style.mesh_axes == 1 else f'{style.mesh_axes} axes'} is"
                f" needed for {type(style).__name__}, got axes {mesh.mesh_dim_names or mesh.shape}; slice it, as in"
                " mesh['tp'], and apply styles for other meshes in separate calls"
            )
        if pattern not in modules and not any(matches(pattern, name) for name in modules):
            placed.update({name: style for name in parameters if matches(pattern, name)})
            if any(matches(pattern, name) for name in parameters):
                continue
        for name in matching(pattern, modules, "submodule", module, "parallelize_module"):
            _, other, _ = chosen.setdefault(id(modules[name]), (name, pattern, style))
            if other != pattern:
                raise ValueError(f"parallelize_module: {name!r} is matched by {other!r} and by {pattern!r}; keep one")
    with applying(src_data_rank), comparing_in_calls_of(module):
        for name, style in placed.items():
            owner, _, own = name.rpartition(".")
            placement = style._parameter_placement(own, len(parameters[name].shape))
            port.modules().place(modules[owner], own, mesh, placement, src_data_rank)
        for name, _, style in chosen.values():
            try:
                with applying(src_data_rank, name):
                    style.apply(modules[name], mesh)
            except NotImplementedError as error:
                raise NotImplementedError(f"parallelize_module: {name or 'the module itself'}: {error}") from None
    inside = {id(style): style for name, _, style in chosen.values() if name}
    for style in inside.values():
        style.enclose(module, mesh)
    return module


def _of_torch(kind: type) -> type | None:
    """Return the class of torch.distributed that a class is or derives from; None if there is none."""
    return next((each for each in kind.__mro__ if each.__module__.startswith("torch.distributed.")), None)


def _style(entry: Any, pattern: str) -> ParallelStyle:
    """Return the style that a plan gives a pattern.

    Raises:
        ValueError: a name that is not a style's.
        TypeError: something that is not a style.
    """
    style = named_style(entry) if isinstance(entry, str) else entry
    if isinstance(style, ParallelStyle):
        return style
    kind = style if isinstance(style, type) else type(style)
    theirs = _of_torch(kind)
    if theirs is not None:
        ours = "from hp_styles import " + theirs.__name__.lstrip("_")
        own = f"torch's own {theirs.__module__}.{theirs.__name__}"
        raise TypeError(
            f"parallelize_module: {pattern!r} has {own if theirs is kind else f'{kind.__name__}, derived from {own}'},"
            " which distributes parameters as torch's DTensors; hp_styles has its own with the same names and"
            f" arguments: {ours}{'' if theirs is kind else '; derive it from that one'}"
        )
    is_class = isinstance(style, type) and issubclass(style, ParallelStyle)
    text = f"the class {style.__name__}; write {style.__name__}()" if is_class else f"a {kind.__name__}"
    raise TypeError(f"parallelize_module: {pattern!r} must have a ParallelStyle, got {text}")


def loss_parallel(*, z_loss: float = 0.0) -> AbstractContextManager[None]:
    """Compute ``F.cross_entropy`` of logits sharded on the class dim, without communicating tensors of their size.

    Two all-reduces of row-sized tensors in forward give the loss (and one of a number, for a mean over sharded rows);
    the gradient is local. Cross entropy of sharded classes is computed this way outside as well. The context adds the
    z-loss, takes plain targets and class weights as replicated if the rows are not sharded, and refuses logits that
    would have to be gathered.

    Example:
        >>> logits = distribute_tensor(torch.randn(4, 16, requires_grad=True), mesh, [Shard(1)])
        >>> with loss_parallel(z_loss=1e-4):
        ...     loss = F.cross_entropy(logits, target)
        ...     loss.backward()

    Args:
        z_loss: factor of ``logsumexp(logits)**2``, which is added to the loss of each row that is not ignored; it keeps
            the softmax's normaliser near one. Default 0: none. Where the loss is recomputed (checkpointing), backward
            belongs inside.

    Returns:
        A context manager. A loss of rows sharded on another axis is ``Partial()`` there (``reduction="none"``: sharded
        as they are), and replicated on the axis of the classes.

    Raises:
        ValueError: ``z_loss`` is negative or not finite; inside: logits that are not sharded on the class dim, targets
            that are probabilities, or a plain target for logits of sharded rows.
        RuntimeError: on leaving, where ``z_loss`` was given and no loss was computed inside.
        NotImplementedError: ``z_loss`` on MindSpore, where ``ops.cross_entropy`` of sharded classes gathers nothing
            anyway, and where its logits are placed is not checked.

    Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3; the z-loss: Chowdhery et al., "PaLM",
    arXiv:2204.02311, section 5.
    """
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"loss_parallel: z_loss must be a finite number of at least 0, got {z_loss}")
    return port.modules().sharded_loss(z_loss=z_loss)
