"""Shapes of results that are known without asking torch are its own, and it refuses bad arguments itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from hp_dtensor.rules.planning import Call, collect
from hp_dtensor.torch.ops.dispatching.plans import _on_meta
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
sdpa, cat = F.scaled_dot_product_attention, torch.cat
_HEADS = ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 8))
_GROUPED = ((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 8))
KNOWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cat": (cat, [(2, 3), (2, 3)], {}),
    "cat, last dim": (cat, [(2, 3), (2, 0), (2, 5)], {"dim": -1}),
    "cat, one": (cat, [(4,)], {"dim": 0}),
    "heads": (sdpa, _HEADS, {}),
    "heads, scale, causal": (sdpa, _HEADS, {"is_causal": True, "scale": 0.5}),
    "groups": (sdpa, _GROUPED, {"enable_gqa": True}),
    "mask": (sdpa, (*_HEADS, (2, 1, 3, 5)), {}),
    "mask of two dims": (sdpa, (*_HEADS, (3, 5)), {}),
}
WRONG: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cat, sizes": (cat, [(2, 3), (2, 4)], {}),
    "cat, dims": (cat, [(2, 3), (2, 3, 1)], {}),
    "cat, dim": (cat, [(2, 3), (2, 3)], {"dim": 2}),
    "heads": (sdpa, ((2, 6, 3, 4), (2, 4, 5, 4), (2, 4, 5, 8)), {}),
    "groups that do not fit": (sdpa, ((2, 6, 3, 4), (2, 4, 5, 4), (2, 4, 5, 8)), {"enable_gqa": True}),
    "sizes": (sdpa, ((2, 6, 3, 4), (2, 6, 5, 3), (2, 6, 5, 8)), {}),
    "lengths": (sdpa, ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 7, 8)), {}),
    "a mask's sizes": (sdpa, (*_HEADS, (3, 4)), {}),
    "a mask and causal": (sdpa, (*_HEADS, (3, 5)), {"is_causal": True}),
    "scale": (sdpa, _HEADS, {"scale": "a"}),
    "dropout": (sdpa, _HEADS, {"dropout_p": "a"}),
}


def shapes_of(call: Call) -> Any:
    binding: Any = BINDINGS[call.func]
    collect(call, binding, DTensor)
    return binding.shapes(call)


def call_of(func: Any, shapes: Any, options: dict[str, Any]) -> Call:
    mesh = init_device_mesh(device_type(), (1,))
    tensors = [distribute_tensor(torch.randn(shape), mesh, [Replicate()]) for shape in shapes]
    return Call(func, (tensors,) if func is cat else tuple(tensors), options)


@on_ranks(1)
@pytest.mark.parametrize("name", KNOWN)
def test_a_shape_that_is_known_is_that_of_torch(name):
    call = call_of(*KNOWN[name])
    found = shapes_of(call)
    assert found == [tuple(_on_meta(call).shape)]
    assert call.func(*call.args, **call.kwargs).shape == found[0]


@on_ranks(1)
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_left_to_torch(name):
    call = call_of(*WRONG[name])
    assert shapes_of(call) is None
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):
        call.func(*call.args, **call.kwargs)


@on_ranks(1)
def test_attention_in_several_dtypes_or_of_integers_is_left_to_torch():
    call = call_of(sdpa, _HEADS, {})
    for dtypes in ([torch.float32, torch.float64, torch.float32], [torch.int64] * 3):
        other = Call(sdpa, tuple(each.to(dtype) for each, dtype in zip(call.args, dtypes)), {})
        assert shapes_of(other) is None
