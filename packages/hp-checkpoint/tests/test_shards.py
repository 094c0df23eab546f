"""Files of each rank that writes: any layout loads them, they are verified, and joined they are the shared files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil

import hostile
import numpy as np
import pytest
from crash_program import empty, state

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load, load_checkpoint, save
from hp_checkpoint.disk.files import header_length, read_header
from hp_checkpoint.disk.manifest import sealed
from hp_checkpoint.disk.tools import diff, faults, summary
from hp_checkpoint.formats.hugging_face import to_hugging_face
from hp_checkpoint.saving.arrangements import box_name
from hp_dtensor import RaggedShard, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

HASHES = {"model-rank-00000.safetensors": "0632ed1be7fb6c95", "model-rank-00001.safetensors": "02b45b25b356a684"}


def sharded_state():
    """Every kind of placement on two ranks, a replica, a scalar, and a tensor without elements."""
    mesh = init_device_mesh(device_type(), (2,))

    def laid_out(placement, *shape):
        array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        return distribute_tensor(as_tensor(array), mesh, [placement])

    model = {
        "rows": laid_out(Shard(0), 5, 3),
        "columns": laid_out(Shard(1), 4, 6),
        "strided": laid_out(StridedShard(0, 2), 8, 2),
        "ragged": laid_out(RaggedShard((0, 1), (5, 7)), 3, 4),
        "whole": laid_out(Replicate(), 3),
        "empty": laid_out(Shard(0), 0, 4),
        "scalar": as_tensor(np.float32(3)),
        "whole[0:3]": as_tensor(np.arange(3.0)),
    }
    return {"model": model, "optimizer": {"rows": {"m": laid_out(Shard(1), 5, 3)}}, "step": 3}


def hashes(folder, pattern="*"):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


@on_ranks(2)
def test_joined_they_are_the_shared_files(tmp_path):
    for layout in ("files", "shards"):
        save(sharded_state(), checkpoint_id=tmp_path / layout, layout=layout)
    rank = get_platform().groups.rank()
    shards = tmp_path / "shards"
    names = {f"{part}-rank-0000{n}.safetensors" for part in ("model", "optimizer") for n in (0, 1)}
    assert {path.name for path in shards.iterdir()} == {*names, "manifest.json", "state.json"}
    assert diff(tmp_path / "files", shards) == [] and faults(shards) == []
    assert summary(shards)["layout"] == "shards" and summary(tmp_path / "files")["layout"] == "files"
    joined = tmp_path / f"joined{rank}"
    assert to_hugging_face(shards, joined) == ["model.safetensors"]
    assert hashes(joined) == hashes(tmp_path / "files", "model.safetensors")
    again = load_checkpoint(shards)
    assert again["step"] == 3 and as_array(again["model"]["strided"]).tolist() == np.arange(16.0).reshape(8, 2).tolist()


@on_ranks(2)
def test_both_frameworks_write_the_same_files(tmp_path):
    save(sharded_state(), checkpoint_id=tmp_path / "c", layout="shards")
    assert {name: text[:16] for name, text in hashes(tmp_path / "c", "model*").items()} == HASHES


@on_ranks(2)
def test_each_file_is_complete_by_itself(tmp_path):
    """Its boxes are tensors of it, named by where they are."""
    save(sharded_state(), checkpoint_id=tmp_path / "c", layout="shards")
    found = {}
    for path in sorted((tmp_path / "c").glob("model*")):
        content = path.read_bytes()
        start = 8 + header_length(path.name, len(content), content[:8])
        for entry in read_header(path.name, len(content), content[:8], content[8:start]):
            found[entry.name] = content[entry.offset : entry.offset + entry.kind.nbytes]
    assert sorted(name for name in found if name.startswith("strided")) == [
        "strided[0:2,0:2]",
        "strided[2:4,0:2]",
        "strided[4:6,0:2]",
        "strided[6:8,0:2]",
    ]
    columns = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert found["columns[0:4,3:6]"] == columns[:, 3:].tobytes() and found["rows[3:5,0:3]"] != b""
    assert len(found["whole"]) == 12 and len(found["whole[0:3][0:3]"]) == 24 and "empty" not in found


def test_names_of_boxes_are_of_one_box_each():
    names = [("a", (2,), (0,), (1,)), ("a", (2,), (0,), (2,)), ("a[0:1]", (3,), (0,), (3,)), ("a[0:1]", (), (), ())]
    assert [box_name(*each) for each in names] == ["a[0:1]", "a", "a[0:1][0:3]", "a[0:1][]"]


@on_ranks(2)
def test_arguments_are_checked_on_all_ranks_alike(tmp_path):
    rank = get_platform().groups.rank()
    new = {"w": as_tensor(np.zeros(2, np.float32))}
    with pytest.raises(ValueError, match="save: layout must be 'auto', 'files' or 'shards', got 'shard'"):
        save(new, checkpoint_id=tmp_path / "c", layout="shard")
    with pytest.raises(CheckpointError, match="failed on 1 of 2 ranks: rank 1: save: layout must be .*, got None"):
        save(new, checkpoint_id=tmp_path / "c", layout=None if rank else "files")
    with pytest.raises(ValueError, match="the ranks save different layouts: rank 0: 'files', rank 1: 'shards'"):
        save(new, checkpoint_id=tmp_path / "c", layout=("files", "shards")[rank])
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_disk_that_fails_under_one_rank(tmp_path):
    """The old checkpoint is whole, and the next save needs no cleaning."""
    save(sharded_state(), checkpoint_id=tmp_path / "c", layout="shards")
    before = hashes(tmp_path / "c")
    get_platform().collectives.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if get_platform().groups.rank() == 1:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match=r"rank 1: EIO: .*part-\w+/model-rank-00001.safetensors"):
            save(sharded_state(), checkpoint_id=tmp_path / "c", layout="shards")
    get_platform().collectives.barrier()  # rank 0 removes what is left
    assert hashes(tmp_path / "c") == before and [path.name for path in tmp_path.iterdir()] == ["c"]
    save(sharded_state(), checkpoint_id=tmp_path / "c", layout="files")
    assert (tmp_path / "c/model.safetensors").exists() and faults(tmp_path / "c") == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "c"
    save(state(1), checkpoint_id=folder, no_dist=True, layout="shards")
    return folder


def boxes(tree):
    return tree["parts"]["model"]["w0"][2]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tree: boxes(tree).append(boxes(tree)[0]), "the tensors 'w0' and 'w0' overlap|has chunks of 1,020 elem"),
        (lambda tree: boxes(tree).clear(), r"tensor 'w0' of shape \[30, 17\] has chunks of 0 elements"),
        (lambda tree: boxes(tree)[0].__setitem__(0, "../x"), "at 4096 of '../x', is in no file of it"),
        (lambda tree: boxes(tree)[0].__setitem__(1, 10**9), "tensor 'w0', 'F32' .* is in no file of it"),
        (lambda tree: boxes(tree)[0].__setitem__(2, [1, 0]), r"has a chunk of \[30, 17\] at \[1, 0\]"),
        (lambda tree: boxes(tree)[0].__setitem__(3, [30]), "not a manifest: |has a chunk of"),
        (lambda tree: boxes(tree)[0].pop(), "not a manifest: ValueError"),
        (lambda tree: tree["parts"]["model"]["w0"].__setitem__(0, "F3"), "tensor 'w0', 'F3' of .* is in no file of it"),
    ],
)
def test_manifests_that_contradict_themselves(checkpoint, tmp_path, change, error):
    folder = tmp_path / "d"
    shutil.copytree(checkpoint, folder)
    tree = json.loads((folder / "manifest.json").read_bytes())
    del tree["hash"]
    change(tree)
    (folder / "manifest.json").write_bytes(sealed(tree))
    with pytest.raises((CheckpointError, InvalidCheckpointError), match=error):
        load(empty(), checkpoint_id=folder, no_dist=True)


def test_changed_texts(checkpoint, tmp_path):
    """Whatever is changed: the right values, others that the texts describe, or an error that names the fault."""
    seen = {"same": 0, "other": 0, "named": 0}
    for folder in hostile.manifests(checkpoint, tmp_path / "d", 150, random.Random(5)):
        found = hostile.outcome(folder)
        assert found in seen, found
        seen[found] += 1
    assert seen["named"] > 30


def test_damage_is_named(checkpoint, tmp_path):
    folder = tmp_path / "d"
    shutil.copytree(checkpoint, folder)
    path = folder / "model-rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"d/model-rank-00000.safetensors: bytes .* tensor 'w2' changed since"):
        load(empty(), checkpoint_id=folder, no_dist=True)
    with pytest.raises(InvalidCheckpointError, match="tensor 'w2' changed since the save"):
        to_hugging_face(folder, tmp_path / "joined")
    (folder / "optimizer-rank-00000.safetensors").unlink()
    assert len(faults(folder)) == 2 and not (tmp_path / "joined").exists()
    with pytest.raises(CheckpointError, match="ENOENT: .*optimizer-rank-00000.safetensors"):
        load({"optimizer": empty()["optimizer"]}, checkpoint_id=folder, no_dist=True)
