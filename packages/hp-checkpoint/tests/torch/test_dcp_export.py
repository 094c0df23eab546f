"""Checkpoints of torch.distributed.checkpoint that are written here, and those of torch's ranks under the tools."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_layouts import choose_placements, choose_shape
from safetensors.torch import load_file

from hp_checkpoint import load, save
from hp_checkpoint.extend import diff, to_hugging_face
from hp_checkpoint.formats import dcp_export
from hp_checkpoint.formats.dcp_export import Call, Name, blocks, pickled, to_dcp
from hp_dtensor import distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_tensor, device_type, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:torch.distributed is disabled")
KINDS = "float64 float16 bfloat16 uint16 uint64 int8 bool complex64 float8_e4m3fn".split()


def test_torch_loads_what_one_process_saved(tmp_path):
    """Dtypes, a tied tensor, an empty one and a scalar; values as they were; the model alone in another dtype."""
    w = torch.randn(5, 7)
    model = {"w": w, "tied": w, "empty": torch.zeros(0, 2), "scalar": torch.tensor(3.0)}
    model |= {kind: (torch.arange(6) % 2).to(getattr(torch, kind)) for kind in KINDS}
    values = {"step": 2**40, "rates": [0.5, {"a": None}], "list": [1, -math.inf, "\u00fc"], "pair": (1, True)}
    save({"model": model, "more": [w + 1], **values}, checkpoint_id=tmp_path / "own", no_dist=True)
    assert to_dcp(tmp_path / "own", tmp_path / "dcp") == [".metadata", "__0_0.distcp"]
    state = {"model": {name: torch.zeros_like(each) for name, each in model.items()}, "more": [torch.zeros(5, 7)]}
    state |= {"step": 0, "rates": [0, {"a": 1}], "list": [], "pair": ()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, each in model.items():
        got = state["model"][name]
        assert got.reshape(-1).view(torch.uint8).tolist() == each.reshape(-1).view(torch.uint8).tolist(), name
    assert torch.equal(state["more"][0], w + 1)
    assert {name: state[name] for name in values} == values
    for name in ("float8_e4m3fn", "tied"):
        del model[name]
    save({"model": model, "step": 1}, checkpoint_id=tmp_path / "own", no_dist=True)
    to_dcp(tmp_path / "own", tmp_path / "weights", dtype="bfloat16", weights_only=True)
    new = {"w": torch.zeros(5, 7, dtype=torch.bfloat16), "int8": torch.zeros(6, dtype=torch.int8)}
    dcp.load(new, checkpoint_id=tmp_path / "weights", no_dist=True)
    assert torch.equal(new["w"], w.bfloat16()) and torch.equal(new["int8"], model["int8"])
    names = dcp.FileSystemReader(tmp_path / "weights").read_metadata().state_dict_metadata
    assert names.keys() == model.keys()


@on_ranks(4)
def test_torch_loads_its_shards_of_what_ranks_saved(tmp_path, monkeypatch):
    """From any layout of ours into torch's DTensors, chunk by chunk; then what torch's ranks write, by the tools."""
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor as distribute

    monkeypatch.setattr(dcp_export.blocks, "__defaults__", (64,))  # bytes of a chunk
    monkeypatch.setattr(dcp_export, "_FILE", 3_000)
    choice = random.Random(3)
    one, own = torch_mesh(device_type(), (2, 2)), init_device_mesh(device_type(), (2, 2))
    truth, saved, new = {}, {}, {}
    for number in range(8):
        shape = choose_shape(choice.choice)
        array = np.random.default_rng(number).standard_normal(shape).astype("f4")
        truth[f"t{number}"] = array
        saved[f"t{number}"] = distribute_tensor(as_tensor(array), own, choose_placements(choice.choice, shape, (2, 2)))
        placements = [TorchShard(choice.choice(range(len(shape)))) if shape else TorchReplicate(), TorchReplicate()]
        new[f"t{number}"] = distribute(as_tensor(np.zeros_like(array)), one, placements)
    save({"model": saved, "step": 3}, checkpoint_id=tmp_path / "own")
    leads = get_platform().groups.rank() == 0
    if leads:
        assert len(to_dcp(tmp_path / "own", tmp_path / "dcp")) > 2
    get_platform().collectives.barrier()
    state = {"model": new, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["step"] == 3
    for name, array in truth.items():
        assert new[name].full_tensor().cpu().numpy().tobytes() == array.tobytes(), (name, new[name].placements)
    dcp.save({**state, "rate": 0.5}, checkpoint_id=tmp_path / "torch")
    if leads:
        assert len(list((tmp_path / "torch").glob("*.distcp"))) == 4
        assert [str(each.name) for each in diff(tmp_path / "own", tmp_path / "torch")] == ["state.rate"]
        to_hugging_face(tmp_path / "torch", tmp_path / "model")
        found = load_file(tmp_path / "model" / "model.safetensors")
        assert all(found[name].numpy().tobytes() == array.tobytes() for name, array in truth.items())
    get_platform().collectives.barrier()
    with torch.no_grad():
        new["t0"].to_local().add_(1)
    dcp.save(state, checkpoint_id=tmp_path / "changed")
    if leads:
        differences = diff(tmp_path / "torch", tmp_path / "changed")
        assert [each.name for each in differences] == ["model: t0", "state.rate"]
        assert differences[0].text.startswith(
            f"{truth['t0'].size:,} of {truth['t0'].size:,} elements differ, by up to 1"
        )


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (2, 3, 4), (1, 100), (5, 1, 3)])
@pytest.mark.parametrize("limit", [1, 8, 20, 50, 1000])
def test_blocks_follow_each_other_and_are_the_tensor(shape, limit):
    array = np.arange(math.prod(shape)).reshape(shape)
    parts = []
    for offsets, sizes in blocks(shape, 4, limit):
        assert len(offsets) == len(shape) and (math.prod(sizes) * 4 <= max(limit, 4))
        parts.append(array[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))].reshape(-1))
    assert np.concatenate(parts).tolist() == array.reshape(-1).tolist()


def test_pickles_are_read_by_python():
    value = {"a": [0, -1, 2**31, -(2**63), 2**80, 1.5, None, True, False], (1, ()): {"\u00fc\n": []}}
    assert pickle.loads(pickled(value)) == value
    assert pickle.loads(pickled([Call(Name("builtins", "complex"), (1.0, 2.0))])) == [1 + 2j]
    with pytest.raises(TypeError, match="is a set, which is not written into a pickle"):
        pickled({1})


def test_a_state_survives_both_conversions(tmp_path):
    """A checkpoint of ours, as torch's, loaded here again."""
    state = {"model": {"w": torch.randn(3, 4)}, "optimizer": {"w": {"m": torch.ones(2), "step": 4}}}
    save(state, checkpoint_id=tmp_path / "own", no_dist=True)
    to_dcp(tmp_path / "own", tmp_path / "dcp")
    assert diff(tmp_path / "own", tmp_path / "dcp") == []
    new = {"model": {"w": torch.zeros(3, 4)}, "optimizer": {"w": {"m": torch.zeros(2), "step": 0}}}
    load(new, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(new["model"]["w"], state["model"]["w"]) and new["optimizer"]["w"]["step"] == 4
