"""What every parallel style is, and how one is applied."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from hp_dtensor import DeviceMesh, Placement

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
    before = getattr(module, "_parallel_style", None)
    if before is not None:
        raise RuntimeError(
            f"{type(module).__name__} has the style {before} already, {style!r} would convert its inputs and outputs "
            "a second time; apply only one style that shards parameters to a module"
        )
    module._parallel_style = repr(style)


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
            cls.apply, cls._apply = own.get("apply", own.get("_apply")), own.get("_apply", own.get("apply"))  # type: ignore[method-assign]
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
