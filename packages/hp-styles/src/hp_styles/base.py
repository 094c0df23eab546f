"""Base of the parallel styles: how one is applied, and the checks of its mesh, placements and plain inputs."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import hp_dtensor
from hp_dtensor import DeviceMesh, Placement, Shard
from hp_dtensor.extend import kind_of, local_shape
from hp_platform.extend import share_numbers
from hp_styles import port

_STEPS = frozenset(
    "_partition_linear_fn _partition_embedding_fn _replicate_module_fn _prepare_input_fn _prepare_output_fn"
    " _prepare_input_arg _prepare_input_kwarg_fn _prepare_out_fn".split()
)
"""Methods that torch's styles call in their ``_apply``."""


def claim(module: Any, style: ParallelStyle) -> None:
    """Mark a module as one whose parameters a style has distributed.

    Raises:
        RuntimeError: another has, so that its inputs and outputs would be converted twice.
    """
    before = style_of(module)
    if before is not None:
        raise RuntimeError(
            f"{type(module).__name__} has the style {before} already, {style!r} would convert its inputs and outputs "
            "a second time; apply only one style that shards parameters to a module"
        )
    module._parallel_style = repr(style)


def style_of(module: Any) -> str | None:
    """Return the style that has distributed a module's parameters, as text; None where none has."""
    return getattr(module, "_parallel_style", None)


_applied: ContextVar[tuple[int | None, str]] = ContextVar("applied", default=(0, ""))


@contextlib.contextmanager
def applying(src_data_rank: int | None, name: str = "") -> Iterator[None]:
    """Set ``ParallelStyle.src_data_rank`` and ``applied_name()`` in a ``with`` block; shared styles store neither."""
    token = _applied.set((src_data_rank, name))
    try:
        yield
    finally:
        _applied.reset(token)


def applied_name() -> str:
    """Return the name of the module that a style is being applied to, in its model; empty outside of it."""
    return _applied.get()[1]


class ParallelStyle(ABC):
    """A way to parallelise a module; ``parallelize_module`` calls ``apply``.

    A class written for torch's ``ParallelStyle`` may call it ``_apply``: that is another name for ``apply``. What it
    calls inside, as ``distribute_tensor`` and ``distribute_module``, has to come from hp_dtensor.

    Example:
        >>> class Frozen(ParallelStyle):
        ...     def apply(self, module, device_mesh):
        ...         return module.requires_grad_(False)

    Attributes:
        mesh_axes: number of axes of the mesh that it is for.
    """

    mesh_axes: int = 1

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        steps, apply = sorted(_STEPS.intersection(own)), cls.apply
        if "apply" in own or "_apply" in own:
            cls.apply, cls._apply = own.get("apply", own.get("_apply")), own.get("_apply", own.get("apply"))
        elif steps and apply.__module__.startswith("hp_") and apply is not ParallelStyle.apply:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(steps)}, which a style of torch calls in its _apply, and"
                f" {apply.__qualname__} of hp_styles does not; override apply(self, module, device_mesh), and register"
                " hooks on the module before or after super().apply(module, device_mesh)"
            )

    @property
    def src_data_rank(self) -> int | None:
        """Rank along each axis whose parameters count: the argument of ``parallelize_module``, else 0."""
        return _applied.get()[0]

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no apply()")

    @abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Change ``module`` in place and return it.

        Args:
            module: a module.
            device_mesh: a mesh of ``mesh_axes`` axes.
        """

    def enclose(self, root: Any, device_mesh: DeviceMesh) -> None:
        """Prepare ``root``, inside which the style was applied to modules; ``parallelize_module`` calls this once.

        Args:
            root: the module that ``parallelize_module`` was given.
            device_mesh: the mesh.
        """
        return

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        """Return the placement of a parameter that a plan's key names."""
        raise NotImplementedError(
            f"{type(self).__name__} is for a module, not for the parameter {name!r}; name the module that contains it"
        )


