"""``torch._foreach_*`` on lists of DTensors in any layouts: the functions of one tensor, for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
SHAPES = [(4, 6), (6, 8), (3, 5)]


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def place(whole: torch.Tensor, placement: Any) -> DTensor:
    mesh = init_device_mesh(device_type(), (2,))
    if placement.is_partial():
        return DTensor.from_local(whole * (mesh.get_local_rank() + 1) / 3, mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


def close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)


def written(function: Any, *more: Any) -> Callable[..., Any]:
    def run(xs: Any, ys: Any) -> Any:
        xs = [x * 1 for x in xs]
        function(xs, *[ys if value is None else value for value in more])
        return xs

    return run


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.5),
    "add a number": lambda xs, ys: torch._foreach_add(xs, 1.0),
    "numbers": lambda xs, ys: torch._foreach_mul(xs, [1.0, 2.0, 3.0]),
    "lerp": lambda xs, ys: torch._foreach_lerp(xs, ys, 0.3),
    "addcdiv": lambda xs, ys: torch._foreach_addcdiv(xs, ys, [y * y + 1 for y in ys], [1.0, 2.0, 3.0]),
    "a tensor of numbers": lambda xs, ys: torch._foreach_addcmul(xs, ys, ys, torch.tensor([1.0, 2.0, 3.0])),
    "maximum": lambda xs, ys: torch._foreach_maximum(xs, ys),
    "maximum of numbers": lambda xs, ys: torch._foreach_maximum(xs, 0.1),
    "power of a number": lambda xs, ys: torch._foreach_pow(2.0, xs),
    "abs": lambda xs, ys: torch._foreach_abs(xs),
    "norm": lambda xs, ys: torch._foreach_norm(xs, 3),
    "max": lambda xs, ys: torch._foreach_max(xs),
    "add_": written(torch._foreach_add_, None),
    "mul_": written(torch._foreach_mul_, 2.0),
    "zero_": written(torch._foreach_zero_),
    "copy_": written(torch._foreach_copy_, None),
    "minimum_": written(torch._foreach_minimum_, None),
    "clamp_min_": written(torch._foreach_clamp_min_, 0.1),
}
if hasattr(torch, "_foreach_powsum"):
    FUNCTIONS["powsum"] = lambda xs, ys: torch._foreach_powsum(xs, 3)
LAYOUTS: dict[str, Any] = {
    "alike": ([Shard(0), Shard(1), Replicate()], [Shard(0), Shard(1), Replicate()]),
    "mixed": ([Shard(0), Replicate(), Shard(1)], [Replicate(), Shard(1), Shard(0)]),
    "partial": ([Partial(), Replicate(), Shard(1)], [Partial(), Partial(), Shard(0)]),
}


@on_ranks(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_lists(name: str) -> None:
    xs, ys = [rand(*shape) for shape in SHAPES], [rand(*shape).flip(0) for shape in SHAPES]
    for layout in LAYOUTS:
        given = [[place(t, p) for t, p in zip(ts, ps)] for ts, ps in zip((xs, ys), LAYOUTS[layout])]
        if layout == "partial" and name == "clamp_min_":
            with pytest.raises(RuntimeError, match=r"clamp_min_: the operand that is written in place is Partial\(\)"):
                FUNCTIONS[name](*given)
        else:
            close(FUNCTIONS[name](*given), FUNCTIONS[name](xs, ys))


@on_ranks(2)
def test_equal_layouts_send_nothing() -> None:
    xs = [place(rand(4, 6), Shard(0)), place(rand(6, 8), Replicate())]
    with count_collectives() as counts:
        torch._foreach_addcdiv_(xs, xs, [x + 9 for x in xs], 0.1)
    assert sum(counts.values()) == 0


@on_ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=repr)
def test_a_tensor_for_a_number(placement: Any) -> None:
    x = rand(4, 6)
    scale = place(x, placement).sum()
    close(torch._foreach_mul([place(x, Shard(0))], scale), [x * x.sum()])
    close(torch._foreach_mul([place(x, Shard(0))], [scale]), [x * x.sum()])
    given = [place(x, Shard(0))]
    torch._foreach_mul_(given, scale)
    close(given, [x * x.sum()])


@on_ranks(2)
def test_gradients_through_functions_of_lists() -> None:
    def run(a: Any, b: Any, c: Any) -> Any:
        [product] = torch._foreach_mul([a], c)
        [total] = torch._foreach_add([product], [b])
        [norm] = torch._foreach_norm([a])
        return (total.square().sum() + norm**3) * 1.0

    wholes = [t.clone().requires_grad_() for t in (rand(4, 6), rand(4, 6).flip(0), rand())]
    run(*wholes).backward()
    given = [place(t.detach(), p).requires_grad_() for t, p in zip(wholes, (Shard(0), Replicate(), Replicate()))]
    run(*given).backward()
    close([t.grad for t in given], [t.grad for t in wholes])


@on_ranks(2)
def test_what_can_not_be_mixed_is_said() -> None:
    x = rand(4, 6)
    with pytest.raises(ValueError, match=r"add_: writing a DTensor of shape \(4, 6\) into a plain tensor"):
        torch._foreach_add_([x.clone()], [place(x, Shard(0))])
    torch._foreach_add_(plain := [x.clone()], [place(x, Shard(0)).full_tensor()])
    assert torch.equal(plain[0], x * 2)
    with pytest.raises(ValueError, match=r"a plain tensor of shape \(4, 6\) meets a DTensor of shape \(\)"):
        torch._foreach_mul([x], place(x, Shard(0)).sum())
    close(torch._foreach_mul([place(x, Replicate())], place(x, Shard(0)).sum()), [x * x.sum()])
    state = [[place(x.abs(), Shard(dim))] for dim in (0, 1, 0, 0)] + [[]]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    with pytest.raises(ValueError, match=r"_fused_adamw_: element 0 is a DTensor .* to one layout first"):
        torch._fused_adamw_(*state, [torch.ones(())], maximize=False, **options)
    plains = [[x.abs()] for _ in range(4)]
    state[1] = [state[1][0].redistribute(placements=[Shard(0)])]
    torch._fused_adamw_(*state, [torch.ones(())], maximize=False, **options)
    torch._fused_adamw_(*plains, [], [torch.ones(())], maximize=False, **options)
    close(state[0], plains[0])
