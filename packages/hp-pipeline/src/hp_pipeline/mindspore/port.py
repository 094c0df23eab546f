"""MindSpore's part of hp-pipeline: see `hp_pipeline.port`.

Note [Backward of a stage]
    MindSpore's engine is asked for the gradients of one stage and micro-batch: those of the tensors that arrived and
    of the Cell's trainable parameters. It does not add them up itself, which it does wrongly for a gradient that is a
    transposed view. The sums are in ``Parameter._grad``, where the engine would leave them, until ``take_gradients``.
    A plain function has no parameters that could be listed, so a stage is a Cell.

Note [Where errors show]
    MindSpore runs operators later than Python does, and an operator that fails raises at a later call. A stage's
    forward and backward wait for their operators, so that the step that failed is the one that is named.

Note [No split backward]
    MindSpore's engine cannot put the gradients of weights off. Schedules with backwards in two halves (ZB1P, ZBV,
    VHalf, VMin, DualPipeV) run in their order and give the same gradients, but the whole backward runs in the half for
    the inputs, and the half for the weights does nothing: they fill no bubbles here.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from mindspore import Tensor, _no_grad, mint, nn, ops
from mindspore import dtype as mstype
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

from hp_platform import get_platform


def is_module(value: Any) -> bool:
    """Tell a Cell from other callables."""
    return isinstance(value, nn.Cell)


def refuse_stage(module: Any) -> str | None:
    """Say why something cannot be a stage, or None: Note [Backward of a stage]."""
    if isinstance(module, nn.Cell):
        return None
    return f"must be a Cell, whose parameters can be listed, got {type(module).__name__}; call it in a Cell's construct"


def surroundings() -> None:
    """Return None: MindSpore runs steps in one thread, so steps in pairs run one after the other."""
    return


def hooked(tree: Any, backward: Callable[[], None]) -> Any:
    """Pass a nest on as it is: there is nobody to meet."""
    return tree


def call_of(module: nn.Cell) -> Callable[..., Any]:
    return module.construct


def is_recording() -> bool:
    return bool(_pynative_executor.enable_grad())


def device_of(module: Any) -> Any:
    """Return the process's device: MindSpore has one."""
    return get_platform().devices.current_device()


def is_tensor(value: Any) -> bool:
    """Tell a tensor from other values."""
    return isinstance(value, Tensor)


def refuse(tensor: Tensor, device: Any) -> str | None:
    if hasattr(tensor, "placements"):
        return f"a {type(tensor).__name__}; return its local part, to_local(), and wrap it in the next stage"
    return None


def sends_distributed() -> bool:
    return False


def describe(tensor: Tensor) -> tuple[tuple[int, ...], Any]:
    return tuple(tensor.shape), tensor.dtype


def empty(description: tuple[tuple[int, ...], Any], device: Any) -> Tensor:
    """Return an empty tensor of a description."""
    return mint.empty(description[0], dtype=description[1])


def of_one_element(device: Any) -> Tensor:
    return mint.empty((1,))


def sendable(tensor: Tensor) -> Tensor:
    return ops.stop_gradient(tensor).contiguous()


def version(tensor: Tensor) -> int:
    """Return 0: nothing tells of writes to a tensor."""
    return 0


def equal(one: Tensor, other: Tensor) -> bool:
    return bool((one.asnumpy() == other.asnumpy()).all())


def memory(tensor: Tensor) -> tuple[int, int]:
    """Return no addresses: what arrives is not written to."""
    return 0, 0


def needs_gradient(tensor: Tensor) -> bool:
    """Tell whether backward goes on from here."""
    return bool(tensor._requires_grad) and tensor.dtype in (*mstype.float_type, *mstype.complex_type)


