"""Interrupted saves, full disks, flipped bytes and other damage: the old checkpoint stays, the error names it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import crash_program
import flips
import numpy as np
import pytest
from crash_program import empty, loads, state

from hp_checkpoint import CheckpointError, InvalidCheckpointError, load, load_checkpoint, save
from hp_checkpoint.disk import manifest, storage
from hp_checkpoint.disk.files import Kind, lay_out
from hp_checkpoint.disk.manifest import Manifest, sealed
from hp_checkpoint.disk.storage import check_space
from hp_checkpoint.errors import Ranks
from hp_checkpoint.formats.hugging_face import to_hugging_face
from hp_checkpoint.layout import tensors
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.loading import loading
from hp_checkpoint.saving import arrangements
from hp_checkpoint.saving.saving import save_state
from hp_testing import as_array


@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ENOSPC", "EIO"))]
)
def test_a_save_that_ends_at_any_point_leaves_a_whole_checkpoint(tmp_path, fault):
    """Killed there, or with an error there and ever after; a new one, one that replaces, and one beside a training."""
    program = [sys.executable, crash_program.__file__, str(tmp_path), fault]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    points = [int(word) for word in done.stdout.split() if word.isdigit()]
    assert len(points) == 3 and min(points) > 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_failing_write_is_named(tmp_path, monkeypatch, call, number):
    save(state(1), checkpoint_id=tmp_path / "old", no_dist=True)
    own, name, at = getattr(os, call), errno.errorcode[number], 0
    while True:
        calls = iter(range(10**6))

        def failing(*arguments, calls=calls, at=at):
            if next(calls) == at:
                raise OSError(number, os.strerror(number))
            return own(*arguments)

        monkeypatch.setattr(os, call, failing)
        try:
            save(state(2), checkpoint_id=tmp_path / "new", no_dist=True)
        except CheckpointError as error:
            assert f"save failed: {name}: " in str(error)
            assert str(tmp_path) in str(error) or call == "rename"
        else:
            break
        finally:
            monkeypatch.setattr(os, call, own)
        rests = [path.name for path in tmp_path.iterdir() if path.name not in ("old", "new")]
        assert not rests and loads(tmp_path / "old", 1)
        if (tmp_path / "new").exists():  # its parent could not be synced
            assert loads(tmp_path / "new", 2)
            shutil.rmtree(tmp_path / "new")
        at += 1
    assert at >= {"pwrite": 7, "fsync": 6, "rename": 1}[call] and loads(tmp_path / "new", 2)


def test_new_folders_above_a_checkpoint_are_synced(tmp_path, monkeypatch):
    own, synced = os.fsync, []

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(state(1), checkpoint_id=tmp_path / "runs" / "one" / "new", no_dist=True)
    assert synced[:2] == [str(tmp_path), str(tmp_path / "runs")] and synced[-1] == str(tmp_path / "runs" / "one")


def test_folders_of_similar_names_are_left_alone(tmp_path):
    names = ["data.part-1", "step-1.part-0123456789ab", "step-1.part-0123456789ab.txt"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_bytes(b"x")
        os.utime(tmp_path / name, (0, 0))
    save(state(1), checkpoint_id=tmp_path / "new", no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.part-1", "new", names[2]]


def test_a_save_is_new_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    """That of a file server may be behind; what another job has begun there would be taken for an old rest."""
    begun = tmp_path / "step-1.part-0123456789ab"
    begun.mkdir()
    monkeypatch.setattr(time, "time", lambda: begun.stat().st_mtime + 3600)
    save(state(1), checkpoint_id=tmp_path / "new", no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", begun.name]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"last": "a"}, TypeError, "must be whole numbers"),
        ({"last": None}, TypeError, "must be whole numbers"),
        ({"best": 1.5}, TypeError, "must be whole numbers"),
        ({"every": 0}, ValueError, "must be at least 1"),
        ({"better": "best"}, ValueError, "better must be 'smaller' or 'larger'"),
    ],
)
def test_what_no_rule_for_removals_can_be(options, error, text):
    with pytest.raises(error, match=text):
        manifest.Keep(**options)


def test_two_removals_of_a_checkpoint(tmp_path, monkeypatch):
    """The command ``prune`` beside a training that prunes: neither fails."""
    for step in (1, 2, 3):
        save(state(step), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)

    def removed(folder, saved=None):
        shutil.rmtree(tmp_path / "step-00000001")
        return [1, 2, 3]

    monkeypatch.setattr(manifest, "steps_in", removed)
    assert manifest.prune(tmp_path, manifest.Keep(last=1)) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"] and loads(tmp_path / "step-00000003", 3)


def test_a_checkpoint_that_may_be_the_best_stays(tmp_path):
    for step in (1, 2, 3):
        save(state(step), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"{}")
    assert manifest.prune(tmp_path, manifest.Keep(last=1, best=1)) == [1]
    assert manifest.prune(tmp_path, manifest.Keep(last=1)) == [2]


@pytest.mark.parametrize("metric", [True, [1.0], {}, "low"])
def test_a_metric_in_a_manifest_that_is_no_number(checkpoint, metric):
    tree = {**Manifest.from_bytes((checkpoint / "manifest.json").read_bytes(), "x").tree(), "metric": metric}
    with pytest.raises(InvalidCheckpointError, match="x is not a manifest"):
        Manifest.from_bytes(sealed(tree), "x")
    del tree["metric"]
    assert Manifest.from_bytes(sealed(tree), "x").metric is None  # of an older version


def test_a_conversion_is_synced_with_its_name(checkpoint, tmp_path, monkeypatch):
    own, events = (os.fsync, os.rename), []

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        own[0](descriptor)

    def rename(source, target):
        events.append("rename")
        own[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    to_hugging_face(checkpoint, tmp_path / "new" / "model")
    at = events.index("rename")
    assert events[0] == str(tmp_path) and events[at - 1].startswith(f"{tmp_path}/new/model.part-")
    assert events[at + 1 :] == [str(tmp_path / "new")]


def test_files_that_were_not_written_to_their_end_are_not_committed(tmp_path, monkeypatch):
    """A rank whose pieces are not all of its shard: there would be a checkpoint that no load takes."""
    save(state(1), checkpoint_id=tmp_path / "new", no_dist=True)
    monkeypatch.setattr(arrangements, "local_pieces", lambda value: tensors.local_pieces(value)[:0])
    with pytest.raises(InvalidCheckpointError, match=r"checksums of model\.safetensors are of \d+ bytes of block 0"):
        save(state(2), checkpoint_id=tmp_path / "new", no_dist=True)
    monkeypatch.undo()
    assert loads(tmp_path / "new", 1) and [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_full_disk_is_seen_before_the_first_byte(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: 10,000,\d{3},\d{3},\d{3},000 bytes are needed and"):
        check_space(tmp_path, 10**16)


def test_a_file_system_that_does_not_tell_its_size_takes_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096))
    save(state(1), checkpoint_id=tmp_path / "new", no_dist=True)
    assert loads(tmp_path / "new", 1)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_blocks=9, f_bavail=1, f_frsize=4096))
    with pytest.raises(CheckpointError, match=r"ENOSPC: No space left on device: \d+,\d+ bytes are needed and 4,096"):
        save(state(1), checkpoint_id=tmp_path / "new", no_dist=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "c"
    save(state(1), checkpoint_id=folder, no_dist=True)
    return folder


def test_a_flipped_byte_is_named(tmp_path):
    """By file, block and tensor, in data, headers, manifest and values; `nox -s robustness` flips a thousand."""
    save_state(flatten(state(1)), tmp_path / "c", Ranks(alone=True), block_bytes=2048)
    choice = random.Random(0)
    seen = [flips.flip(tmp_path / "c", choice) for _ in range(60)]
    assert 20 < sum(read for read, _ in seen) < 60 and sum(in_tensor for _, in_tensor in seen) > 10
    assert loads(tmp_path / "c", 1)


def test_only_what_is_read_is_verified_by_default(checkpoint, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint, folder)
    damaged = bytearray((folder / "optimizer.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "optimizer.safetensors").write_bytes(damaged)
    model = {"model": empty()["model"]}
    load(model, checkpoint_id=folder, no_dist=True)
    assert (model["model"]["w1"] == state(1)["model"]["w1"]).all()
    with pytest.raises(
        InvalidCheckpointError, match=rf"^{folder}/optimizer.safetensors: bytes .* tensor 'w0.m' changed s"
    ):
        load(model, checkpoint_id=folder, no_dist=True, verify="all")


def rewritten(folder: Path, change) -> None:
    """Change a manifest and give it the right hash."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest.pop("hash")
    change(manifest)
    import hashlib

    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    (folder / "manifest.json").write_bytes(text + f',"hash":"{digest}"}}'.encode())


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")


