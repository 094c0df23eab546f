"""A module built on meta, sharded and then initialised is the initialised module, sharded: bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_on_device,
    init_parameters,
    rand,
    randn,
    zeros,
)
from hp_platform import manual_seed
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

R = Replicate()


def _mesh():
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def _shard(model, mesh):
    seen = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in seen:
                placement = Shard(parameter.dim() - 1) if parameter.shape[-1] > 1 else R
                seen[id(parameter)] = parameter, nn.Parameter(distribute_tensor(parameter, mesh, [placement]))
            module._parameters[name] = seen[id(parameter)][1]
    return model


@on_ranks(1, 2, 3)
def test_sharded_initialisation_is_the_single_device_one():
    mesh = _mesh()
    manual_seed(5)
    with init_on_device(device_type()):
        reference = Model()
    with init_empty_weights():
        model = Model()
    assert all(p.is_meta for p in model.parameters())
    _shard(model, mesh)
    manual_seed(5)
    assert init_parameters(model) is model
    assert model.head.weight is model.embed.weight
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor) and p.requires_grad, name
        assert p.to_local().numel() <= q.numel()
        assert torch.equal(p.full_tensor(), q), name


@on_ranks(2)
def test_a_module_that_nobody_initialises_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(RuntimeError, match=r"Scale \(1\) holds \['scale'\] on meta and has no reset_parameters"):
        init_parameters(model)

    class Reset(Scale):
        def reset_parameters(self):
            nn.init.ones_(self.scale)

    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), Reset())
    init_parameters(model)
    assert model[1].scale.sum() == 3
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3))
    model.append(Scale())  # built outside of init_empty_weights()
    init_parameters(model)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1)])
def test_random_numbers_are_those_of_one_device(placement):
    mesh, device = _mesh(), device_type()
    manual_seed(11)
    want = [torch.rand(5, 4, device=device), torch.randn(5, 4, device=device)]
    x = torch.ones(5, 4, device=device)
    want += [
        nn.functional.dropout(x, 0.4),
        torch.rand_like(x),
        torch.empty_like(x).normal_(1.0, 2.0),
        torch.empty_like(x).uniform_(-1, 1),
        nn.init.kaiming_uniform_(torch.empty_like(x)),
        nn.init.trunc_normal_(torch.empty_like(x)),
        nn.init.xavier_normal_(torch.empty_like(x)),
        torch.bernoulli(x * 0.3),
        torch.randint_like(x, 9),
    ]
    after = torch.rand(3, device=device)  # plain and distributed draws are one stream
    manual_seed(11)
    options = {"device_mesh": mesh, "placements": [placement]}
    got = [rand(5, 4, **options), randn(5, 4, **options)]
    d = distribute_tensor(x, mesh, [placement])
    e = zeros(5, 4, **options)
    got += [
        nn.functional.dropout(d, 0.4),
        torch.rand_like(d),
        torch.empty_like(e).normal_(1.0, 2.0),
        torch.empty_like(e).uniform_(-1, 1),
        nn.init.kaiming_uniform_(torch.empty_like(e)),
        nn.init.trunc_normal_(torch.empty_like(e)),
        nn.init.xavier_normal_(torch.empty_like(e)),
        torch.bernoulli(d * 0.3),
        torch.randint_like(d, 9),
    ]
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.placements == (placement,), index
        assert torch.equal(one.full_tensor(), other), index
    assert torch.equal(torch.rand(3, device=device), after)


@on_ranks(2)
def test_ragged_and_partial_draws():
    mesh = _mesh()
    manual_seed(3)
    want = torch.empty(3, 2, device=device_type()).normal_()
    manual_seed(3)
    ragged = distribute_tensor(torch.zeros(3, 2, device=device_type()), mesh, [RaggedShard((0, 1), (1, 5))])
    assert torch.equal(ragged.normal_().full_tensor(), want)
    partial = DTensor.from_local(torch.zeros(2, device=device_type()), mesh, [Partial()])
    with pytest.raises(RuntimeError, match="a partial value can't be drawn"):
        partial.normal_()
    partial.reduce_partial().normal_()


@on_ranks(2)
def test_generators_that_differ_are_found_before_shards_disagree():
    mesh = init_device_mesh(device_type(), (1, 2), ("unseeded", "tp"))
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(RuntimeError, match=r"generators differ.*call hp_platform.manual_seed\(seed\)"):
        rand(4, device_mesh=mesh, placements=[R, Shard(0)])
    manual_seed(3)
    assert rand(4, device_mesh=mesh, placements=[R, Shard(0)]).shape == (4,)
