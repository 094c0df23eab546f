"""Whether two ranks can write one file is tried once; where they can't, each has its own, and a save says so."""

from __future__ import annotations

import errno
import os
import re
import warnings

import numpy as np
import pytest

from hp_checkpoint import load, save
from hp_checkpoint.disk.tools import faults, summary
from hp_checkpoint.formats.hugging_face import to_hugging_face
from hp_checkpoint.saving import arrangements
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks

PAGE = 4096


def whole_pages(descriptor, data, offset, path):
    """As a client whose pages are those from before the others' writes."""
    start, stop = offset // PAGE * PAGE, -(-(offset + len(data)) // PAGE) * PAGE
    pages = bytearray(stop - start)
    pages[offset - start : offset - start + len(data)] = data.tobytes()
    os.pwrite(descriptor, pages, start)


def refused(descriptor, data, offset, path):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))


def lost(descriptor, data, offset, path):
    """As a server that takes the writes of one client."""


def state_of(rows=6):
    mesh = init_device_mesh(device_type(), (get_platform().groups.size(),))
    array = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
    return {"model": {"w": distribute_tensor(as_tensor(array), mesh, [Shard(0)])}}


@on_ranks(3)
@pytest.mark.parametrize(
    ("storage", "on", "reason"),
    [
        (whole_pages, (0, 2), r"[\d,]+ of 192,000 bytes that two ranks wrote and synced were lost"),
        (refused, (2,), "(EOPNOTSUPP|ENOTSUP): .*/probe"),
        (lost, (2,), "ends at byte|bytes that two ranks wrote and synced were lost"),
        (lost, (0,), "bytes that two ranks wrote and synced were lost"),
    ],
)
def test_ranks_that_cannot_write_one_file_write_their_own(tmp_path, monkeypatch, storage, on, reason):
    rank = get_platform().groups.rank()
    monkeypatch.setattr(arrangements, "_known", {})
    if rank in on:
        monkeypatch.setattr(arrangements, "write_at", storage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("one", "two"):
            save(state_of(), checkpoint_id=tmp_path / name)
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) == (rank == 0)
    for text in texts:
        assert text.startswith(f"{tmp_path}: two ranks can't write one file here: ") and "layout='shards'" in text
        assert re.search(reason, text), text
    for name in ("one", "two"):
        assert summary(tmp_path / name)["layout"] == "shards" and faults(tmp_path / name) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    new = {"model": {"w": as_tensor(np.zeros((6, 5), np.float32))}}
    load(new, checkpoint_id=tmp_path / "two")
    to_hugging_face(tmp_path / "two", tmp_path / f"joined{rank}")  # as the command does that the warning names
    joined = {"model": {"w": as_tensor(np.zeros((6, 5), np.float32))}}
    load(joined, checkpoint_id=tmp_path / f"joined{rank}", no_dist=True)
    for each in (new, joined):
        assert as_array(each["model"]["w"]).tolist() == np.arange(30.0).reshape(6, 5).tolist()


@on_ranks(2)
def test_it_is_tried_once_where_shared_files_work(tmp_path, monkeypatch):
    monkeypatch.setattr(arrangements, "_known", {})
    tried = []
    own = arrangements._write
    monkeypatch.setattr(arrangements, "_write", lambda *arguments: (tried.append(1), own(*arguments)))
    for name in ("one", "two"):
        save(state_of(), checkpoint_id=tmp_path / name)
        assert summary(tmp_path / name)["layout"] == "files"
    assert tried == [1] and sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    save(state_of(), checkpoint_id=tmp_path / "two", layout="shards")
    save({"model": {"w": np.zeros(3)}}, checkpoint_id=tmp_path / f"own{get_platform().groups.rank()}", no_dist=True)
    assert tried == [1] and summary(tmp_path / "two")["layout"] == "shards"
