"""Checkpoints of torch.distributed.checkpoint: read in any layout, and nothing in them is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_layouts import choose_placements, choose_shape

from hp_checkpoint import InvalidCheckpointError, load, load_model
from hp_checkpoint.disk.files import Chunk, Entry, Kind, check_cover
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:torch.distributed is disabled")


def test_enumerations_as_older_pythons_pickle_them(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 write getattr of the class and the name."""
    kinds = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kinds, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["w"], torch.arange(3.0))


def test_dcp_written_by_one_process_loads(tmp_path):
    """Nested values, lists and dtypes; what is no plain value is refused if it is asked for."""
    torch.manual_seed(0)
    w = torch.randn(5, 7)
    tensors = {"w": w, "b": torch.randn(3).bfloat16(), "n": torch.arange(6)[::2], "e": torch.zeros(0, 2)}
    state = {"model": tensors, "step": 7, "rates": [0.5, {"a": None}], "own": np.float64(1.0), "more": [w + 1]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    new = {"model": {name: torch.zeros_like(each) for name, each in tensors.items()}, "step": 0, "rates": [0, {"a": 1}]}
    new["more"] = [torch.zeros(5, 7)]
    load(new, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(new["model"][name], each) for name, each in tensors.items())
    assert new["step"] == 7 and new["rates"] == [0.5, {"a": None}] and torch.equal(new["more"][0], w + 1)
    with pytest.raises(ValueError, match=r"'own' can't be read: .* is a pickle that names numpy.*, which is ref"):
        load({"own": 0}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match="lacks 1 of 1 tensors: 'v'"):
        load({"model": {"v": torch.zeros(1)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)


@on_ranks(4)
def test_any_layout_loads_from_any_other(tmp_path):
    """What torch's DTensors have saved; each byte of the elements is read about once."""
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor as distribute

    choice = random.Random(5)
    one, own = torch_mesh(device_type(), (2, 2)), init_device_mesh(device_type(), (2, 2))
    truth, saved, new = {}, {}, {}
    for number in range(12):
        shape = choose_shape(choice.choice)
        array = np.random.default_rng(number).standard_normal(shape).astype("f4")
        dims = range(len(shape))
        placements = [TorchShard(choice.choice(dims)) if shape else TorchReplicate(), TorchReplicate()]
        truth[f"t{number}"], saved[f"t{number}"] = array, distribute(as_tensor(array), one, placements)
        empty = as_tensor(np.zeros_like(array))
        new[f"t{number}"] = distribute_tensor(empty, own, choose_placements(choice.choice, shape, (2, 2)))
    dcp.save({"model": saved}, checkpoint_id=tmp_path / "dcp")
    load({"model": new}, checkpoint_id=tmp_path / "dcp")
    for name, array in truth.items():
        assert as_array(new[name].full_tensor()).tobytes() == array.tobytes(), (name, new[name].placements)


@on_ranks(2)
def test_each_byte_is_read_once(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor as distribute

    array = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    saved = distribute(as_tensor(array), torch_mesh(device_type(), (2,)), [TorchShard(0)])
    dcp.save({"weight": saved}, checkpoint_id=tmp_path / "dcp")
    model = torch.nn.Linear(512, 512, bias=False)
    mesh = init_device_mesh(device_type(), (2,))
    model.weight = torch.nn.Parameter(distribute_tensor(as_tensor(np.zeros_like(array)), mesh, [Shard(1)]))
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda *arguments: counts.append(preadv(*arguments)) or counts[-1])
        load_model(model, tmp_path / "dcp")
    read = as_tensor(np.array([sum(counts)], np.int64))
    get_platform().collectives.all_reduce(read, group=get_platform().groups.default_group())
    assert array.nbytes <= int(as_array(read)[0]) < array.nbytes + 100_000
    assert (as_array(model.weight.full_tensor()) == array).all()


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_damage_and_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dcp"
    new = {"w": torch.zeros(100)}

    def saved():
        dcp.save({"w": torch.randn(100), "x": torch.zeros(3)}, checkpoint_id=folder, no_dist=True)
        return folder / "__0_0.distcp", (folder / "__0_0.distcp").read_bytes()

    file, content = saved()
    file.write_bytes(content[:1500])
    with pytest.raises(InvalidCheckpointError, match=r"'w' is said to be at .* of 1500 bytes: the file is cut"):
        load(new, checkpoint_id=folder, no_dist=True)
    file.write_bytes(b"x" * len(content))
    with pytest.raises(InvalidCheckpointError, match="'w' is no archive of torch.save"):
        load(new, checkpoint_id=folder, no_dist=True)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidCheckpointError, match="metadata is a pickle that names posix.system, which is refused"):
        load(new, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(metadata[:100])
    with pytest.raises(InvalidCheckpointError, match="metadata is damaged: "):
        load(new, checkpoint_id=folder, no_dist=True)
    file.write_bytes(content)
    own = pickle.loads(metadata)
    own.state_dict_metadata["w"].chunks[0].sizes = torch.Size([99])
    (folder / ".metadata").write_bytes(pickle.dumps(own))
    with pytest.raises(InvalidCheckpointError, match=r"has \[100\], expected a tensor of shape \[99\]"):
        load(new, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(metadata)
    damaged = random.Random(0)
    for _ in range(40):  # no traceback of a parser, and nothing of a pickle runs
        changed = bytearray(metadata)
        changed[damaged.randrange(len(changed))] ^= 1 << damaged.randrange(8)
        (folder / ".metadata").write_bytes(changed)
        try:
            load({"w": torch.zeros(100)}, checkpoint_id=folder, no_dist=True)
        except (InvalidCheckpointError, ValueError, FileNotFoundError):
            pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 2)), ((2, 2), (2, 1))], ""),
        ([((2, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (1, 1))], "of 9 elements"),
        ([((0, 0), (4, 2)), ((0, 2), (2, 2))], r"chunk of \[2, 2\]"),
    ],
)
def test_chunks_have_to_be_the_tensor(tmp_path, boxes, fault):
    entry = Entry("w", Kind("F32", (4, 3)), "", 0)
    chunks = [Chunk(offsets, sizes, "file", 0, (sizes[1], 1)) for offsets, sizes in boxes]
    with pytest.raises(InvalidCheckpointError, match=fault) if fault else contextlib.nullcontext():
        check_cover(str(tmp_path), entry, chunks)