def outside(manifest: dict) -> None:
    manifest["files"]["../x"] = manifest["files"].pop("model.safetensors")


def uncovered(manifest: dict) -> None:
    manifest["files"]["model.safetensors"]["sums"].pop()


def unknown_dtype(manifest: dict) -> None:
    manifest["parts"]["model"]["w0"][0] = "F3"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (cut, r"model.safetensors ends at byte .*: it was cut off"),
        (pipe, r"model.safetensors is no regular file"),
        (link, r"model.safetensors is a link; expected a regular file"),
        (lambda f: rewritten(f, outside), r"names the file '../x'; expected a file of the same folder"),
        (lambda f: rewritten(f, uncovered), r"the checksums of model.safetensors are of \d+ bytes of block 0"),
        (lambda f: rewritten(f, unknown_dtype), r"tensor 'w0', 'F3' of shape .* is in no file of it"),
        (lambda f: rewritten(f, lambda m: m.update(version=7)), r"format version 7, this hp-checkpoint reads up to 2"),
        (lambda f: (f / "manifest.json").write_text("{}"), r"its hash is wrong: the file was changed, or not written"),
        (lambda f: (f / "model.safetensors").unlink(), r"ENOENT: No such file or directory: .*model.safetensors"),
        (lambda f: [p.unlink() for p in f.iterdir()], r"is no checkpoint: it has neither manifest.json nor model.saf"),
        (shutil.rmtree, r"there is no checkpoint .*c$"),
    ],
)
def test_damaged_folders(checkpoint, tmp_path, damage, error):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises((CheckpointError, InvalidCheckpointError, FileNotFoundError), match=error):
        load(empty(), checkpoint_id=folder, no_dist=True)
    assert loads(checkpoint, 1)