def check_mesh(mesh: Any, what: str) -> None:
    """Refuse a value that is not a mesh of hp_dtensor.

    Args:
        mesh: the value.
        what: the function or the style, for the error.

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{what}: device_mesh must be a DeviceMesh of hp_dtensor, got {kind_of(mesh)}; create it with"
            " hp_dtensor.init_device_mesh, whose arguments are those of torch's"
        )


def check_placements(style: Any, **layouts: Any) -> None:
    """Refuse values that are not placements of hp_dtensor.

    Args:
        style: that the layouts are arguments of.
        layouts: by the argument's name: a placement, several, by name or not, or None.

    Raises:
        TypeError: one is of another type.
    """
    for name, layout in layouts.items():
        if hasattr(layout, "values"):
            layout = tuple(layout.values())
        for value in layout if isinstance(layout, (tuple, list)) else (layout,):
            if value is not None and not isinstance(value, Placement):
                raise TypeError(
                    f"{type(style).__name__}: {name} has {value!r}, a {kind_of(value)}, which is not a placement of"
                    " hp_dtensor: from hp_dtensor import Shard, Replicate"
                )


_DIMS = 8  # of a shape


def shapes_of_ranks(values: Sequence[Any | None], mesh: DeviceMesh) -> list[list[tuple[int, ...]]] | None:
    """Gather the shapes that each rank of a mesh has of some tensors.

    Args:
        values: as many on every rank; the shape of None is empty.
        mesh: the ranks.

    Returns:
        A row of shapes for each rank; None where autograd runs a module again, with what has been compared.
    """
    shapes = [() if value is None else tuple(value.shape[:_DIMS]) for value in values]
    numbers = [n for shape in shapes for n in (*shape, *[-1] * (_DIMS - len(shape)))]
    if port.modules().runs_again():
        return None
    for axis in reversed(range(mesh.ndim)):
        numbers = [n for row in share_numbers(numbers, mesh.get_group(axis)) for n in row]
    each = [tuple(n for n in numbers[i : i + _DIMS] if n >= 0) for i in range(0, len(numbers), _DIMS)]
    return [each[i : i + len(values)] for i in range(0, len(each), len(values))]


class Widths:
    """The features of a plain input, which are sharded over the ranks as those of a weight are.

    Args:
        mesh: the style's.
        layout: of the input.
        features: of all ranks; None where they are not known.
    """

    def __init__(self, mesh: DeviceMesh, layout: Placement | tuple[Placement, ...], features: int | None) -> None:
        self.mesh, self.features = mesh, features
        self.placements = (layout,) if isinstance(layout, Placement) else layout
        cut = (local_shape((features or 0,), (Shard(0),), (mesh.size(),), (i,))[0] for i in range(mesh.size()))
        self.parts = list(cut)
        self.compared = len(set(self.parts)) == 1  # a rank alone could have a right one of unequal parts
        self.known = features is not None and mesh.size() > 1


def check_widths(widths: Widths, module: Any, value: Any) -> None:
    """Refuse a plain shard whose number of features differs from the weight's on this rank.

    Where the ranks' parts are unequal, they compare at the module's first call; features are the model's own, and stay.

    Raises:
        ValueError: on all ranks, where parts are unequal or no rank has as many.
    """
    if not widths.known or isinstance(value, hp_dtensor.DTensor):
        return
    mesh, features, last = widths.mesh, widths.features, len(value.shape) - 1
    if last < 0 or not any(isinstance(p, Shard) and p.dim in (-1, last) for p in widths.placements):
        return
    shapes = None if widths.compared else shapes_of_ranks([value], mesh)
    widths.compared |= shapes is not None
    mine, ranks = mesh.get_local_rank(), mesh.ranks.reshape(-1).tolist()
    got = {ranks[mine]: value.shape[-1]}
    if shapes is not None:
        got = {rank: row[0][-1] for rank, row in zip(ranks, shapes, strict=True)}
    expected = dict(zip(ranks, widths.parts, strict=True))
    if any(expected[rank] != length for rank, length in got.items()):
        widths.compared = widths.compared and shapes is None
        style = getattr(module, "_parallel_style", "parallel style").partition("(")[0]
        raise ValueError(
            f"{style} on {type(module).__name__}: a plain input is taken as this rank's part of the {features} features"
            f" that the weight takes, {_listed(expected)}; got {_listed(got)}, of shape {list(value.shape)} here. Pass "
            f"the output of a ColwiseParallel of {features} features, or a DTensor (use_local_output=False in the style"
            " before, or DTensor.from_local with shape=)"
        )


def check_sized(
    sized: tuple[int, int], module: Any, value: Any, placements: Sequence[Placement], mesh: DeviceMesh
) -> None:
    """Refuse a plain input that is whole in the dim that is sharded; the layout alone decides, on all ranks alike.

    Args:
        sized: a dim, and the size that the module takes there.
        module: the style's.
        value: its input.
        placements: of the input.
        mesh: the style's.

    Raises:
        ValueError: it is.
    """
    dim, size = sized[0] % max(len(value.shape), 1), sized[1]
    if mesh.size() == 1 or len(value.shape) < 2 or value.shape[dim] != size:
        return
    if any(placement.is_shard(dim) for placement in placements):
        style = getattr(module, "_parallel_style", "parallel style").partition("(")[0]
        raise ValueError(
            f"{style} on {type(module).__name__}: dim {dim} of a plain input is taken as this rank's part of a sequence"
            f" over {mesh.size()} ranks, but it has all {size} channels or features that the module takes, and no"
            f" sequence: the shape is {list(value.shape)}. Give the style another sequence_dim, 0 for samples, or leave"
            " the module out of the plan"
        )


def _listed(lengths: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {length}" for rank, length in lengths.items())
