"""``out=``: a result is written into a DTensor of any layout, or it is said what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "abs": lambda a, b, out: torch.abs(a, out=out),
    "clamp": lambda a, b, out: torch.clamp(a, 0, 1, out=out),
    "mm": lambda a, b, out: torch.mm(a, b.t(), out=out),
    "sum": lambda a, b, out: torch.sum(a, 0, out=out),
    "norm": lambda a, b, out: torch.norm(a, dim=0, out=out),
    "cat": lambda a, b, out: torch.cat([a, b], out=out),
    "where": lambda a, b, out: torch.where(a > 0, a, b, out=out),
    "diag": lambda a, b, out: torch.diag(a, out=out),
    "addmm": lambda a, b, out: torch.addmm(b @ a.t(), a, b.t(), out=out),
}


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def place(whole: torch.Tensor, placement: Any) -> DTensor:
    return distribute_tensor(whole, init_device_mesh(device_type(), (2,)), [placement])


def same(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_is_written_into_out(name: str) -> None:
    a, b = rand(4, 6), rand(4, 6).flip(0)
    expected = FUNCTIONS[name](a, b, out=torch.empty(0, dtype=a.dtype, device=a.device))
    for placement in (Shard(0), Replicate()):
        out = place(torch.zeros_like(expected), placement)
        made = FUNCTIONS[name](place(a, Shard(0)), place(b, Shard(1)), out=out)
        assert made is out and out.placements == (placement,)
        same(out, expected)


@on_ranks(2)
def test_several_results_an_operand_as_out_and_factories() -> None:
    a = rand(4, 6)
    want = torch.sort(a, 0)
    outs = place(torch.zeros_like(a), Shard(1)), place(torch.zeros(4, 6, dtype=torch.int64), Replicate())
    made = torch.sort(place(a, Shard(0)), 0, out=outs)
    assert made.values is outs[0] and made.indices is outs[1]
    same(outs[0], want.values)
    same(outs[1], want.indices)
    x = place(a, Shard(0))
    torch.add(x, x, out=x)
    same(x, 2 * a)
    eye = place(torch.zeros(4, 6, dtype=a.dtype), Shard(0))
    torch.nn.init.eye_(eye)
    same(eye, torch.eye(4, 6, dtype=a.dtype, device=a.device))


@on_ranks(2)
def test_what_can_not_be_written_is_said() -> None:
    a = rand(4, 6)
    x = place(a, Shard(0))
    with pytest.raises(ValueError, match=r"add with out= a plain tensor of shape \(4, 6\), of DTensors: .* use"):
        torch.add(x, x, out=torch.zeros_like(a))
    assert torch.equal(torch.zeros_like(a).copy_(torch.add(x, x).full_tensor()), a + a)
    with pytest.raises(ValueError, match=r"add with out= a DTensor of shape \(4, 6\), of nothing distributed"):
        torch.add(a, a, out=x)
    out = place(torch.zeros_like(a), Shard(0))
    same(torch.add(place(a, Shard(0)), x, out=out), a + a)
    same(out.zero_().copy_(place(torch.add(a, a), Shard(0))), a + a)
    with pytest.raises(ValueError, match=r"out= a DTensor placed \(Partial\(\),\): reduce_partial\(\) it first"):
        torch.add(x, x, out=DTensor.from_local(a, x.device_mesh, [Partial()]))
    same(torch.add(x, x, out=DTensor.from_local(a, x.device_mesh, [Partial()]).reduce_partial()), a + a)
    with pytest.raises(RuntimeError, match=r"out= a DTensor of shape \(4, 6\): the result has shape \(6,\)"):
        torch.sum(x, 0, out=place(a, Shard(0)))
    same(torch.sum(x, 0), a.sum(0))
    with pytest.raises(RuntimeError, match=r"float64 can't be cast to the desired output type torch.int64"):
        torch.add(x, x, out=place(a.long(), Shard(0)))
    with pytest.raises(RuntimeError, match=r"out= don't support automatic differentiation"):
        torch.add(place(a, Shard(0)).requires_grad_(), x, out=place(a, Shard(0)))
    with torch.no_grad():
        same(torch.add(place(a, Shard(0)).requires_grad_(), x, out=place(a, Shard(0))), a + a)
