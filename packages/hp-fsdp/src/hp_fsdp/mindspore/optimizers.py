"""MindSpore's optimizers looked at before their first step: Note [Before an optimizer's first step].

Note [States that were made before]
    An optimizer of MindSpore makes its states with the parameters' shapes when it is made; before `fully_shard` or
    tensor parallel styles, or before a forward that takes new parameters in, these are the whole ones. Each rank leaves
    its part of them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.experimental.optim.optimizer import Optimizer

from hp_dtensor import RaggedShard, Replicate
from hp_dtensor.mindspore.extend import DTensor, distribute_tensor, local_mode, local_view, set_local
from hp_fsdp.mindspore.parameter import run_of
from hp_fsdp.norms import spec_of
from hp_fsdp.optimizers import refuse_unreduced, unreduced

__all__ = ["watch_optimizers"]

_in_order: weakref.WeakKeyDictionary[nn.Cell, list[Any]] = weakref.WeakKeyDictionary()


def watch_optimizers() -> None:
    """Looks at what optimizers are given from now on: MindSpore has no hook for it, so their calls are wrapped once."""
    for kind in (nn.Optimizer, Optimizer):
        if not hasattr(kind.__call__, "_looks_at_parameters"):
            kind.__call__ = _looking(kind.__call__)


def _looking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
        specs = [spec_of(parameter) for parameter in self.parameters]
        if _in_order.get(self) != specs:
            _check(self)
            _in_order[self] = specs
        return call(self, *args, **kwargs)

    looked._looks_at_parameters = True  # type: ignore[attr-defined]
    return looked


def _check(optimizer: Any) -> None:
    """Cuts states that were made before their parameters were sharded.

    Raises:
        RuntimeError: the optimizer has parameters that no group has beside sharded ones.
        ValueError: states are shaped neither as a parameter was before nor as it is now.
    """
    wrong = unreduced(optimizer.parameters)
    if wrong:
        refuse_unreduced(wrong, len(optimizer.parameters), type(optimizer).__name__)
    with local_mode():
        for parameter, state in _states(optimizer):
            if isinstance(parameter, DTensor) and tuple(state.shape) != tuple(parameter.shape):
                set_local(state, _part_of(state, parameter, type(optimizer).__name__))


def _part_of(state: Parameter, parameter: Any, name: str) -> Tensor:
    """The rank's part of a state."""
    spec, value = parameter._spec, local_view(state)
    whole = tuple(value.shape) == tuple(spec.shape)
    others = [Replicate() if isinstance(p, RaggedShard) else p for p in spec.placements]
    if whole and not all(placement.is_replicate() for placement in others):
        value = local_view(distribute_tensor(value.value(), spec.mesh, others, src_data_rank=None))
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard) and value.size == sum(placement.units):
            start = sum(placement.units[: spec.mesh.get_local_rank(axis)])
            value = run_of(value, start, start + placement.units[spec.mesh.get_local_rank(axis)])
    if value.size != local_view(parameter).size:
        raise ValueError(
            f"fully_shard: {name} has states of shape {tuple(state.shape)} for parameter {parameter.name!r}, of which"
            f" this rank has {local_view(parameter).size} of {math.prod(spec.shape)} elements. Make the optimizer after"
            " the parameter was sharded: after a forward of the Cell that it joined, where it is a copy"
        )
    return value


def _states(optimizer: Any) -> Iterator[tuple[Any, Parameter]]:
    """Each parameter with each of its states."""
    parameters = list(optimizer.parameters)
    for kept in vars(optimizer).values():
        if isinstance(kept, ParameterTuple) and len(kept) == len(parameters) and kept[0] is not parameters[0]:
            yield from zip(parameters, kept)
    for group in getattr(optimizer, "param_groups", ()):
        if isinstance(group.get("max_exp_avg_sq"), (list, tuple)):
            yield from zip(group["params"], group["max_exp_avg_sq"])
