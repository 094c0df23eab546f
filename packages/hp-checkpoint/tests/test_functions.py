"""The names that a program of torch.distributed.checkpoint knows, on any framework: each option does what it says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hp_checkpoint import (
    Checkpointer,
    CheckpointError,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    InvalidCheckpointError,
    StandardLoadPlanner,
    StandardSavePlanner,
    async_save,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    load,
    load_checkpoint,
    parse_checkpoint_from_huggingface,
    save,
    save_checkpoint,
    save_state_dict_as_huggingface_format,
)
from hp_checkpoint.api import bytes_of
from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

W = np.arange(24, dtype=np.float32).reshape(4, 6)


def state_of(array=W, step=3):
    return {"model": {"w": as_tensor(array), "b": as_tensor(array[0])}, "step": step}


def zeros(step=0):
    return state_of(np.zeros_like(W), step)


def test_a_writer_and_a_reader_name_the_folder(tmp_path):
    writer, reader = FileSystemWriter(tmp_path / "a"), FileSystemReader(tmp_path / "a")
    save(state_of(), storage_writer=writer, planner=StandardSavePlanner(), no_dist=True)
    state = zeros()
    load(state, checkpoint_id=tmp_path / "a", storage_reader=reader, planner=StandardLoadPlanner(), no_dist=True)
    assert state["step"] == 3 and as_array(state["model"]["w"]).tolist() == W.tolist()
    async_save(state_of(step=4), storage_writer=writer, no_dist=True).get_result(60)
    load(state, storage_reader=reader, no_dist=True, broadcast_replicated_tensors=False)
    assert state["step"] == 4
    with pytest.raises(FileExistsError, match="a exists, and overwrite is False"):
        save(state_of(), storage_writer=FileSystemWriter(tmp_path / "a", overwrite=False), no_dist=True)
    small = FileSystemWriter(tmp_path / "b", overwrite=False, max_shard_size=100)
    assert (
        len({entry.file for entry in save(state_of(), storage_writer=small, no_dist=True).parts["model"].values()}) == 2
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "no folder is given; pass checkpoint_id"),
        (
            {"checkpoint_id": "a", "storage_writer": FileSystemWriter("b")},
            ValueError,
            "checkpoint_id is .*a, and Fil.*b",
        ),
        ({"storage_writer": FileSystemReader("b")}, TypeError, "FileSystemReader, expected FileSystemWriter"),
        ({"checkpoint_id": "a", "planner": StandardLoadPlanner()}, TypeError, "expected hp_checkpoint.StandardSavePl"),
        ({"checkpoint_id": "a", "use_collectives": False}, ValueError, "use_collectives=False, but the ranks write"),
        (
            {"storage_writer": FileSystemWriter("b", max_shard_size="5 apples")},
            ValueError,
            "'5 apples': expected bytes",
        ),
    ],
)
def test_a_save_refuses_what_it_would_ignore(options, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for function in (save, async_save):
        with pytest.raises(error, match=text):
            function(state_of(), no_dist=True, **options)
    assert not list(tmp_path.iterdir())
    for given in ({"checkpoint_id": "a"}, {"storage_writer": FileSystemWriter("b", max_shard_size="5GB")}):
        save(state_of(), no_dist=True, **given)
    load(state := zeros(), checkpoint_id="b", no_dist=True)
    assert state["step"] == 3


@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["s3://bucket/c", "memory://c", Path("gs://bucket/c"), "file:///c"])
def test_a_url_is_no_folder(tmp_path, monkeypatch, place):
    """It would be a local folder of that name; all ranks raise, also where one alone has it."""
    monkeypatch.chdir(tmp_path)
    rank, size = get_platform().groups.rank(), get_platform().groups.size()
    calls = [
        lambda at: save(state_of(), checkpoint_id=at),
        lambda at: save(state_of(), storage_writer=FileSystemWriter(at)),
        lambda at: async_save(state_of(), checkpoint_id=at),
        lambda at: load(state_of(), checkpoint_id=at),
        lambda at: save_state_dict_as_huggingface_format(at, state_of()["model"]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is a URL; checkpoints are read and written in folders alone. Mount the"):
            call(place)
        if size > 1:
            with pytest.raises(CheckpointError, match=r"on . of 2 ranks: rank .*1: .* is a URL; checkpoints"):
                call(place if rank else tmp_path / "c")
    alone = [load_checkpoint, dcp_to_full_state_dict, parse_checkpoint_from_huggingface, Checkpointer]
    for function in alone:
        with pytest.raises(ValueError, match="is a URL; checkpoints are read and written in folders alone"):
            function(place)
    with pytest.raises(TypeError, match="a folder of checkpoints is a path, got 5"):
        Checkpointer(5)
    assert not list(tmp_path.iterdir())
    get_platform().collectives.barrier()
    save(state_of(), checkpoint_id=tmp_path / "mounted", layout="shards")
    if rank == 0:
        shutil.copytree(tmp_path / "mounted", tmp_path / "copied")
    get_platform().collectives.barrier()
    for folder in ("mounted", "copied"):
        load(state := zeros(), checkpoint_id=tmp_path / folder)
        assert as_array(state["model"]["w"]).tolist() == W.tolist() and state["step"] == 3


def test_planners_and_sizes_are_checked():
    with pytest.raises(ValueError, match="remove_redundancy=False, but in the files each element has one place"):
        StandardSavePlanner(remove_redundancy=False)
    with pytest.raises(ValueError, match="allow_partial_load='yes'; expected a bool"):
        StandardLoadPlanner(allow_partial_load="yes")
    sizes = [bytes_of(each) for each in ("5GB", "1.5GiB", "2 MB", "7", 9, "3KiB", "1TB")]
    assert sizes == [5 * 10**9, 3 << 29, 2 * 10**6, 7, 9, 3 << 10, 10**12]
    for wrong in ("", "GB", "-1GB", 0, 1.5, True, "0"):
        with pytest.raises(ValueError, match="expected bytes, as 5_000_000_000 or '5GB'"):
            bytes_of(wrong)


def test_a_partial_load_leaves_what_the_checkpoint_lacks(tmp_path):
    save(state_of(), checkpoint_id=tmp_path / "a", no_dist=True)

    def wanted():
        return {"model": {"w": as_tensor(0 * W), "new": as_tensor(W + 1)}, "step": 0, "rate": 0.5, "own": {"x": 1}}

    with pytest.raises(ValueError, match=r"'rate' is not in the checkpoint, which has \['model', 'step'\]"):
        load(wanted(), checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(ValueError, match="lacks 1 of 2 tensors: 'new'"):
        load({"model": wanted()["model"]}, checkpoint_id=tmp_path / "a", no_dist=True)
    state = wanted()
    load(state, checkpoint_id=tmp_path / "a", no_dist=True, planner=StandardLoadPlanner(allow_partial_load=True))
    assert state["step"] == 3 and state["rate"] == 0.5 and state["own"] == {"x": 1}
    assert as_array(state["model"]["w"]).tolist() == W.tolist()
    assert as_array(state["model"]["new"]).tolist() == (W + 1).tolist()
    bad = {"model": {"w": as_tensor(W[:2])}}
    with pytest.raises(ValueError, match=r"do not fit: 'w' is F32 of shape \[2, 6\]"):  # lacking is not differing
        load(bad, checkpoint_id=tmp_path / "a", no_dist=True, planner=StandardLoadPlanner(allow_partial_load=True))


def test_a_value_and_a_tensor_are_not_exchanged(tmp_path):
    save({"a": as_tensor(W), "b": [as_tensor(W)]}, checkpoint_id=tmp_path / "a", no_dist=True)
    for state in ({"a": 1}, {"b": []}):
        with pytest.raises(ValueError, match=r"'(a|b.0)' can't be read: it is a tensor in the checkpoint"):
            load(state, checkpoint_id=tmp_path / "a", no_dist=True)


def test_a_hugging_face_reader_reads_the_model_alone(tmp_path):
    save(state_of(), checkpoint_id=tmp_path / "a", no_dist=True)
    reader = HuggingFaceStorageReader(tmp_path / "a")
    for state in ({"w": as_tensor(0 * W)}, {"model": {"w": as_tensor(0 * W)}}):
        load(state, storage_reader=reader, no_dist=True)
        assert as_array(state.get("model", state)["w"]).tolist() == W.tolist()
    content = bytearray((tmp_path / "a" / "model.safetensors").read_bytes())
    for name in ("manifest.json", "state.json"):
        os.remove(tmp_path / "a" / name)
    load({"w": as_tensor(0 * W)}, storage_reader=reader, no_dist=True)
    for options in ({"storage_reader": reader}, {"checkpoint_id": tmp_path / "a"}):
        with pytest.raises(ValueError, match="has tensors alone, and the state has the values step"):
            load(zeros(), no_dist=True, **options)
    partial = StandardLoadPlanner(allow_partial_load=True)
    state = zeros(step=8)
    load(state, storage_reader=reader, no_dist=True, planner=partial)
    assert state["step"] == 8 and as_array(state["model"]["w"]).tolist() == W.tolist()
    (tmp_path / "a" / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(InvalidCheckpointError, match="model.safetensors"):
        load({"w": as_tensor(0 * W)}, storage_reader=reader, no_dist=True)
    save({"other": {"w": as_tensor(W)}}, checkpoint_id=tmp_path / "b", no_dist=True)
    state = {"other": {"w": as_tensor(0 * W)}}
    with pytest.raises(InvalidCheckpointError, match="b has no model in safetensors; read it by FileSystemReader"):
        load(state, storage_reader=HuggingFaceStorageReader(tmp_path / "b"), no_dist=True)
    load(state, storage_reader=FileSystemReader(tmp_path / "b"), no_dist=True)
    assert as_array(state["other"]["w"]).tolist() == W.tolist()


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    read: list[int] = []
    preadv = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1])
        yield read


@on_ranks(2)
def test_each_rank_may_read_by_itself(tmp_path):
    """The same tensors, without messages of them; and what options the ranks disagree about, all refuse."""
    mesh = init_device_mesh(device_type(), (2,))
    own = distribute_tensor(as_tensor(W), mesh, [Shard(0)])
    save({"w": own}, checkpoint_id=tmp_path / "a")
    rank = get_platform().groups.rank()
    for share in (True, False):
        state = {"w": distribute_tensor(as_tensor(0 * W), mesh, [Replicate()])}
        with bytes_read() as read:
            load(state, checkpoint_id=tmp_path / "a", broadcast_replicated_tensors=share)
        assert as_array(state["w"].full_tensor()).tolist() == W.tolist()
        small = sum(os.stat(tmp_path / "a" / name).st_size for name in ("manifest.json", "state.json"))
        assert share or sum(read) >= small + W.nbytes
    for options in ({"planner": 1 if rank else None}, {"use_collectives": not rank}):
        with pytest.raises(CheckpointError, match="save failed on 1 of 2 ranks: rank 1: "):
            save({"w": own}, checkpoint_id=tmp_path / "b", **options)
    alone = {"checkpoint_id": tmp_path / f"alone{rank}", "no_dist": True}
    save({"w": as_tensor(W + rank)}, **alone)  # as both errors say: use_collectives, remove_redundancy
    load(state := {"w": as_tensor(0 * W)}, **alone)
    assert as_array(state["w"]).tolist() == (W + rank).tolist()
    with pytest.raises(ValueError, match="different limits: rank 0: 10, rank 1: 11"):
        save({"w": own}, storage_writer=FileSystemWriter(tmp_path / "b", max_shard_size=10 + rank))
    both = {"w": own, "v": distribute_tensor(as_tensor(W), mesh, [Replicate()])}
    save_state_dict_as_huggingface_format(tmp_path / "hf", both, max_shard_size="100B")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    full = dcp_to_full_state_dict(tmp_path / "a")
    assert as_array(full["w"]).tolist() == W.tolist()


def test_complete_states_of_one_process(tmp_path):
    half = np.arange(6, dtype=np.float16)
    state = {
        "model": {"w": as_tensor(W), "h": as_tensor(half)},
        "list": [as_tensor(W), 2],
        "pair": (1, None),
        "step": 3,
    }
    state["model"]["tied"] = state["model"]["w"]
    save_checkpoint(tmp_path / "a", state)
    found = load_checkpoint(tmp_path / "a")
    assert found.keys() == state.keys() and found["pair"] == (1, None) and found["list"][1] == 2
    assert type(found["model"]["w"]) is type(state["model"]["h"]) and found["model"]["tied"] is found["model"]["w"]
    for name, value in state["model"].items():
        assert as_array(found["model"][name]).tobytes() == as_array(value).tobytes()
    save_state_dict_as_huggingface_format(tmp_path / "hf", {"w": as_tensor(W), "h": as_tensor(half)})
    parsed = parse_checkpoint_from_huggingface(tmp_path / "hf")
    assert parsed.keys() == {"w", "h"} and as_array(parsed["w"]).tolist() == W.tolist()
    with pytest.raises(TypeError, match="'step' is a int; a Hugging Face model has tensors alone"):
        save_state_dict_as_huggingface_format(tmp_path / "hf", {"step": 1})
    (tmp_path / "alone").mkdir()
    os.rename(tmp_path / "hf" / "model.safetensors", tmp_path / "alone" / "own.safetensors")
    with pytest.raises(InvalidCheckpointError, match="alone is no checkpoint"):
        parse_checkpoint_from_huggingface(tmp_path / "alone")
    for number, platform in enumerate(("torch", "mindspore")):
        convert_full_checkpoint_to_dcp(tmp_path / "alone" / "own.safetensors", tmp_path / f"dcp{number}", platform)
        assert as_array(dcp_to_full_state_dict(tmp_path / f"dcp{number}")["w"]).tolist() == W.tolist()
    with pytest.raises(ValueError, match="src_platform='jax': expected 'torch' or 'mindspore'"):
        convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "x", "jax")
    (tmp_path / "alone" / "own.txt").write_text("x")
    with pytest.raises(InvalidCheckpointError, match="own.txt is a file of another format"):
        convert_full_checkpoint_to_dcp(tmp_path / "alone" / "own.txt", tmp_path / "x", "torch")
    assert not (tmp_path / "x").exists()


def test_a_whole_state_of_torch_distributed_checkpoint(tmp_path):
    """Nested as it was saved; written here, so on any framework."""
    state = {"model": {"w": as_tensor(W)}, "more": [as_tensor(W), {"a": 1}], "step": 5}
    save_checkpoint(tmp_path / "a", state)
    convert_full_checkpoint_to_dcp(tmp_path / "a", tmp_path / "dcp", "torch")
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    assert found["step"] == 5 and found["more"][1] == {"a": 1} and found.keys() == state.keys()
    assert as_array(found["more"][0]).tolist() == as_array(found["model"]["w"]).tolist() == W.tolist()
    digest = hashlib.sha256((tmp_path / "dcp" / ".metadata").read_bytes()).hexdigest()
    convert_full_checkpoint_to_dcp(tmp_path / "a", tmp_path / "again", "torch")
    assert digest == hashlib.sha256((tmp_path / "again" / ".metadata").read_bytes()).hexdigest()
