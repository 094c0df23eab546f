"""Draws of every kind and layout: the bits of one device, and generators that stay in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import (
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    empty,
    init_device_mesh,
    rand,
    randn,
)
from hp_platform import manual_seed
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

R, P = Replicate(), Partial()
LAYOUTS = {
    2: [(R,), (Shard(0),), (Shard(1),), (StridedShard(1, 2),), (RaggedShard((0, 1), (7, 13)),)],
    3: [(Shard(0),), (Shard(1),), (RaggedShard((0, 1), (0, 19, 1)),)],
    4: [(Shard(0), Shard(1)), (Shard(1), Shard(1)), (StridedShard(1, 2), Shard(1)), (R, Shard(0))],
}
MESHES = {2: (2,), 3: (3,), 4: (2, 2)}

FILLS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.normal_(),
    "normal_ keywords": lambda x: x.normal_(mean=2.0, std=0.1),
    "uniform_": lambda x: x.uniform_(-3, 4),
    "exponential_": lambda x: x.exponential_(2.0),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(3, 17),
    "random_ to": lambda x: x.random_(17),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 2, 40),
    "randint_like keyword": lambda x: torch.randint_like(x, high=40),
    "randint_like int": lambda x: torch.randint_like(x, 40, dtype=torch.int64),
    "dropout": lambda x: F.dropout(x.fill_(1.0), 0.3),
    "dropout default": lambda x: F.dropout(x.fill_(1.0)),
    "dropout in place": lambda x: F.dropout(x.fill_(1.0), 0.3, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x.fill_(1.0), 0.3, True),
    "dropout all": lambda x: F.dropout(x.fill_(1.0), 1.0),
    "module": lambda x: nn.Dropout(0.25)(x.fill_(2.0)),
    "bernoulli": lambda x: torch.bernoulli(x.fill_(0.3)),
    "bernoulli method": lambda x: x.fill_(0.3).bernoulli(),
    "init.normal_": lambda x: nn.init.normal_(x, std=0.02),
    "init.normal_ keyword": lambda x: nn.init.normal_(tensor=x, mean=1.0),
    "init.uniform_": lambda x: nn.init.uniform_(x, -1, 1),
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.04, b=0.04),
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x, mode="fan_out"),
    "init.xavier_uniform_": lambda x: nn.init.xavier_uniform_(x, gain=2.0),
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.zeros_": nn.init.zeros_,
    "init.ones_": nn.init.ones_,
    "init.constant_": lambda x: nn.init.constant_(x, 3.0),
}


@pytest.mark.smoke
@on_ranks(2, 3, 4)
def test_bits_are_those_of_one_device(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), MESHES[ranks])
    for placements in LAYOUTS[ranks]:
        for name, fill in FILLS.items():
            what = f"{name} placed {placements}"
            manual_seed(13)
            expected = fill(torch.zeros(5, 4, device=device_type(), dtype=torch.float64))
            after = torch.rand(2, device=device_type())
            manual_seed(13)
            given = empty(5, 4, device_mesh=mesh, placements=placements, dtype=torch.float64)
            made = fill(given)
            assert made.dtype == expected.dtype and made.shape == expected.shape, what
            assert torch.equal(made.full_tensor(), expected), what
            assert torch.equal(torch.rand(2, device=device_type()), after), f"{what}: the stream goes on elsewhere"
            if name.endswith("_") or "in place" in name:
                assert made is given and made.placements == placements, what


@on_ranks(2, 3)
def test_gradient_of_dropout(ranks: int) -> None:
    mesh = init_device_mesh(device_type(), (ranks,))
    x = torch.arange(20.0, dtype=torch.float64, device=device_type()).reshape(5, 4)
    manual_seed(3)
    plain = x.clone().requires_grad_()
    (F.dropout(plain, 0.4) * x).sum().backward()
    for placement in (R, Shard(0), Shard(1), P):
        manual_seed(3)
        given = distribute_tensor(x, mesh, [placement]).requires_grad_()
        (F.dropout(given, 0.4) * distribute_tensor(x, mesh, [R])).sum().backward()
        assert torch.equal(given.grad.full_tensor(), plain.grad), placement


@on_ranks(2)
def test_dropout_that_drops_nothing() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(torch.ones(4, device=device_type()), mesh, [P])
    manual_seed(3)
    state = torch.get_rng_state()
    assert F.dropout(x, 0.5, training=False) is x and nn.Dropout(0.0)(x) is x and nn.Dropout(0.5).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got 1.5"):
        F.dropout(x, 1.5)


@on_ranks(2)
def test_factories_draw_like_torch() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for factory, plain in ((rand, torch.rand), (randn, torch.randn)):
        manual_seed(1)
        expected = plain(3, 5, device=device_type(), dtype=torch.float64)
        manual_seed(1)
        made = factory(3, 5, device_mesh=mesh, placements=[Shard(1)], dtype=torch.float64, requires_grad=True)
        assert torch.equal(made.full_tensor(), expected) and made.requires_grad and made.is_leaf


ON_WHOLES: dict[str, Callable[[Any], Any]] = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "bernoulli": lambda x: torch.bernoulli(x, 0.5),
    "normal": lambda x: torch.normal(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x[:, :, 0], 3),
    "orthogonal_": lambda x: nn.init.orthogonal_(x),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ON_WHOLES)
def test_random_functions_on_whole_tensors_draw_what_one_device_draws(name: str) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.arange(1.0, 49.0, device=device_type()).reshape(4, 6, 2)
    manual_seed(3)
    expected = ON_WHOLES[name](whole.clone())
    for dim in range(3):
        manual_seed(3)
        made = ON_WHOLES[name](distribute_tensor(whole, mesh, [Shard(dim)]))
        assert torch.equal(made.full_tensor(), expected)


@on_ranks(2)
def test_attention_with_dropout_on_shards_says_that_it_is_not_supported() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    q = distribute_tensor(torch.ones(2, 4, 3, 2, device=device_type()), mesh, [Shard(1)])
    for probability in (0.0, 0.5):  # the first call's plan serves the second
        if probability:
            with pytest.raises(NotImplementedError, match=r"with dropout_p=0.5 on \(Shard\(1\),\)"):
                F.scaled_dot_product_attention(q, q, q, dropout_p=probability)
        else:
            F.scaled_dot_product_attention(q, q, q, dropout_p=probability)
    whole = torch.arange(48.0, device=device_type()).reshape(2, 4, 3, 2).sin()
    manual_seed(5)
    expected = eager_attention(whole)
    manual_seed(5)
    made = eager_attention(distribute_tensor(whole, mesh, [Shard(1)]))
    assert made.placements == (Shard(1),)
    torch.testing.assert_close(made.full_tensor(), expected)


def eager_attention(q: Any) -> Any:
    """Attention of one tensor to itself, written out."""
    return F.dropout((q @ q.mT / q.shape[-1] ** 0.5).softmax(-1), 0.5) @ q


@on_ranks(2)
def test_meta_tensors_draw_nothing() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("never drawn on",))
    x = distribute_tensor(torch.empty(4, 6, device="meta"), mesh, [Shard(0)])
    manual_seed(5)
    state = torch.get_rng_state()
    assert nn.init.normal_(x) is x and x.uniform_().is_meta and torch.rand_like(x).is_meta
    assert torch.equal(torch.get_rng_state(), state)