class Arrival:
    """Tensors from another stage, leaves of a graph, and their gradients."""

    def __init__(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.tensors, self.needed = list(tensors), list(needed)
        self._gradients: list[Tensor | None] = [None] * len(self.tensors)
        for tensor, need in zip(self.tensors, self.needed, strict=True):
            if need:
                tensor.requires_grad_(True)

    def leaves(self) -> list[Tensor]:
        """List the tensors that need gradients."""
        return [tensor for tensor, need in zip(self.tensors, self.needed, strict=True) if need]

    def leave(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the leaves, and let the tensors go."""
        rest = iter(gradients)
        self._gradients = [next(rest) if need else None for need in self.needed]
        self.tensors = []

    def gradients(self) -> list[Tensor | None]:
        """Take the gradients, one for each tensor."""
        gradients, self._gradients = self._gradients, [None] * len(self.needed)
        return gradients


def arrive(tensors: Sequence[Tensor], needed: Sequence[bool]) -> Arrival:
    return Arrival(tensors, needed)


def prepare_split(module: nn.Cell) -> None:
    """Do nothing: Note [No split backward]."""


def sharded_modules(module: nn.Cell) -> list[Any]:
    """Return nothing: on MindSpore a sharded Cell's backward is one function that gathers and reduces."""
    return []


def outermost(modules: Sequence[Any]) -> list[Any]:
    return list(modules)


def reduce_gradients(module: Any, fill: bool) -> None:
    """Do nothing: there are no such modules."""


class Nothing:
    """Deferred gradients, of which there are none: Note [No split backward]."""

    def run(self) -> None:
        """Do nothing."""


def deferring(module: nn.Cell) -> tuple[Nothing, AbstractContextManager[Any]]:
    """Put nothing off: Note [No split backward]."""
    return Nothing(), contextlib.nullcontext()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record a graph, and wait for the operators in the end: Note [Where errors show]."""
    before = _pynative_executor.grad_flag()
    _pynative_executor.set_grad_flag(True)
    try:
        yield
        _pynative_executor.sync()
    finally:
        _pynative_executor.set_grad_flag(before)


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """Record no graph, and wait for the operators in the end: Note [Where errors show]."""
    with _no_grad():
        yield
        _pynative_executor.sync()


def backward(
    module: nn.Cell,
    arrivals: Sequence[Arrival],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    deferred: Nothing | None,
) -> None:
    """Run backward from outputs: Note [Backward of a stage]."""
    for output in outputs:
        if hasattr(output, "placements"):
            raise TypeError(
                f"a stage returned a {type(output).__name__} of placements {output.placements}; on MindSpore backward"
                " begins at plain tensors: return its full_tensor() or to_local()."
            )
    leaves = [leaf for arrival in arrivals for leaf in arrival.leaves()]
    parameters = module.trainable_params()
    inputs = (*leaves, *parameters)
    if not inputs:
        return
    results = iter(run_backward(tuple(outputs), tuple(gradients), False, False, inputs, True, accumulate_grad=False))
    for arrival in arrivals:
        arrival.leave([next(results) for _ in arrival.leaves()])
    with _no_grad():
        for parameter, gradient in zip(parameters, results, strict=True):
            if gradient is not None:
                own = parameter._grad
                parameter._grad = gradient if own is None else own + gradient
    _pynative_executor.sync()


def named_parameters(module: nn.Cell) -> dict[str, Any]:
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, cell in module.cells_and_names()
        for name, parameter in cell._params.items()
        if parameter is not None
    }


def describe_parameter(parameter: Any) -> str:
    if hasattr(parameter, "placements"):
        raise NotImplementedError(
            f"a DTensor of placements {parameter.placements}: on MindSpore plain parameters are shared alone"
        )
    return f"{parameter.dtype} of shape {tuple(parameter.shape)}" + ("" if parameter.requires_grad else ", frozen")


def local(tensor: Tensor) -> Tensor:
    """Return the tensor: only plain ones come here."""
    return tensor


def device_of_tensor(tensor: Tensor) -> Any:
    """Return the process's device: MindSpore has one."""
    return get_platform().devices.current_device()


def fill(parameter: Any, value: Tensor) -> None:
    parameter.set_data(value)


def gradient(parameter: Any) -> Tensor | None:
    """Return the sum of a parameter's gradients: Note [Backward of a stage]."""
    return parameter._grad


def set_gradient(parameter: Any, gradient: Tensor | None) -> None:
    """Set it."""
    parameter._grad = gradient


def gradient_of(parameter: Any, value: Tensor) -> Tensor:
    return value


def added(gradient: Tensor, other: Tensor) -> Tensor:
    with _no_grad():
        return gradient + other


def take_gradient(parameter: Any) -> Tensor:
    """Return the sum of a parameter's gradients, zeros where there are none, and begin a new sum.

    That of a DTensor is a DTensor of its placements, as ``parallelize_value_and_grad`` returns.
    """
    gradient, parameter._grad = parameter._grad, None
    distributed = hasattr(parameter, "placements")
    if gradient is None:
        gradient = ops.zeros(tuple(parameter.local_shape if distributed else parameter.shape), parameter.dtype)
    if not distributed:
        return gradient
    return parameter.from_local(gradient, parameter.device_mesh, parameter.placements, shape=tuple(parameter.shape))


def scaled(loss: Tensor, factor: float) -> Tensor:
    return Tensor(factor, dtype=loss.dtype)


def detach(tensor: Tensor) -> Tensor:
    """Return a copy without its graph: a write to shared memory would change what backward computes with."""
    return ops.stop_gradient(tensor).copy()


copied = detach


def cut(tensor: Tensor, dim: int, parts: int) -> list[Tensor]:
    rows = tensor.shape[dim] // parts
    return [mint.narrow(tensor, dim, part * rows, rows) for part in range(parts)]


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Join along a dim."""
    return mint.cat(list(tensors), dim)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(tensor.shape)


class Structure(NamedTuple):
    """A container without its leaves.

    Attributes:
        kind: its type.
        keys: of a dict, in its order.
        parts: the structures inside; None stands for a leaf.
    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def flatten(tree: Any) -> tuple[list[Any], Structure | None]:
    kind = type(tree)
    if kind in (dict, OrderedDict):
        keys, children = tuple(tree), list(tree.values())
    elif kind in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        keys, children = (), list(tree)
    else:
        return [tree], None
    pairs = [flatten(child) for child in children]
    return [leaf for leaves, _ in pairs for leaf in leaves], Structure(kind, keys, tuple(part for _, part in pairs))


def unflatten(leaves: Sequence[Any], structure: Structure | None) -> Any:
    """Return the nest."""
    return _built(iter(leaves), structure)


def _built(leaves: Iterator[Any], structure: Structure | None) -> Any:
    if structure is None:
        return next(leaves)
    parts = [_built(leaves, part) for part in structure.parts]
    if structure.keys:
        return structure.kind(zip(structure.keys, parts, strict=True))
    return structure.kind(*parts) if hasattr(structure.kind, "_fields") else structure.kind(parts)
