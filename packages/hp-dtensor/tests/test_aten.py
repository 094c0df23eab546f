"""Operators of torch.ops.aten on DTensors: the public functions, whoever calls them and wherever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
aten = torch.ops.aten
Make = Callable[..., Any]


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def place(whole: torch.Tensor, placement: Any) -> DTensor:
    return distribute_tensor(whole, init_device_mesh(device_type(), (2,)), [placement])


def close(got: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        for one, other in zip(got, expected, strict=True):
            close(one, other)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(got, DTensor) and got.dtype == expected.dtype
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    else:
        assert got == expected


CASES: dict[str, Make] = {
    "add": lambda a, b, _: aten.add.Tensor(a, b, alpha=2),
    "a packet": lambda a, b, _: aten.add(a, other=b),
    "self by name": lambda a, b, _: aten.mul.Tensor(self=a, other=b),
    "a number": lambda a, b, _: aten.mul.Scalar(a, 2.0),
    "in place": lambda a, b, _: aten.add_.Tensor(a * 1, b),
    "out": lambda a, b, _: aten.add.out(a, b, out=torch.zeros_like(a)),
    "mm": lambda a, b, _: aten.mm.default(a, aten.t.default(b)),
    "addmm": lambda a, b, _: aten.addmm.default(aten.sum.dim_IntList(b, [1]), a, aten.t.default(b)),
    "sum": lambda a, b, _: aten.sum.default(a),
    "mean": lambda a, b, _: aten.mean.dim(a, [0], True),
    "amax": lambda a, b, _: aten.amax.default(a, [0]),
    "max": lambda a, b, _: aten.max.dim(a, 0),
    "norm": lambda a, b, _: aten.linalg_vector_norm.default(a),
    "softmax": lambda a, b, _: aten._softmax.default(a, 0, False),
    "layer_norm": lambda a, b, _: aten.native_layer_norm.default(a, [6], None, None, 1e-5)[0],
    "gelu": lambda a, b, _: aten.gelu.default(a, approximate="tanh"),
    "where": lambda a, b, _: aten.where.self(aten.gt.Scalar(a, 0), a, b),
    "cat": lambda a, b, _: aten.cat.default([a, b], 0),
    "split": lambda a, b, _: aten.split.Tensor(a, 3),
    "sort": lambda a, b, _: aten.sort.default(a, 0),
    "cumsum": lambda a, b, _: aten.cumsum.default(a, 0),
    "view": lambda a, b, _: aten.view.default(a, [2, 2, 6]),
    "unsafe view": lambda a, b, _: aten._unsafe_view.default(a, [24]),
    "transpose": lambda a, b, _: aten.transpose.int(a, 0, 1),
    "select": lambda a, b, _: aten.select.int(a, 0, 1) * 1,
    "slice": lambda a, b, _: aten.slice.Tensor(a, 0, 1, 3) * 1,
    "dtype": lambda a, b, _: aten._to_copy.default(a, dtype=torch.float32),
    "clone": lambda a, b, _: aten.clone.default(a),
    "zeros": lambda a, b, _: aten.zeros_like.default(a),
    "embedding": lambda a, b, index: aten.embedding.default(a, index),
    "a list": lambda a, b, _: list(aten._foreach_add.List([a, b], [b, b])),
    "a number read": lambda a, b, _: aten._local_scalar_dense.default(aten.sum.default(a * 0)),
    "a size": lambda a, b, _: aten.sym_size.int(a, 0),
    "comparison": lambda a, b, _: aten.equal.default(a, a * 1),
}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_an_operator_is_the_public_function(case: str) -> None:
    a, b, index = rand(4, 6), rand(4, 6).flip(0), torch.tensor([0, 3, 1], device=device_type())
    expected = CASES[case](a, b, index)
    for placement, mode in product((Shard(0), Replicate()), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        with mode():
            given = place(a, placement), place(b, Shard(0)), place(index, Replicate())
            close(CASES[case](*given), expected)


@on_ranks(2)
def test_gradients_through_operators() -> None:
    a, b = rand(4, 6), rand(4, 6).flip(0)
    wholes = [t.clone().requires_grad_() for t in (a, b)]
    given = [place(t, Shard(dim)).requires_grad_() for dim, t in enumerate((a, b))]
    for x, y in (wholes, given):
        aten.sum.default(aten.pow.Tensor_Scalar(aten.mm.default(x, aten.t.default(y)), 3)).backward()
    for x, want in zip(given, wholes):
        close(x.grad, want.grad)


@on_ranks(2)
def test_operators_without_a_rule_are_refused_by_name() -> None:
    x = place(rand(4, 6), Shard(0))
    for call, name in (
        (lambda: torch.ops.prims.mul(x, x), "prims::mul"),
        (lambda: aten.native_dropout.default(x, 0.5, True), "native_dropout"),
        (lambda: aten.threshold_backward.default(x, x, 0), "threshold_backward"),
        (lambda: aten.tanh_backward.default(x, x), "tanh_backward"),
    ):
        with pytest.raises(NotImplementedError, match=rf"no sharding rule for .*{name} \(DTensors: .* Give it one"):
            call()
    with pytest.raises(ValueError, match=r"add: a plain tensor of shape \(4, 6\) meets a DTensor"):
        aten.add.Tensor(x, rand(4, 6))


# ---- modes below ----
class Noting(TorchDispatchMode):
    """A user's mode: it is handed the local operations, and calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.mm.default:
            self.seen.append(tuple(tuple(arg.shape) for arg in args))
        return func(*args, **(kwargs or {}))


def program(x: Any, w: Any, b: Any) -> Any:
    hidden = checkpoint(lambda t: F.relu(t @ w) + b, x, use_reentrant=False)
    return F.layer_norm(hidden, (8,)).pow(2).sum()


@on_ranks(2)
@pytest.mark.parametrize("placed", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))], ids=repr)
@pytest.mark.parametrize("mode", [Noting, FlopCounterMode])
def test_modes_see_local_operations_forward_and_backward(placed: Any, mode: Any) -> None:
    wholes = [rand(4, 6), rand(6, 8), rand(8)]
    plain = [t.clone().requires_grad_() for t in wholes]
    program(*plain).backward()
    given = [place(t, p).requires_grad_() for t, p in zip(wholes, (*placed, Replicate()))]
    with mode() if mode is Noting else FlopCounterMode(display=False):
        program(*given).backward()
    for x, want in zip(given, plain):
        close(x.grad, want.grad)


@on_ranks(2)
def test_flops_are_those_of_this_rank() -> None:
    x, w = place(rand(8, 6), Shard(0)).requires_grad_(), place(rand(6, 8), Replicate()).requires_grad_()
    for _ in range(2):  # planned the first time
        with FlopCounterMode(display=False) as counter:
            (x @ w).square().sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 4 * 6 * 8


@on_ranks(2)
def test_an_operator_called_inside_of_a_mode() -> None:
    x, w = rand(4, 6), rand(6, 10)
    with Noting() as mode:
        made = aten.mm.default(place(x, Shard(0)), place(w, Replicate()))
    assert mode.seen == [((2, 6), (6, 10))]
    close(made, x @ w)
