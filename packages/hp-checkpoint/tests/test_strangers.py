"""A checkpoint of a stranger, with the right hashes, loads or is refused by name: nothing in it breaks a program."""

from __future__ import annotations

import json
import os
import random
import shutil

import hostile
import pytest
from crash_program import empty, state

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load, save
from hp_checkpoint.disk.manifest import Manifest, sealed
from hp_checkpoint.layout.state import decode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers") / "c"
    save(state(1), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("changed", ["manifests", "values", "headers"])
def test_changed_texts(checkpoint, tmp_path, changed):
    """Whatever is changed: the right values, others that the texts describe, or an error that names the fault."""
    seen = {"same": 0, "other": 0, "named": 0}
    parts = ("model",) if changed == "headers" else ("model", "optimizer", "step")
    for folder in getattr(hostile, changed)(checkpoint, tmp_path / "d", 150, random.Random(changed)):
        found = hostile.outcome(folder, parts=parts)
        assert found in seen, found
        seen[found] += 1
    assert seen["named"] > 30


def first_offset(tree: dict) -> None:
    tree["parts"]["model"]["w1"][3] = tree["parts"]["model"]["w0"][3]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (first_offset, "model.safetensors: the tensors 'w0' and 'w1' overlap"),
        (lambda tree: tree.update(block_bytes=0), "its blocks have 0 bytes, expected 1 to 1073741824"),
        (lambda tree: tree.update(block_bytes=2**60), "its blocks have 1152921504606846976 bytes, expected 1 to 1073"),
        (
            lambda tree: tree["files"]["model.safetensors"].update(size=2**60),
            "checksums of model.*are of 10420 bytes",
        ),
        (
            lambda tree: tree["parts"]["model"]["w0"].__setitem__(1, [-30, -17]),
            "not a manifest: ValueError: -30 is no",
        ),
        (lambda tree: tree["parts"]["model"]["w0"].__setitem__(3, 1.5), "not a manifest: ValueError: 1.5 is no whole"),
        (lambda tree: tree.update(parts=[]), "is not a manifest: AttributeError: 'list'"),
    ],
)
def test_manifests_that_contradict_themselves(checkpoint, change, error):
    tree = json.loads((checkpoint / "manifest.json").read_bytes())
    del tree["hash"]
    change(tree)
    with pytest.raises(InvalidCheckpointError, match=error):
        Manifest.from_bytes(sealed(tree), "m")


def test_a_key_that_is_there_twice(checkpoint):
    text = (checkpoint / "manifest.json").read_bytes()
    tree = json.loads(text)
    del tree["hash"]
    double = sealed(tree | {"parts": {"model": {}, "twice": {}}}).replace(b'"twice"', b'"model"')
    body = double[: double.rindex(b',"hash"')]
    import hashlib

    sum_of = hashlib.blake2b(body, digest_size=16).hexdigest()
    with pytest.raises(InvalidCheckpointError, match="m has the key 'model' twice"):
        Manifest.from_bytes(body + f',"hash":"{sum_of}"}}'.encode(), "m")


@pytest.mark.parametrize("place", [[{}, "w"], ["model", 1], ["model"], 5])
def test_a_place_of_a_tensor_that_is_none(place):
    with pytest.raises(InvalidCheckpointError, match="the values beside the tensors in here can't be read: "):
        decode({"w": {"__tensor__": place}}, dict, "here")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_no_file_but_a_regular_one_is_opened(checkpoint, tmp_path, name, kind):
    """A pipe would wait for a writer, a link leads out of the folder."""
    shutil.copytree(checkpoint, tmp_path / "c")
    path = tmp_path / "c" / name
    path.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    text = "is a link; expected a regular file" if kind == "link" else "is no regular file"
    with pytest.raises((CheckpointError, InvalidCheckpointError), match=f"{name} {text}"):
        load(empty(), checkpoint_id=tmp_path / "c", no_dist=True)
