"""A rule of the user's for an operation of theirs: placements chosen, values, gradients, and what is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.factors import choose
from hp_dtensor.torch.functions import register_sharding
from hp_dtensor.torch.ops import whole
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.calls import name_of
from hp_dtensor.torch.ops.functions import BINDINGS
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R, P = Replicate(), Partial()


@torch.library.custom_op("hp_test::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, scale: torch.Tensor, factor: float, times: int) -> torch.Tensor:
    """Row-normalised ``x`` times ``scale``: rows are independent, columns are not."""
    return x / (1 + x.square().sum(1, keepdim=True)) * scale * factor * times


@scaled_rows.register_fake
def _(x: Any, scale: Any, factor: Any, times: Any) -> Any:
    return torch.empty_like(x)


def _plain(x: Any, scale: Any, factor: Any, times: Any) -> Any:
    return x / (1 + x.square().sum(1, keepdim=True)) * scale * factor * times


def _backward(ctx: Any, grad: Any) -> Any:
    x, scale = (value.detach().requires_grad_() for value in ctx.saved_tensors)
    with torch.enable_grad():
        grads = torch.autograd.grad(_plain(x, scale, ctx.factor, ctx.times), (x, scale), grad)
    return (*grads, None, None)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, scale, ctx.factor, ctx.times = inputs
    ctx.save_for_backward(x, scale)


scaled_rows.register_autograd(_backward, setup_context=_keep)


@contextmanager
def _registered(op: Any, rule: Any) -> Iterator[None]:
    """The rule, for as long as the test runs: ranks are shared."""
    before, special = dict(BINDINGS), dict(dispatch._SPECIAL)
    assert register_sharding(op)(rule) is rule
    try:
        yield
    finally:
        for table, kept in ((BINDINGS, before), (dispatch._SPECIAL, special)):
            table.clear()
            table.update(kept)
        dispatch._PLANS.clear()


def _rows(x: Any, scale: Any, factor: Any, times: Any) -> Any:
    assert type(x) is TensorSpec and factor is float and type(times) is int
    return [([R], [R, R, None, None]), ([Shard(0)], [Shard(0), R, None, None])]


@on_ranks(2, 3)
def test_values_and_gradients_of_one_device(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,), ("x",))
    x = torch.randn(5, 4, dtype=torch.float64, device=device_type())
    scale = torch.randn(4, dtype=torch.float64, device=device_type())
    a, b = x.clone().requires_grad_(), scale.clone().requires_grad_()
    want = _plain(a, b, 0.5, 2)
    want.square().sum().backward()
    for call in (scaled_rows, torch.ops.hp_test.scaled_rows, torch.ops.hp_test.scaled_rows.default):
        with _registered(call, _rows):
            for placed, kept, gathers in ((Shard(0), Shard(0), 0), (R, R, 0), (Shard(1), Shard(0), 0)):
                dx = distribute_tensor(x, mesh, [placed]).requires_grad_()
                ds = distribute_tensor(scale, mesh, [R]).requires_grad_()
                with count_collectives() as counts:
                    got = call(dx, ds, 0.5, 2)
                assert got.placements == (kept,) and counts["all_gather"] == gathers
                got.square().sum().backward()
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(dx.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(ds.grad.full_tensor(), b.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match="no sharding rule for"):
        scaled_rows(dx, ds, 0.5, 2)


@on_ranks(2)
@pytest.mark.parametrize(("name", "results"), [("fft.fft", 1), ("ops.aten.native_dropout.default", 2)])
def test_the_lines_in_the_error_of_a_missing_rule(name: str, results: int) -> None:
    """What the error says to copy is run, and the function is right."""
    func: Any = torch
    for part in name.split("."):
        func = getattr(func, part)
    mesh, x = init_device_mesh(device_type(), (2,)), torch.randn(4, 6, dtype=torch.float64, device=device_type())
    given = distribute_tensor(x, mesh, [Shard(0)])
    arguments: tuple[Any, ...] = () if results == 1 else (0.0, True)
    BINDINGS.pop(func, None)
    with pytest.raises(NotImplementedError, match=r"\[Replicate\(\)" + r", Replicate\(\)" * (results - 1)) as caught:
        func(given, *arguments)
    text = str(caught.value)
    lines = text[text.index("    @register") : text.index("Or gather")]
    assert len(lines.strip().splitlines()) == 3
    kept = dict(BINDINGS)
    try:
        exec(textwrap.dedent(lines), {"torch": torch, "Replicate": Replicate, "register_sharding": register_sharding})
        made, want = func(given, *arguments), func(x, *arguments)
        for a, b in zip([made] if results == 1 else made, [want] if results == 1 else want, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
    finally:
        BINDINGS.clear()
        BINDINGS.update(kept)
        dispatch._PLANS.clear()


@on_ranks(1)
def test_functions_that_write_get_no_such_rule() -> None:
    given = distribute_tensor(torch.rand(3, 3), init_device_mesh(device_type(), (1,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match="no sharding rule for .*resize_as_sparse_ .*returns its result"):
        given.resize_as_sparse_(given)
    with pytest.raises(NotImplementedError, match="resize_as_sparse_ writes to its arguments"):
        register_sharding(torch.Tensor.resize_as_sparse_)


@on_ranks(4)
def test_two_axes_and_partial_results() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("x", "y"))
    x = torch.randn(5, 7, dtype=torch.float64, device=device_type())
    w = torch.randn(3, 7, dtype=torch.float64, device=device_type())
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    want = torch.nn.functional.bilinear(a, a, b.unsqueeze(1).expand(3, 7, 7))
    want.square().sum().backward()

    def rule(left: Any, right: Any, weight: Any) -> Any:
        rows = ([Shard(0)], [Shard(0), Shard(0), R])
        outs = ([Shard(1)], [R, R, Shard(0)])
        sums = ([P], [R, Shard(1), Shard(2)])
        return [rows, outs, sums, ([R], [R, R, R])]

    with _registered(torch.nn.functional.bilinear, rule):
        for left, right in ((Shard(0), Shard(1)), (R, Shard(0)), (Shard(1), Shard(0))):
            dx = distribute_tensor(x, mesh, [left, right]).requires_grad_()
            dw = distribute_tensor(w, mesh, [R, R]).requires_grad_()
            got = torch.nn.functional.bilinear(dx, dx, dw.unsqueeze(1).expand(3, 7, 7))
            got.square().sum().backward()
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dx.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dw.grad.full_tensor(), b.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_the_cheapest_pair_is_chosen() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("x",))
    big, small = TensorSpec.of(mesh, [Shard(0)], (100, 4)), TensorSpec.of(mesh, [Shard(0)], (4, 2))
    results = [(100, 2)]
    by_rows, by_sum, whole = ([Shard(0)], [Shard(0), R]), ([P], [Shard(1), Shard(0)]), ([R], [R, R])
    found = choose("op", [whole, by_sum, by_rows], [big, small], [8, 8], results)
    assert found.operands == ((Shard(0),), (R,)) and found.results == ((Shard(0),),)
    assert found.vary == ((False,), (True,))
    found = choose("op", [whole, by_sum, by_rows], [big.with_placements([Shard(1)]), small], [8, 8], results)
    assert found.results == ((P,),) and found.vary == ((False,), (False,))
    replicated = [spec.with_placements([R]) for spec in (big, small)]
    assert choose("op", [whole, by_rows], replicated, [8, 8], results).results == ((R,),), "of equal ones the first"
    assert choose("op", [([Shard(-1)], [R, [Shard(-1)]])], replicated, [8, 8], results).results == ((Shard(1),),)


@on_ranks(2)
def test_what_is_refused() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("x",))
    x = distribute_tensor(torch.ones(4, 4, device=device_type()), mesh, [Shard(0)])
    s = distribute_tensor(torch.ones(4, device=device_type()), mesh, [R])
    for rule, error, text in (
        ([], ValueError, "its sharding function accepts nothing"),
        ([[R], [R]], TypeError, r"must return pairs \(\[placements of the results\], .*got \[Replicate\(\)\]"),
        ([([R], [R])], ValueError, r"1 placements \[Replicate\(\)\] for 2 tensor arguments"),
        ([([R, R], [R, R])], ValueError, "2 placements .* for 1 results"),
        ([([Shard(2)], [R, R])], ValueError, r"Shard\(2\) of a tensor with 2 dims"),
        ([([Shard(1)], [Shard(0), R])], RuntimeError, r"is \(4, 2\) on this rank; the operation returned \(2, 4\)"),
    ):
        with _registered(scaled_rows, lambda *_, rule=rule: rule), pytest.raises(error, match=text):
            scaled_rows(x, s, 1.0, 1)
    with pytest.raises(TypeError, match="_plain is a plain Python function.*torch.library.custom_op"):
        register_sharding(_plain)
    with pytest.raises(TypeError, match="an operation is needed, got str 'add'"):
        register_sharding("add")
    with pytest.raises(NotImplementedError, match=r"aten.add_.Tensor writes to its arguments"):
        register_sharding(torch.ops.aten.add_.Tensor)


def test_no_function_with_a_rule_runs_on_gathered_values() -> None:
    """The handler would be asked first and the rule never; all values would be right all the same."""
    gathered = whole.special()
    both = [name_of(f) for f in BINDINGS if f in gathered or dispatch._SPECIAL.get(f) is whole.on_whole]
    assert both == [], "take these names out of hp_dtensor/torch/ops/whole.py, or their rules out of ops/functions.py"
