"""torch.compile of styled modules: what Dynamo traces in place of the hooks' conversions.

See Note [Compiled regions run on local tensors] in `hp_dtensor.torch.compile.compiling`.
"""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor import DTensor
from hp_dtensor.extend import TensorSpec, spec_named
from hp_dtensor.torch.extend import (
    constant,
    decode_placements,
    encode_placements,
    mesh_of,
    redistribute,
    redistribute_shared,
    traces_as,
)
from hp_styles import checks as widths
from hp_styles import inputs


@traces_as(inputs._is_tensor)
def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@constant
def _spec(mesh: Any, layout: Any, local: tuple[int, ...], features: Any) -> TensorSpec:
    return inputs._spec(mesh_of(mesh), decode_placements(layout), local, features)


@constant
def _wanted(have: str, mesh: Any, desired: Any) -> TensorSpec:
    return inputs._wanted(spec_named(have), mesh_of(mesh), decode_placements(desired))


def _texts(layout: Any) -> Any:
    return encode_placements(layout if isinstance(layout, tuple) else (layout,))


@traces_as(inputs._to_dtensor)
def _to_dtensor(value: Any, mesh: Any, layout: Any, desired: Any, features: Any = None) -> Any:
    if isinstance(value, DTensor):
        return redistribute_shared(value, _wanted(value._spec.name, mesh._key, _texts(desired)))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"parallel style: a layout is for a tensor, got {type(value).__name__}")
    src = _spec(mesh._key, _texts(layout), tuple([int(size) for size in value.shape]), features)
    return redistribute_shared(value, _wanted(src.name, mesh._key, _texts(desired)), src)


@traces_as(inputs._output)
def _output(value: Any, mesh: Any, desired: Any, local: Any) -> Any:
    if isinstance(value, DTensor):
        value = redistribute(value, _wanted(value._spec.name, mesh._key, _texts(desired)))
        return value.to_local() if local else value
    return value


@traces_as(inputs.compare_parts)
def _compare_parts(mesh: Any, values: Any) -> None:
    """Nothing: a compiled region communicates what its graph says."""


@traces_as(widths.check_widths)
def _check_widths(expected: Any, module: Any, value: Any) -> None:
    """Nothing: a shape that does not fit is found where it is traced."""


@traces_as(inputs.begin_call)
def _begin_call(module: Any, *, anew: bool = False) -> None:
    """Nothing, as `_compare_parts`."""


@traces_as(inputs.end_call)
def _end_call(module: Any) -> None:
    """Nothing, as `_compare_parts`."""