def test_where_the_newest_is_damaged_an_older_one_is_loaded(tmp_path):
    for step in (1, 2, 3):
        save(state(step), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    (tmp_path / "step-00000003" / "manifest.json").write_text("{}")
    data = tmp_path / "step-00000002" / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for step, text in (
        (3, "its hash is wrong: .* Load an older checkpoint"),
        (2, "changed since the save. Load another"),
    ):
        with pytest.raises((CheckpointError, InvalidCheckpointError), match=text):
            load(empty(), checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True)
    assert loads(tmp_path / "step-00000001", 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s["model"].update(w11=np.zeros(3)), r"lacks 1 of 5 tensors: 'w11' \(it has 'w1'\)"),
        (lambda s: s["model"].update(w1=np.zeros(3)), r"'w1' is F64 of shape \[3\], in the checkpoint F32 of shape"),
        (lambda s: s["model"]["w1"].setflags(write=False), "'w1' is an array that can't be written; load into a copy"),
        (lambda s: s["model"].update(w1=s["model"]["w1"].astype(">f4")), "'w1' has dtype >f4, of the other byte order"),
        (lambda s: s.update(lr=0.1), r"'lr' is not in the checkpoint, which has \['model', 'optimizer', 'step'\]"),
        (lambda s: s.update(step={"a": 1}), r"'step' is a dictionary, the checkpoint has 1"),
    ],
)
def test_states_that_do_not_fit(checkpoint, change, error):
    new = empty()
    change(new)
    with pytest.raises((TypeError, ValueError), match=error):
        load(new, checkpoint_id=checkpoint, no_dist=True)
    if "can't be written" in error:
        new["model"]["w1"] = new["model"]["w1"].copy()
        load(new, checkpoint_id=checkpoint, no_dist=True)
        assert (new["model"]["w1"] == state(1)["model"]["w1"]).all()


