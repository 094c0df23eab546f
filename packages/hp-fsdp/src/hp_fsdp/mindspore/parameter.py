"""ManagedParameter: one parameter of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from mindspore import Parameter, Tensor, mint, nn

from hp_dtensor.mindspore.dtensor import DTensor, local_view, wrap
from hp_dtensor.mindspore.parameter import set_local
from hp_dtensor.spec import TensorSpec
from hp_fsdp import finding

__all__ = ["ManagedParameter", "find_parameters"]


class ManagedParameter:
    """A Parameter, where it is registered, and what it looks like unsharded.

    The Parameter stays the object that it was; only its data becomes the rank's run of elements.

    Attributes:
        name: its name inside the group's Cell.
        parameter: the Parameter.
        shape: shape of the unsharded tensor on this rank.
        numel: number of its elements.
        inner: the unsharded tensor's layout where it is a DTensor (tensor parallel), else None.
        places: the Cells that it is registered in, with its name there.
    """

    __slots__ = ("inner", "name", "numel", "parameter", "places", "shape")

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.inner: TensorSpec | None = parameter._spec if isinstance(parameter, DTensor) else None
        self.shape: tuple[int, ...] = tuple(parameter.shape) if self.inner is None else self.inner.local_shape
        self.numel = math.prod(self.shape)
        self.places: list[tuple[nn.Cell, str]] = []

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape that the user sees."""
        return self.shape if self.inner is None else self.inner.shape

    def shard(self, start: int, stop: int, spec: TensorSpec, owner: str) -> None:
        """Leaves only a run of elements in the Parameter, and makes it a DTensor.

        Args:
            start: where the run begins in the flattened parameter. One without values (``init_empty_weights``) gets
                its layout only; ``init_parameters`` gives it values.
            stop: where it ends.
            spec: the layout.
            owner: text for the error where another group finds this parameter, too.
        """
        if not self.parameter.has_init:
            set_local(self.parameter, run_of(local_view(self.parameter), start, stop))
        wrap(self.parameter, spec)
        finding.mark(self.parameter, owner)

    def dress(self, unsharded: Tensor) -> Any:
        """Gives an unsharded tensor its layout, and what Cells ask of a parameter."""
        unsharded.name = self.parameter.name
        unsharded.inited_param = None
        return unsharded if self.inner is None else wrap(unsharded, self.inner)


def run_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """A run of a tensor's elements, 1-d, in memory of its own."""
    if start == stop:
        return mint.empty((0,), dtype=tensor.dtype)  # a copy of an empty view is a view, which optimizers can't write
    return mint.narrow(tensor.reshape(-1), 0, start, stop - start).copy()


def find_parameters(
    cell: nn.Cell, ignored: Collection[Parameter], stop: Callable[[Any], bool]
) -> list[ManagedParameter]:
    """The parameters of ``cell`` that no inner group has; see `hp_fsdp.finding`."""
    return finding.find_parameters(cell, ignored, stop, ManagedParameter, parameters="_params", children="_cells")
