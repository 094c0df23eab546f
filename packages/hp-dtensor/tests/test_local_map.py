"""``local_map``, ``from_local(grad_placements=)`` and ``redistribute(forward_dtype=, backward_dtype=)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_dtensor import (
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    local_map,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def place(whole: torch.Tensor, placement: Any) -> DTensor:
    return distribute_tensor(whole, init_device_mesh(device_type(), (2,)), [placement]).requires_grad_()


def close(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("layout", [False, True])
def test_a_local_product(layout: bool) -> None:
    def said(placement: Any, *axes: str) -> Any:
        return Layout((2,), ("tp",))(*axes) if layout else [placement]

    columns, rows = said(Shard(1), "None", "tp"), said(Shard(0), "tp", "None")

    @local_map(out_placements=[Partial()], in_placements=(columns, rows), redistribute_inputs=True)
    def product(x: Any, w: Any) -> Any:
        assert type(x) is torch.Tensor and x.shape == (4, 3)
        return x @ w

    wholes = [t.requires_grad_() for t in (rand(4, 6), rand(6, 5))]
    given = [place(t.detach(), R) for t in wholes]
    made = product(*given)
    assert made.placements == (Partial(),)
    close(made, wholes[0] @ wholes[1])
    made.square().sum().backward()
    (wholes[0] @ wholes[1]).square().sum().backward()
    for x, want in zip(given, wholes):
        close(x.grad, want.grad)
    assert type(product(wholes[0][:, :3], wholes[1][:3])) is torch.Tensor


@on_ranks(2)
@pytest.mark.parametrize("gradients", [None, ([Shard(0)], [Partial()])])
def test_the_gradient_of_a_replicated_argument_is_whole(gradients: Any) -> None:
    x, w = rand(4, 6).requires_grad_(), rand(6).requires_grad_()
    dx, dw = place(x.detach(), Shard(0)), place(w.detach(), R)
    scaled = local_map(lambda a, b: a * b, [Shard(0)], in_grad_placements=gradients)
    scaled(dx, dw).square().sum().backward()
    (x * w).square().sum().backward()
    close(dx.grad, x.grad)
    close(dw.grad, w.grad)


@on_ranks(2)
def test_nested_arguments_and_several_results() -> None:
    x, w = rand(4, 6), rand(6)

    def both(pair: Any, scale: float, *, more: int) -> Any:
        return {"product": pair["x"] * pair["w"] * scale + more, "rows": pair["x"].shape[0]}

    made = local_map(both, ([Shard(0)], None), ([Shard(0)], [R], None))(
        {"x": place(x, Shard(0)), "w": place(w, R)}, 2.0, more=1
    )
    close(made["product"], x * w * 2 + 1)
    assert made["rows"] == 2


@on_ranks(2)
def test_what_does_not_fit_a_local_map_is_said() -> None:
    x = place(rand(4, 6), Shard(0))
    for kwargs, text in (
        (
            {"in_placements": ([R],)},
            r"argument 0 is placed \(Shard\(0\),\), but in_placements has \(Replicate\(\),\); pass red",
        ),
        ({"in_placements": ([R], [R])}, r"in_placements has 2 entries for 1 positional arguments"),
        ({"in_placements": (None,)}, r"in_placements\[0\] is None, but the argument is a DTensor placed"),
        ({"out_placements": ([Shard(0)], [Shard(0)])}, r"out_placements has 2 entries for 1 results"),
        (
            {"out_placements": None},
            r"out_placements\[0\] is None, but the result is a Tensor: a tensor needs placements",
        ),
    ):
        for kind in (ValueError, AssertionError):
            with pytest.raises(kind, match=text):
                local_map(lambda a: a, **{"out_placements": [Shard(0)], **kwargs})(x)
    for kwargs in (
        {"in_placements": ([R],), "redistribute_inputs": True, "out_placements": [R]},
        {"in_placements": ([Shard(0)],)},
        {"out_placements": ([Shard(0)],)},
    ):
        close(local_map(lambda a: a, **{"out_placements": [Shard(0)], **kwargs})(x), x.full_tensor())
    odd = rand(5, 6)  # uneven once it is redistributed
    for target in (Shard(0), Shard(1)):
        moved = {"in_placements": ([target],), "redistribute_inputs": True}
        close(local_map(lambda a: a * 2, [target], **moved)(place(odd, R)), odd * 2)
        close(custom_shard(lambda a: a * 2, x.device_mesh, [target], **moved)(place(odd, R)), odd * 2)
    pair = local_map(lambda a: (a, 3), ([Shard(0)], None))(x)  # None for one that is not a tensor
    assert pair[1] == 3
    with pytest.raises(ValueError, match=r"result 0 is a DTensor; func must return local tensors"):
        local_map(lambda a: x, [Shard(0)])(x)


# ---- the gradient's layout and dtypes ----
@on_ranks(2)
@pytest.mark.parametrize("placement", [R, Partial()], ids=repr)
def test_a_local_tensor_gets_its_gradient_in_parts(placement: Any) -> None:
    mesh, local = init_device_mesh(device_type(), (2,)), rand(4, 6).requires_grad_()
    x = DTensor.from_local(local, mesh, [placement], grad_placements=[Partial()])
    x.square().sum().backward()
    assert local.grad is not None
    whole = local.detach() * (2 if placement.is_partial() else 1)
    close(DTensor.from_local(local.grad, mesh, [Partial()]), 2 * whole)
    plain = rand(4, 6).requires_grad_()
    DTensor.from_local(plain, mesh, [placement], grad_placements=[R]).square().sum().backward()
    assert plain.grad is not None
    close(plain.grad, 2 * whole)


@on_ranks(2)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, None), (torch.float32, torch.float32), (None, torch.float32)], ids=str
)
@pytest.mark.parametrize("way", [(Shard(0), R), (Shard(0), Shard(1)), (R, Shard(0)), (Partial(), R)], ids=repr)
def test_values_and_gradients_are_sent_in_dtypes_of_their_own(dtypes: Any, way: Any) -> None:
    forward, backward = dtypes
    mesh, part = init_device_mesh(device_type(), (2,)), rand(4, 6).requires_grad_()
    x = DTensor.from_local(part, mesh, [way[0]])
    with pytest.MonkeyPatch.context() as patch:
        sent: list[Any] = []
        from hp_dtensor.torch.backward import autograd
        from hp_dtensor.torch.moves import transfer

        for place_ in (autograd, transfer):
            run = place_.execute
            patch.setattr(place_, "execute", lambda t, *rest, run=run: sent.append(t.dtype) or run(t, *rest))
        made = x.redistribute(placements=[way[1]], forward_dtype=forward, backward_dtype=backward, async_op=True)
        assert made.dtype == (forward or torch.float64) and made.placements == (way[1],)
        (made.double() ** 2).sum().full_tensor().backward()
        gradients = set() if way[0].is_partial() else {backward or torch.float64}  # a sum's is on all ranks already
        assert sent[0] == made.dtype and gradients <= set(sent[1:])
    want = DTensor.from_local(other := rand(4, 6).requires_grad_(), mesh, [way[0]])
    (want.redistribute(placements=[way[1]]) ** 2).sum().backward()
    assert part.grad is not None and part.grad.dtype == torch.float64
    torch.testing.assert_close(part.grad, other.grad, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_errors_of_torchs_types() -> None:
    mesh, x = init_device_mesh(device_type(), (2,)), place(rand(4, 6), Shard(0))
    for kinds, call, text in (
        ((ValueError, RuntimeError), lambda: x.redistribute(), "redistribute: pass the target"),
        ((TypeError, RuntimeError), lambda: DTensor.from_local(x, mesh, [R]), "takes a plain tensor, got a DTensor"),
        ((TypeError,), lambda: DTensor.from_local([1.0], mesh, [R]), "takes a plain tensor, .* got a builtins.list"),
        (
            (ValueError, RuntimeError),
            lambda: distribute_tensor((rand(4).requires_grad_() * 2), mesh, [R]),
            "detached from",
        ),
        ((TypeError,), lambda: x.redistribute(placements=[0]), "is not a placement"),
        (
            (ValueError,),
            lambda: DTensor.from_local(rand(4, 6), mesh, [Shard(0)], grad_placements=[R]),
            r"may be Shard\(0\)",
        ),
        ((ValueError,), lambda: x.full_tensor(grad_placements=[Shard(0)]), r"it may be Replicate\(\) or Partial\(\)"),
    ):
        for kind in kinds:
            with pytest.raises(kind, match=text):
                call()
    square = init_device_mesh(device_type(), (2, 1))
    with pytest.raises(ValueError, match=r"mix partial max and sum, whose order of reduction matters"):
        DTensor.from_local(rand(4), square, [Partial(), Partial("max")])
    with pytest.raises(NotImplementedError, match=r"with another mesh, .* cast first: x\.to\(dtype\)"):
        x.redistribute(square, [R, R], forward_dtype=torch.float32)


@on_ranks(3)
@pytest.mark.parametrize("rows", [7, 4, 2, 0])
def test_uneven_shards(rows):
    mesh = init_device_mesh(device_type(), (3,))
    x = torch.arange(rows * 4.0, dtype=torch.float64, device=device_type()).view(rows, 4).requires_grad_()
    d = distribute_tensor(x, mesh, [Shard(0)]).detach().requires_grad_()
    functions = [
        (lambda t: t * 2, [Shard(0)], lambda t: t * 2),
        (lambda t: t.t().contiguous(), [Shard(1)], lambda t: t.t()),
        (lambda t: t.sum(0), [Partial()], lambda t: t.sum(0)),
    ]
    for func, placements, expected in functions:
        for result in (local_map(func, placements)(d), custom_shard(func, mesh, placements)(d)):
            assert result.shape == expected(x).shape
            assert torch.equal(result.full_tensor(), expected(x))
            (gradient,) = torch.autograd.grad(result.full_tensor().square().sum(), d)
            assert torch.equal(gradient.full_tensor(), *torch.autograd.grad(expected(x).square().sum(), x))


@on_ranks(4)
def test_uneven_shards_over_two_axes():
    mesh = init_device_mesh(device_type(), (2, 2))
    x = torch.arange(5 * 3.0, device=device_type()).view(5, 3)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)]):
        result = local_map(lambda t: t + 1, placements)(distribute_tensor(x, mesh, placements))
        assert result.shape == (5, 3) and torch.equal(result.full_tensor(), x + 1)


@on_ranks(2)
def test_parts_of_no_tensor_are_refused_on_all_ranks():
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(torch.arange(5.0, device=device_type()), mesh, [Shard(0)])
    local = x.to_local()

    def other_sizes(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, part]) if len(local) == 2 else part[:1]

    with pytest.raises(
        ValueError, match=r"result 0 is placed \(Shard\(0\),\), but .* of shape \(5,\), rank 0 has \(1,\) and not"
    ):
        local_map(other_sizes, [Shard(0)])(x)
