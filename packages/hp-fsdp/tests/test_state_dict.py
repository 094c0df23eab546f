"""Whole tensors out of a sharded model, and into it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hp_fsdp import full_state_dict, load_full_state_dict
from hp_platform import count_collectives
from hp_platform.testing import device_type, on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_models import Net, batch, loss_of, pair, same_weights, seeded, train


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.last.weight


@on_ranks(1, 2, 3)
def test_names_order_and_values_of_the_unsharded_model():
    reference, model = pair(Buffered)
    with count_collectives() as counts:
        state = full_state_dict(model)
    assert dict(counts) == ({"all_gather": 4} if dist.get_world_size() > 1 else {})
    expected = reference.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert type(state[name]) is torch.Tensor and torch.equal(state[name], tensor) and not state[name].requires_grad
    assert state["tied.weight"] is state["last.weight"]
    state["first.weight"].zero_()
    same_weights(model, reference)


@on_ranks(2)
def test_only_the_first_rank_keeps_it():
    reference, model = pair()
    state = full_state_dict(model, rank0_only=True, cpu=True)
    assert list(state) == (list(reference.state_dict()) if dist.get_rank() == 0 else [])


@on_ranks(2)
def test_between_forward_and_backward():
    reference, model = pair()
    loss = loss_of(model(batch()[1]))
    same_weights(model, reference)
    assert not any(type(p) is nn.Parameter for p in model.parameters())
    loss.backward()
    train(*pair(), steps=1)


@on_ranks(2, 3)
def test_loads_whole_tensors():
    _, model = pair(Buffered)
    torch.manual_seed(5)
    other = Buffered().to(device_type(), torch.float64)
    load_full_state_dict(model, other.state_dict())
    same_weights(model, other)


@on_ranks(1)
def test_names_and_shapes_must_fit():
    _, model = pair()
    state = seeded(Net).state_dict()
    state["more"] = state.pop("last.bias")
    with pytest.raises(ValueError, match=r"1 names are missing \(last.bias\), 1 are not known \(more\)"):
        load_full_state_dict(model, state)
    state["last.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'last.weight' has shape \(2, 2\), the model's is \(3, 7\)"):
        load_full_state_dict(model, state, strict=False)


@on_ranks(2)
def test_sharded_state_dict_round_trips():
    reference, model = pair()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    same_weights(model, reference)
    train(reference, model, steps=1)
