"""Distributed Parameters and their data, Cells built without memory, and the Cell that communicates.

Note [The shape that a Parameter remembers]
MindSpore remembers the shape that a Parameter had when a kernel first read it, and several kernels (``Gather``,
``Stack``, ``CumSum``) create their gradient in that shape. Setting data of another shape does not change it: values and
gradients are then wrong, and memory is written beyond its end. Only a change of dtype makes MindSpore forget the shape,
so the Parameter gets another dtype in between, without elements.

Note [The Cell that communicates]
There is no global hook for Cells, and autograd does not tell which Cell recorded an operation. In backward the Cell is
known only if the communicating code names it (`communicate_for`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore._c_expression import TensorPy
from mindspore.graph.api import _pynative_executor
from mindspore.nn.utils import no_init_parameters

from hp_dtensor.debugging.debug import Names, running
from hp_dtensor.layout.placements import Replicate
from hp_dtensor.mindspore.backward import autograd
from hp_dtensor.mindspore.backward.autograd import execute, local_mode, local_only
from hp_dtensor.mindspore.dtensor import DTensor, local_view, redistribute, unwrap, wrap
from hp_platform import get_platform
from hp_platform.extend import attributed_modules


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
            copy = plain.clone("same" if 0 in plain.shape else init)
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


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build Cells with parameters without values. Shard them, then call ``init_parameters``.

    Example:
        >>> with init_empty_weights():
        ...     model = Model()
        >>> parallelize_module(model, mesh, plan)
        >>> init_parameters(model)
    """
    with no_init_parameters():
        yield


@contextlib.contextmanager
def init_on_device(device: Any) -> Iterator[None]:
    """Create parameters of Cells on ``device``: "meta" as in `init_empty_weights`, or the process's own device.

    Raises:
        ValueError: another device; a MindSpore process has only one.
    """
    kind, own = str(device).lower().partition(":")[0], get_platform().devices.kind
    if kind == "meta":
        with init_empty_weights():
            yield
    elif {"ascend": "npu", "gpu": "cuda"}.get(kind, kind) == own:
        yield
    else:
        raise ValueError(
            f"init_on_device({device!r}): a MindSpore process has one device, here {own!r}; pass {own!r}, or 'meta' to"
            " build without memory"
        )


def init_parameters(module: nn.Cell) -> nn.Cell:
    """Give a Cell that was built by ``init_empty_weights`` its initial values, with only local tensors in memory.

    The values are those of the undistributed Cell, built with the same seed: each parameter's initializer runs for the
    global tensor, in the order of construction, and the local tensor is kept.

    Args:
        module: the Cell; parameters that have values keep them.
    """
    for parameter in module.get_parameters():
        if not parameter.has_init:
            continue
        if not isinstance(parameter, DParameter):
            parameter.init_data()
            continue
        spec = parameter._spec
        plain = unwrap(parameter)
        try:
            plain.init_data()
            replicated = spec.with_placements([Replicate()] * spec.mesh.ndim)
            set_local(plain, execute(plain.copy(), replicated, spec))
        finally:
            wrap(plain, spec)
    return module


def named_modules(module: nn.Cell) -> dict[str, nn.Cell]:
    """List all Cells inside, the Cell itself among them, each under every name that it has."""
    return dict(_walk(module, ""))


def _walk(cell: nn.Cell, prefix: str) -> Iterator[tuple[str, nn.Cell]]:
    yield prefix, cell
    for name, child in cell.name_cells().items():
        if child is not None:
            yield from _walk(child, f"{prefix}.{name}" if prefix else name)


class Modules:
    """The running Cells, read from the frames."""

    def __init__(self) -> None:
        self._names = Names(named_modules)

    def start(self) -> None:
        """Do nothing: Cells have no hooks."""

    def stop(self) -> None:
        """Do nothing: Cells have no hooks."""

    def place(self, frame: FrameType) -> tuple[str, str]:
        """Return phase and Cell of the program at this frame."""
        attributed = attributed_modules()
        if _pynative_executor.get_current_autodiff_engine_id() != -1:
            return "backward", self._names.of(attributed)
        return "forward", self._names.of(attributed or running(frame, nn.Cell))
