"""Distributed Parameters, and the exchange of a Parameter's data in place.

Note [The shape that a Parameter remembers]
MindSpore remembers the shape that a Parameter had when a kernel first read it, and several kernels (``Gather``,
``Stack``, ``CumSum``) create their gradient in that shape. Setting data of another shape does not change it: values and
gradients are then wrong, and memory is written beyond its end. Only a change of dtype makes MindSpore forget the shape,
so the Parameter gets another dtype in between, without elements.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, mint, ops
from mindspore._c_expression import TensorPy  # type: ignore[attr-defined]

from hp_dtensor.layout.placements import Replicate
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import local_mode, local_only
from hp_dtensor.mindspore.dtensor import DTensor, local_view, redistribute, unwrap, wrap
from hp_dtensor.mindspore.moves.redistribute import execute


def set_local(parameter: Parameter, local: Tensor) -> None:
    """Set ``local`` as the data of a Parameter; see Note [The shape that a Parameter remembers].

    Args:
        parameter: a plain Parameter, or a DTensor, whose layout stays the same.
        local: a plain tensor of any shape, of the Parameter's dtype.
    """
    if TensorPy.shape.__get__(parameter) != TensorPy.shape.__get__(local):
        parameter._update_data(mint.empty((0,), dtype=local.dtype))
        TensorPy.set_dtype(parameter, mindspore.bool_ if local.dtype != mindspore.bool_ else mindspore.int8)
    parameter._update_data(local)


def states_by_name(optimizer: Any) -> dict[str, ParameterTuple]:
    """Return what an optimizer of MindSpore keeps for each of its parameters, in their order, by its own names."""
    parameters = optimizer.parameters
    return {
        name: kept
        for name, kept in vars(optimizer).items()
        if isinstance(kept, ParameterTuple) and len(kept) == len(parameters) and kept[0] is not parameters[0]
    }


class DParameter(DTensor, Parameter):
    """A Parameter whose data is this rank's shard of a distributed tensor."""

    # Tensor's methods of these names would come first.
    _offload = Parameter._offload
    _remove_hook = Parameter._remove_hook

    @property
    def data(self) -> Any:
        """The Parameter itself; in local mode MindSpore's own ``data``."""
        return TensorPy.data.__get__(self) if local_only() else self

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> Any:
        """Return this parameter if it has values; a Cell asks before it runs or is saved.

        Raises:
            RuntimeError: it has none, because it was built in ``init_empty_weights``.
        """
        if self.has_init:
            raise RuntimeError(
                f"parameter {self.name!r}, a DTensor of shape {self._spec.shape}, has no values yet; call"
                " init_parameters(cell) after it is sharded"
            )
        return self

    def offload_file_path(self) -> Any:
        """Answer what ``mindspore.save_checkpoint`` asks of a Cell's parameters before it copies them.

        Raises:
            NotImplementedError: this rank has only a shard, which would be saved as if it were the global tensor.
        """
        if local_only() or self._spec.replicated:
            return TensorPy.offload_file_path(self)
        raise NotImplementedError(
            f"parameter {self.name!r} is a DTensor of shape {self._spec.shape} placed {self._spec.placements}, of which"
            " save_checkpoint of a Cell would save this rank's part. Gather on all ranks, then save: state ="
            " {p.name: p.full_tensor() for p in cell.get_parameters()} (of a model of fully_shard: state ="
            " full_state_dict(model)); mindspore.save_checkpoint([{'name': k, 'data': v} for k, v in state.items()],"
            " path)"
        )

    def set_data(self, data: Any, slice_shape: bool = False) -> Any:
        """Copy the values of a DTensor of the same global shape, or this rank's shard of a plain global tensor.

        A plain tensor must be the same on all ranks, as it is if they load one file; there is no communication.

        Raises:
            ValueError: a tensor of another shape.
        """
        if local_only():
            return super().set_data(data, slice_shape)
        spec = self._spec
        if tuple(getattr(data, "shape", ())) != spec.shape or not isinstance(data, Tensor):
            raise ValueError(
                f"set_data of parameter {self.name!r}, a DTensor of shape {spec.shape}, got"
                f" {type(data).__name__} of shape {tuple(getattr(data, 'shape', ()))}; pass a DTensor or a global"
                " tensor of that shape"
            )
        if isinstance(data, DTensor):
            local = local_view(data if data._spec is spec else redistribute(data, spec))
        else:
            local = execute(local_view(data), spec.with_placements([Replicate()] * spec.mesh.ndim), spec).copy()
        self._update_data(local if local.dtype == self.dtype else local.astype(self.dtype))
        autograd.forget()
        return self

    def assign_value(self, value: Any) -> Any:
        """Set data as `set_data` does: ``Cell.load_state_dict`` calls this with global values."""
        return super().assign_value(value) if local_only() else self.set_data(value)

    def clone(self, init: Any = "same") -> Any:
        """Return a new Parameter of the same layout, as ``Parameter.clone`` does: optimizers create their states so."""
        spec = self._spec
        plain = unwrap(self)
        try:
            # MindSpore's initializers refuse a shape without elements, which a shard may have.
            copy = plain.clone("same" if 0 in plain.shape else init)  # type: ignore[attr-defined]
        finally:
            wrap(plain, spec)
        return copy if local_only() else wrap(copy, spec)

    copy = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with local_mode():
                data = ops.stop_gradient(self).copy()
            copy = Parameter(data, name=self.name, requires_grad=self.requires_grad)
            memo[id(self)] = wrap(copy, self._spec)
        return memo[id(self)]
