"""Whole tensors out of a sharded model and into it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_cells import Net, batch, close, pair, same_weights, seeded, world

from hp_dtensor import DTensor, init_device_mesh
from hp_fsdp import full_state_dict, fully_shard, load_full_state_dict
from hp_platform import count_collectives
from hp_platform.testing import device_type, on_ranks


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", Tensor(np.arange(3, dtype=np.float32)))
        self.tied = self.last

    def construct(self, x):
        return super().construct(x) + self.offset


@on_ranks(2, 4)
def test_round_trip():
    reference, model = pair(Buffered)
    with count_collectives() as counted:
        state = full_state_dict(model)
    assert dict(counted) == {"all_gather": 4}
    assert all(type(tensor) is Tensor for tensor in state.values())
    same_weights(model, reference, 0.0)
    assert state["tied.weight"] is state["last.weight"]
    scaled = {name: Tensor(tensor.asnumpy() * 2) for name, tensor in state.items()}
    load_full_state_dict(model, scaled)
    assert all(isinstance(parameter, DTensor) for parameter in model.get_parameters())
    for name, tensor in full_state_dict(model).items():
        close(tensor.asnumpy(), scaled[name].asnumpy(), name, 0.0)
    for name, value in reference.state_dict().items():
        if isinstance(value, Parameter) and not name.startswith("tied"):
            value.set_data(scaled[name])
    reference._buffers["offset"] = scaled["offset"]
    close(model(batch()[1]).asnumpy(), reference(batch()[1]).asnumpy(), "output")


@on_ranks(2)
def test_first_rank_only_and_strictness():
    _, model = pair()
    state = full_state_dict(model)
    assert bool(full_state_dict(model, rank0_only=True, cpu=True)) == (world()[0] == 0)
    missing = dict(state)
    missing["unknown"] = missing.pop("first.bias")
    with pytest.raises(ValueError, match=r"1 names are missing \(first.bias\), 1 are not known \(unknown\)"):
        load_full_state_dict(model, missing)
    load_full_state_dict(model, missing, strict=False)
    with pytest.raises(ValueError, match=r"'first.bias' has shape \(3,\), the model's is \(7,\)"):
        load_full_state_dict(model, {**state, "first.bias": Tensor(np.zeros(3, np.float32))})


@on_ranks(4)
def test_between_meshes():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    _, source = pair()
    target = fully_shard(seeded(Net), mesh)
    doubled = {name: tensor * 2 for name, tensor in full_state_dict(source).items()}
    load_full_state_dict(target, doubled)
    for name, tensor in full_state_dict(target).items():
        close(tensor.asnumpy(), doubled[name].asnumpy(), name, 0.0)