def test_near_misses_are_of_what_an_error_shows(checkpoint, monkeypatch):
    """Each is compared with all names of the checkpoint, which takes minutes for thousands."""
    compared = []
    monkeypatch.setattr(loading.difflib, "get_close_matches", lambda name, *_: compared.append(name) or ["w1"])
    new = {f"v{number:02}": np.zeros(1) for number in range(40)}
    with pytest.raises(ValueError, match=r"lacks 40 of 40 tensors: 'v00' \(it has 'w1'\), .* 'v04' \(it has 'w1'\)$"):
        load({"model": new}, checkpoint_id=checkpoint, no_dist=True)
    assert compared == list(new)[:5]


@pytest.mark.parametrize(
    ("bad", "error", "mended"),
    [
        (
            {"a": {"b": object()}},
            r"'a.b' is a builtins.object; .*because a pickle would run code when it is loaded. .* or str\(\)",
            lambda s: {"a": {"b": str(s["a"]["b"])}},
        ),
        ({"a": {(1, 2): 3}}, r"'a' has the key \(1, 2\); keys are strings or numbers", lambda s: {"a": {"1,2": 3}}),
        (
            {"model": {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}},
            "two tensors are named 'a.b' in 'model'; rename one",
            lambda s: {"model": {"c": s["model"]["a.b"], "a": s["model"]["a"]}},
        ),
        (
            {"w": np.array(["x"])},
            "'w' has dtype <U1, which safetensors lacks; convert it before the call",
            lambda s: {"w": s["w"].tolist()},
        ),
        (
            {"w": np.ones(2, ">f4")},
            r"'w' has dtype >f4, of the other byte order; .* \.astype\('float32'\)",
            lambda s: {"w": s["w"].astype("float32")},
        ),
        (
            {"w": np.ma.masked_array([1.0], [True])},
            "'w' is a masked array, whose mask would be lost; save its .data and its .mask",
            lambda s: {"w": s["w"].data, "mask": s["w"].mask},
        ),
        (
            {"loss": np.float64("nan")},
            "'loss' is a numpy.float64; .* Convert it, as by .item",
            lambda s: {"loss": s["loss"].item()},
        ),
        (
            {"model": argparse.Namespace(state_dict=lambda: {"w": np.ones(1)})},
            r"'model' is a argparse.Namespace; .* Save its state_dict\(\)",
            lambda s: {"model": s["model"].state_dict()},
        ),
        ({"name": "\udcff"}, r"'name' has the text '\\udcff', which UTF-8 lacks", lambda s: {"name": ascii(s["name"])}),
        (
            {"model": {"\udcff": np.zeros(1)}},
            r"'model' has the text '\\udcff', which UTF-8 lacks",
            lambda s: {"model": {"w": s["model"]["\udcff"]}},
        ),
        ([1], "the state is a list, expected a dictionary", lambda s: {"list": s}),
        (
            {"__metadata__": np.zeros(1)},
            "a tensor is named '__metadata__', a name that safetensors reserves; rename it",
            lambda s: {"metadata": s["__metadata__"]},
        ),
        (
            {"ids": list(range(1001))},
            "has about 1,002 values beside 0 bytes of data, .* Save many numbers as an array",
            lambda s: {"ids": np.array(s["ids"])},
        ),
    ],
)
def test_states_that_are_refused(tmp_path, monkeypatch, bad, error, mended):
    """And saved as the error says, loaded as they were saved."""
    monkeypatch.setattr(storage, "_VALUES", 1000)
    with pytest.raises((TypeError, ValueError, InvalidCheckpointError), match=error):
        save(bad, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not list(tmp_path.iterdir())
    state = mended(bad)
    save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert plain(load_checkpoint(tmp_path / "c")) == plain(state)


def plain(value):
    """Return what == compares: bytes of tensors, and texts, since NaN is not equal to itself."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if not hasattr(value, "shape"):
        return repr(value)
    array = value if isinstance(value, np.ndarray) else as_array(value)
    return array.dtype.name, array.tobytes()


def test_foreign_folders(tmp_path):
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "model.pt").write_bytes(b"x")
    with pytest.raises(
        InvalidCheckpointError, match="has model.pt, which are pickles: loading them would run code, so"
    ):
        load({}, checkpoint_id=tmp_path / "pickles", no_dist=True)
    with pytest.raises(FileExistsError, match="pickles exists and is no checkpoint; .* Save under another name"):
        save({"w": np.zeros(1)}, checkpoint_id=tmp_path / "pickles", no_dist=True)
    assert (tmp_path / "pickles" / "model.pt").read_bytes() == b"x"
    save({"w": np.ones(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*step-2; .* has the checkpoints step-1"):
        load({}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    with pytest.raises(InvalidCheckpointError, match="is no checkpoint: .*, but the checkpoints .*step-1: name one of"):
        load({}, checkpoint_id=tmp_path, no_dist=True)
    load(new := {"w": np.zeros(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert new["w"] == 1


def test_a_file_system_that_cannot_exchange_folders(tmp_path, monkeypatch):
    save(state(1), checkpoint_id=tmp_path / "c", no_dist=True)
    monkeypatch.setattr(storage.ctypes, "CDLL", lambda *arguments, **options: types.SimpleNamespace())
    with pytest.raises((CheckpointError, OSError), match="can't exchange folders; save under a new name"):
        save(state(2), checkpoint_id=tmp_path / "c", no_dist=True)
    save(state(2), checkpoint_id=tmp_path / "new", no_dist=True)
    assert loads(tmp_path / "c", 1) and loads(tmp_path / "new", 2)


def test_a_model_folder_without_a_manifest(tmp_path):
    """Several files and an index, as on the hub; a name in two files is refused."""
    arrays = {f"t{n}": np.arange(10, dtype=np.float32) + n for n in range(4)}
    files = lay_out("model", {name: Kind("F32", (10,)) for name in arrays}, limit=80)
    for file in files:
        content = bytearray(file.size)
        content[: len(file.header)] = file.header
        for entry in file.entries:
            content[entry.offset : entry.offset + 40] = arrays[entry.name].tobytes()
        (tmp_path / file.name).write_bytes(content)
    index = {"weight_map": {entry.name: file.name for file in files for entry in file.entries}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    new = {name: np.zeros(10, np.float32) for name in arrays}
    load(new, checkpoint_id=tmp_path, no_dist=True)
    assert all((new[name] == arrays[name]).all() for name in arrays)
    shutil.copy(tmp_path / files[0].name, tmp_path / files[1].name)
    with pytest.raises(
        InvalidCheckpointError, match=r"tensor 't0' is in model-00001-of-00002.safetensors and model-00"
    ):
        load(new, checkpoint_id=tmp_path, no_dist=True)
    index["weight_map"]["t0"] = "../x"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        InvalidCheckpointError, match=r"index.json names the file '../x'; expected a file of the same fol"
    ):
        load(new, checkpoint_id=tmp_path, no_dist=True)


def test_values_come_back_as_they_were(tmp_path):
    values = {"n": None, "f": [0.1, float("-inf")], 3: (1, ("x", True)), "__tensor__": {"a": 1}, "e": {}, "l": []}
    tied = np.arange(3)
    save({"values": values, "model": {"a": tied, "b": tied}}, checkpoint_id=tmp_path / "c", no_dist=True)
    new = {"values": dict.fromkeys(values), "model": {"b": np.zeros(3, int)}}
    load(new, checkpoint_id=tmp_path / "c", no_dist=True)
    assert new["values"] == values and new["model"]["b"].tolist() == [0, 1, 2]
    manifest = Manifest.from_bytes((tmp_path / "c" / "manifest.json").read_bytes(), "m")
    assert list(manifest.parts["model"]) == ["a"] and manifest.aliases == {"model": {"b": "a"}}
