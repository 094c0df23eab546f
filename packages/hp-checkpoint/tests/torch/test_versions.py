"""A load is an operation in place, for autograd and for what keeps tensors for a backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_checkpoint import Checkpointer, CheckpointError, load, load_model, save
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_offload import checkpoint
from hp_testing import device_type, on_ranks


def saved(tmp_path, dtype=torch.float32):
    save({"model": {"w": torch.arange(4.0, dtype=dtype)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_a_load_makes_a_new_version(tmp_path):
    """Of the tensor's own memory, of another memory layout, and of one that is cast."""
    folder = saved(tmp_path)
    weight = nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    load({"model": {"w": weight}}, checkpoint_id=folder, no_dist=True)
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0] and weight._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    strided = torch.zeros(8)[::2]
    load({"model": {"w": strided}}, checkpoint_id=folder, no_dist=True)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    load_model(model, folder, cast=True)
    assert strided.tolist() == model.w.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert strided._version and model.w._version


def test_state_dict_shares_the_version(tmp_path):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4))
    loss = (model.w * model.w).sum()
    load({"model": model.state_dict()}, checkpoint_id=saved(tmp_path), no_dist=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_region_that_is_computed_again_hears_of_it(tmp_path):
    folder = saved(tmp_path)
    weight, x = nn.Parameter(torch.ones(4)), torch.full((4,), 0.3, requires_grad=True)
    out = checkpoint(lambda each: (each * weight).sin(), x)
    load({"model": {"w": weight}}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(RuntimeError, match="modified"):
        out.sum().backward()


def test_a_load_that_fails_in_the_middle_makes_one_too(tmp_path):
    folder = tmp_path / "c"
    save({"model": {"w": torch.arange(1e5)}}, checkpoint_id=folder, no_dist=True)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    weight = torch.ones(100_000)
    with pytest.raises(CheckpointError, match="Tensors may have been changed in part"):
        load({"model": {"w": weight}}, checkpoint_id=folder, no_dist=True)
    assert weight[1:9].tolist() == [*range(1, 9)] and weight._version


@on_ranks(2)
def test_a_sharded_tensor_has_a_new_version(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    w = nn.Parameter(distribute_tensor(torch.ones(4, device=device_type()), mesh, [Shard(0)]))
    save({"model": {"w": w}}, checkpoint_id=tmp_path / "c")
    loss = (w * w).sum()
    load({"model": {"w": w}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_have_no_version(tmp_path):
    folder = saved(tmp_path)
    with torch.inference_mode():
        own = torch.ones(4)
        load({"model": {"w": own}}, checkpoint_id=folder, no_dist=True)
    assert own.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tied_weights_of_a_state_dict_are_one_tensor(tmp_path):
    """Its values are new tensor objects of the same memory."""
    untied, tied = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2))
    tied[1].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    Checkpointer(tmp_path, background=False).save(1, untied)
    folder = tmp_path / "step-00000001"
    for load_it in (lambda: load({"model": tied.state_dict()}, checkpoint_id=folder), lambda: load_model(tied, folder)):
        with pytest.raises(ValueError, match="'0.weight' and '1.weight' are one tensor here, and have different"):
            load_it()
    assert torch.equal(tied[0].weight, before)
    save({"model": tied.state_dict()}, checkpoint_id=tmp_path / "tied")
    with torch.no_grad():
        tied[0].weight.zero_()
    load({"model": tied.state_dict()}, checkpoint_id=tmp_path / "tied")
    assert torch.equal(tied[0].weight, before)
