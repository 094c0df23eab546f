"""Links: followed in folders of others, as the hub's cache has them, and as the name of a checkpoint."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from hp_checkpoint import (
    InvalidCheckpointError,
    async_save,
    load,
    load_checkpoint,
    parse_checkpoint_from_huggingface,
    save,
    save_state_dict_as_huggingface_format,
)
from hp_checkpoint.disk.manifest import Keep, prune
from hp_checkpoint.disk.storage import remove_rests
from hp_checkpoint.extend import to_hugging_face
from hp_testing import as_array, as_tensor

W = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(params=["5GB", "100B"])
def snapshot(request, tmp_path):
    """Return a snapshot as huggingface_hub lays it out: links to blobs, of one file or of an index and several."""
    tensors = {"w": as_tensor(W), "b": as_tensor(W[0])}
    save_state_dict_as_huggingface_format(tmp_path / "own", tensors, max_shard_size=request.param)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "own").glob("model*"))):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_snapshot_of_the_hub_loads_and_converts(snapshot, tmp_path):
    found = parse_checkpoint_from_huggingface(snapshot)
    assert as_array(found["w"]).tolist() == W.tolist() and as_array(found["b"]).tolist() == W[0].tolist()
    to_hugging_face(snapshot, tmp_path / "model")
    state = {"w": as_tensor(0 * W)}
    load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    assert as_array(state["w"]).tolist() == W.tolist()


def test_a_link_to_what_is_no_file_is_refused(snapshot, tmp_path):
    for path in snapshot.iterdir():
        path.unlink()
    os.mkfifo(tmp_path / "pipe")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "pipe")
    with pytest.raises(InvalidCheckpointError, match="model.safetensors is no regular file"):
        parse_checkpoint_from_huggingface(snapshot)


@pytest.mark.parametrize("there", [True, False])
def test_a_name_that_is_a_link_stays_one(tmp_path, there):
    """The checkpoint is on the disk that it leads to, and nothing else is left."""
    big, runs = tmp_path / "big", tmp_path / "runs"
    big.mkdir()
    runs.mkdir()
    (runs / "latest").symlink_to("../big/x")
    if there:
        save({"step": 1}, checkpoint_id=big / "x", no_dist=True)
    save({"step": 2}, checkpoint_id=runs / "latest", no_dist=True)
    assert load_checkpoint(big / "x")["step"] == 2
    async_save({"step": 3}, checkpoint_id=runs / "latest", no_dist=True).get_result(60)
    assert (runs / "latest").is_symlink() and load_checkpoint(runs / "latest")["step"] == 3
    assert [path.name for path in (*big.iterdir(), *runs.iterdir())] == ["x", "latest"]


def test_a_step_that_is_a_link_is_removed_as_one(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (2, 3):
        save({"step": step}, checkpoint_id=run / f"step-0000000{step}", no_dist=True)
    save({"step": 1}, checkpoint_id=elsewhere, no_dist=True)
    (run / "step-00000001").symlink_to(elsewhere)
    rest = run / "step-00000001.part-0123456789ab"
    rest.symlink_to(elsewhere)
    os.utime(rest, (0, 0), follow_symlinks=False)
    assert prune(run, Keep(last=2)) == [1]
    (run / "new").mkdir()
    os.utime(run / "new", (time.time(),) * 2)
    remove_rests(run / "new")
    assert sorted(path.name for path in run.iterdir()) == ["new", "step-00000002", "step-00000003"]
    assert load_checkpoint(elsewhere)["step"] == 1
