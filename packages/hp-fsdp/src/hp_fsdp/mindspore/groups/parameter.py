"""ManagedParameter: one parameter of a group, and its shard on the host.

Note [Optimizers bring parameters back]
    MindSpore computes on the device wherever tensors live, so an optimizer's step may leave its result there. Shards
    on the device are moved back to the host before a gather. On CPU the host is the device, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, mint

from hp_dtensor import DeviceMesh, Replicate
from hp_dtensor.extend import TensorSpec
from hp_dtensor.mindspore.extend import DTensor, distribute_parameter, local_view, set_local, unwrap, wrap
from hp_fsdp.groups.managed_params import mark
from hp_fsdp.groups.parameter import GroupParameter
from hp_fsdp.options import ParameterFacts
from hp_platform import get_platform


class ManagedParameter(GroupParameter):
    """A Parameter: it stays the same object; only its data becomes the rank's range of elements.

    Attributes:
        parameter: the Parameter.
    """

    __slots__ = ("parameter",)
    kind = "Cell"
    stores = ("_params", "_cells")

    def __init__(self, name: str, parameter: Any) -> None:
        inner = parameter._spec if isinstance(parameter, DTensor) else None
        super().__init__(name, inner, tuple(parameter.shape) if inner is None else inner.local_shape)
        self.parameter = parameter

    @property
    def trains(self) -> bool:
        """It requires gradients."""
        return self.parameter.requires_grad

    def facts(self) -> ParameterFacts:
        """Get what decides how it is communicated."""
        parameter = self.parameter
        nbytes = math.prod(self.global_shape) * itemsize(parameter.dtype)
        return ParameterFacts(self, self.name, parameter, parameter.dtype, parameter.requires_grad, self.shape, nbytes)

    def shard(self, start: int, stop: int, spec: TensorSpec, owner: str) -> None:
        """Reduce the Parameter to a range of its elements, and make it a DTensor.

        Args:
            start: begin of the range in the flattened parameter. A parameter without values (``init_empty_weights``)
                gets its layout only; ``init_parameters`` gives it values.
            stop: end of the range.
            spec: the layout.
            owner: text for the error if another group finds this parameter as well.
        """
        if not self.parameter.has_init:
            set_local(self.parameter, copy_range(local_view(self.parameter), start, stop, spec.local_shape))
        wrap(self.parameter, spec)
        mark(self.parameter, owner)

    def check_place(self, standing: Any, owner: str) -> None:
        """Check that the Cells still hold the tensor that the group registered.

        Args:
            standing: the tensor that it registered last.
            owner: the Cell's class, for errors.

        Raises:
            RuntimeError: another object is registered there, or none.
        """
        for cell, name in self.places:
            registered = cell._params.get(name)
            if registered is standing:
                continue
            where = f"fully_shard: parameter {self.name!r} of {owner}"
            if registered is None:
                raise RuntimeError(
                    f"{where} is no longer in {type(cell).__name__}: remove or move parameters before fully_shard"
                )
            raise RuntimeError(
                f"{where} was replaced by {type(registered).__name__} of shape {tuple(registered.shape)}. Change a"
                " sharded parameter in place (set_data), or load values with load_full_state_dict(model, ...)"
            )

    def lacks_values(self) -> str | None:
        if not self.parameter.has_init:
            return None
        return "has no values. Give it some before the next forward: hp_dtensor.init_parameters(cell)"

    def gather(self) -> None:
        full = self.parameter.full_tensor()
        set_local(unwrap(self.parameter), full)
        self.inner, self.shape = None, tuple(full.shape)

    def replicate(self, inner: DeviceMesh) -> None:
        distribute_parameter(self.parameter, inner, [Replicate()] * inner.ndim)
        self.inner = self.parameter._spec

    def dress(self, unsharded: Tensor) -> Any:
        """Give an unsharded tensor its layout, and the attributes that Cells expect of a parameter."""
        unsharded.name = self.parameter.name
        unsharded.inited_param = None
        return unsharded if self.inner is None else wrap(unsharded, self.inner)


def copy_range(tensor: Tensor, start: int, stop: int, shape: Sequence[int] | None = None) -> Tensor:
    """Copy a range of a tensor's elements.

    Args:
        tensor: of any shape.
        start: begin of the range in the flattened tensor.
        stop: end of the range.
        shape: of the result. Default: one dim.
    """
    shape = (stop - start,) if shape is None else tuple(shape)
    if start == stop:  # a copy of an empty view is a view, which optimizers can't write
        return mint.empty(shape, dtype=tensor.dtype)
    return mint.narrow(tensor.reshape(-1), 0, start, stop - start).reshape(shape).copy()


def itemsize(dtype: Any) -> int:
    """Return the bytes of an element."""
    return mint.empty((0,), dtype=dtype).itemsize


HOST = "CPU"


def on_host(tensor: Tensor) -> bool:
    """Tell whether a tensor is on the host while this process computes on a device."""
    return get_platform().devices.kind != "cpu" and _kind_of(tensor) == HOST


def to_device(tensor: Tensor) -> Tensor:
    """Copy to this process's device; return the tensor itself if it is there."""
    device = str(get_platform().devices.current_device()).partition(":")[0]
    return tensor if _kind_of(tensor) == device else tensor.to(device)


def to_host(tensor: Tensor, pin: bool) -> Tensor:
    """Copy to the host; return the tensor itself if it is there.

    Args:
        tensor: plain.
        pin: use page-locked memory if there is a device to copy to.
    """
    if _kind_of(tensor) == HOST:
        return tensor
    copy = tensor.to(HOST)
    return copy.pin_memory() if pin and get_platform().devices.capabilities.pinned_memory else copy


def _kind_of(tensor: Any) -> str:
    return str(tensor.device).partition(":")[0]
