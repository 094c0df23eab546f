"""What an operation reads is what its operands hold now, however they were written."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, SkipDTensorDispatch, distribute_tensor, init_device_mesh
from hp_dtensor.torch.dtensor import redistribute_shared
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
R = Replicate()


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device_type())


def placed(whole: torch.Tensor, placement: Any) -> Any:
    return distribute_tensor(whole, init_device_mesh(device_type(), (2,)), [placement])


def close(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, expected, rtol=1e-12, atol=1e-12)


def exchange(w: Any) -> None:
    w.data = w.data * 2


def in_local_mode(w: Any) -> None:
    with SkipDTensorDispatch(), torch.no_grad():
        w.data.mul_(2)


WRITES: dict[str, Callable[[Any], Any]] = {
    "data": lambda w: w.data.mul_(2),
    "data =": exchange,
    "to_local().data": lambda w: (w.to_local() if isinstance(w, DTensor) else w).data.mul_(2),
    "numpy": lambda w: (w.to_local() if isinstance(w, DTensor) else w).detach().cpu().numpy().__imul__(2),
    "data of a view": lambda w: w.t().data.mul_(2),
    "data of detach": lambda w: w.detach().data.mul_(2),
    "local mode": in_local_mode,
}
CPU_ONLY = ("numpy",)


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("watched", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("place", [Shard(0), Shard(1)], ids=str)
def test_a_weight_written_past_its_version_counter(write: str, watched: bool, place: Any) -> None:
    if write in CPU_ONLY and device_type() != "cpu":
        return
    a, w = rand(16, 5), rand(5, 7)  # the weight is what moves
    given, weight = placed(a, Shard(0)), placed(w, place)
    plain = w.clone().requires_grad_(watched)
    weight.requires_grad_(watched)
    for _ in range(3):
        close(given @ weight, a @ plain)
        WRITES[write](weight)
        WRITES[write](plain)


@on_ranks(2)
def test_a_layer_in_a_loop_of_evaluation() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, dtype=torch.float64, device=device_type())
    x, plain = rand(16, 6), [p.detach().clone() for p in layer.parameters()]
    for name, parameter in list(layer.named_parameters()):
        layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    given = placed(x, Shard(0))
    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        for _ in range(2):
            with mode():
                close(layer(given), F.linear(x, *plain))
            for mine, other in zip(layer.parameters(), plain, strict=True):
                mine.data.add_(1)
                other.data.add_(1)


@on_ranks(2)
@pytest.mark.parametrize("watched", [False, True], ids=["no gradients", "gradients"])
def test_a_buffer_of_inputs_that_is_filled_again(watched: bool) -> None:
    """As a parallel style takes its input: a plain tensor, this rank's part."""
    mesh, whole = init_device_mesh(device_type(), (2,)), rand(4, 6)
    buffer = placed(whole, Shard(0)).to_local().clone().requires_grad_(watched)
    src = placed(whole, Shard(0))._spec
    for step in range(3):
        made = redistribute_shared(buffer, src.with_placements([R]), src)
        close(made.detach(), whole + step)
        buffer.data.add_(1)
    x = placed(whole, Shard(0)).requires_grad_(watched)
    for step in range(3):
        made = redistribute_shared(x, src.with_placements([R]))
        close(made.detach(), whole + step)
        x.data.add_(1)
    assert mesh.size() == 2


@on_ranks(2)
def test_a_value_in_a_graph_is_moved_once_until_its_memory_is_handed_out() -> None:
    x, weights = rand(4, 6), [rand(8, 6) for _ in range(3)]
    leaf = placed(x, Shard(0)).requires_grad_()
    hidden = leaf * 1.0
    q, k, v = (placed(w, Shard(0)) for w in weights)
    with count_collectives() as forward:
        out = [F.linear(hidden, w) for w in (q, k, v)]
    assert dict(forward) == {"all_gather": 1}
    loss = torch.stack([each.square().sum() for each in out]).sum()
    with count_collectives() as backward:
        loss.backward()
    assert dict(backward) == {"reduce_scatter": 1}
    plain = x.clone().requires_grad_()
    sum(F.linear(plain, w).square().sum() for w in weights).backward()
    close(leaf.grad, plain.grad)
    hidden, h = leaf * 1.0, x * 1.0
    for get in (lambda t: t.data, lambda t: t.to_local() if isinstance(t, DTensor) else t):
        close(F.linear(hidden, q).detach(), F.linear(h, weights[0]))
        get(hidden).data.mul_(2)
        get(h).data.mul_(2)
    close(F.linear(hidden, q).detach(), F.linear(h, weights[0]))


@on_ranks(2)
@pytest.mark.parametrize("place", [Shard(0), R], ids=str)
def test_a_value_that_left_its_graph(place: Any) -> None:
    """``detach_`` counts no version, and what is read afterwards has no gradient."""
    x, w = rand(4, 6), rand(8, 6)
    leaf, plain = placed(x, place).requires_grad_(), x.clone().requires_grad_()
    for a, b in ((leaf, placed(w, Shard(0))), (plain, w)):
        hidden = a * 1.0
        first = F.linear(hidden, b).sum()
        hidden.detach_()
        assert not F.linear(hidden, b).requires_grad
        first.backward()
    close(leaf.grad, plain.grad)


@on_ranks(2)
def test_a_source_written_after_it_was_redistributed() -> None:
    """The gradient of what was redistributed goes to the source as it was then."""
    x, w = rand(4, 6), rand(8, 6)
    leaf, weight = placed(x, Shard(0)).requires_grad_(), placed(w, Shard(0))
    plain = x.clone().requires_grad_()
    hidden, h = leaf * 1.0, plain * 1.0
    whole, same = hidden.redistribute(placements=[R]), h * 1.0
    hidden.mul_(3.0)
    h.mul_(3.0)
    F.linear(whole, weight).square().sum().backward()
    F.linear(same, w).square().sum().backward()
    close(leaf.grad, plain.grad)


@on_ranks(2)
@pytest.mark.parametrize("place", [Shard(0), R], ids=str)
def test_what_is_kept_goes_with_its_value(place: Any) -> None:
    """Without a backward, too."""
    leaf, weight = placed(rand(4, 6), place).requires_grad_(), placed(rand(8, 6), Shard(0))
    hidden = leaf * 1.0
    F.linear(hidden, weight), F.linear(hidden, weight), hidden[1:3].mul_(2.0)
    alive = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert alive() is None


@on_ranks(2)
@pytest.mark.parametrize("plain", [False, True])
def test_what_readers_share_is_kept_for_a_few(plain: bool) -> None:
    leaf = placed(rand(4, 6), Shard(0)).requires_grad_()
    src, alive = leaf._spec, []
    for _ in range(6):
        hidden = leaf.to_local() * 1.0 if plain else leaf * 1.0
        read = [redistribute_shared(hidden, src.with_placements([R]), src if plain else None) for _ in range(2)]
        assert read[0] is read[1]
        alive.append(weakref.ref(hidden))
    made = read[0].sum()
    del hidden, read
    gc.collect()
    assert [each() is None for each in alive] == [True, True, False, False, False, False]
    made.backward()
    del made
    gc.collect()
    assert all(each() is None for each in alive)
