"""GroupParameter: one parameter of a group, on any framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from hp_dtensor import DeviceMesh, RaggedShard
from hp_dtensor.extend import TensorSpec


class GroupParameter:
    """A parameter, the places where it is registered, and its unsharded shape.

    A framework's ``ManagedParameter`` adds the tensors that are registered there.

    Attributes:
        stores: the attributes of modules that map names to parameters and to modules.
        kind: what the framework calls a module, for errors.
        name: its name inside the group's module.
        shape: shape of the unsharded tensor on this rank.
        inner: the unsharded tensor's layout if it is a DTensor (tensor parallel), else None.
        places: the modules that it is registered in, with its name there.
    """

    __slots__ = ("inner", "name", "places", "shape")
    stores: ClassVar[tuple[str, str]]
    kind: ClassVar[str]

    def __init__(self, name: str, inner: TensorSpec | None, shape: Sequence[int]) -> None:
        self.name = name
        self.inner = inner
        self.shape: Any = shape
        self.places: list[tuple[Any, str]] = []

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded tensor on this rank."""
        return math.prod(self.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape that the user sees."""
        return tuple(self.shape) if self.inner is None else self.inner.shape

    def is_sharded_copy(self) -> bool:
        """Tell whether it is a copy of a sharded parameter."""
        return self.inner is not None and any(isinstance(p, RaggedShard) for p in self.inner.placements)

    def lacks_values(self) -> str | None:
        """Say what a parameter without values is, and what to do; None for one with values."""
        raise NotImplementedError

    def gather(self) -> None:
        """Make a copy of a sharded parameter a full plain one."""
        raise NotImplementedError

    def replicate(self, inner: DeviceMesh) -> None:
        """Make a plain parameter a replicated DTensor."""
        raise NotImplementedError

    def join(self, mesh: DeviceMesh, inner: DeviceMesh | None, owner: str) -> None:
        """Prepare a parameter that joined a sharded module for sharding.

        A copy of a sharded parameter (``copy.deepcopy`` of a module) is gathered first, so all ranks have to call it.

        Args:
            mesh: of data parallelism.
            inner: mesh to replicate a plain parameter on, if any.
            owner: the module's class, for errors.

        Raises:
            RuntimeError: it has no values, or is a copy of a parameter that is sharded over other axes as well.
        """
        where = f"fully_shard: parameter {self.name!r} joined {owner} after it was sharded, and"
        if (lack := self.lacks_values()) is not None:
            raise RuntimeError(f"{where} {lack}")
        if self.inner is not None and self.is_sharded_copy():
            if self.inner.mesh != mesh:
                raise RuntimeError(
                    f"{where} is a copy of one that is placed {self.inner.placements} on {self.inner.mesh}. Add the"
                    f" {self.kind} before fully_shard, or build a new one instead of a copy"
                )
            self.gather()
        if self.inner is None and inner is not None:
            self.replicate(inner)
