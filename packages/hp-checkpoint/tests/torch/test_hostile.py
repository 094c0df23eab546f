"""Checkpoints of somebody who means harm: each is refused by name, in bounded memory and time."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaged_formats import _bomb

from hp_checkpoint import InvalidCheckpointError, load, load_checkpoint, load_model, save
from hp_checkpoint.disk.manifest import Manifest, sealed
from hp_checkpoint.disk.tools import summary
from hp_checkpoint.formats.torch_files import torch_file, value_names
from hp_checkpoint.formats.unpickling import read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated", "ignore:torch.distributed is disabled")
SLOTS = b"N}X\x08\0\0\0__init__Ns\x86b"
"""Sets the attribute __init__ of what is on the stack."""


def refused(folder, text):
    for call in (load_checkpoint, lambda at: load({"w": torch.zeros(3, 4)}, checkpoint_id=at, no_dist=True)):
        with pytest.raises(InvalidCheckpointError, match=text):
            call(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",
        b"\x80\x02cpathlib\nPosixPath\nX\2\0\0\0zz" + b"q\1" + 34 * b"h\1h\1\x86Rq\1cpathlib\nPosixPath\n" + b".",
        b"\x80\x02ctorch.serialization\n_get_layout\n" + _bomb(b"]", 40) + b"\x85R.",
    ],
    ids=["memo", "joined", "printed"],
)
def test_a_name_computes_nothing(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    refused(tmp_path, r"\.metadata is (not the metadata of|damaged: )")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (_bomb(b"]", 40), "nests 21 levels of 4194301 values, expected at most 200 of 4,001,368"),
        (b"]" * 300 + b"a" * 299, "nests 201 levels"),
        (b"]q\0h\0a", "has a value that is in itself"),
        (b"}" + _bomb(b")", 40) + b"Ns", "a dictionary has the key"),
        (b"\x8b\xff\xff\xff\x7f", "an integer of 2,147,483,647 bytes"),
        (b"I" + b"9" * 5000 + b"\n", "an integer of 5,000 digits"),
        (b"\x8e" + b"\xff" * 7 + b"\x3f", "it is cut off"),
        (b"N0" * 2_100_000, "has more than 4,000,000 instructions, too many"),
        (b"ccollections\nOrderedDict\n" + _bomb(b"]", 40) + b"\x85R", "an ordered dictionary of"),
        (b"cos\nsystem\n", "names os.system, which is refused"),
        (b"]" + SLOTS, "it sets attributes of"),
        (b"ccollections\nOrderedDict\n" + SLOTS, "it sets attributes of"),
        (b"\x82\1", "instruction 130 at byte 2 of"),
    ],
)
def test_values_that_never_end_are_named(content, text):
    with pytest.raises(InvalidCheckpointError, match=rf"^here .*{text}"):
        read_pickle(b"\x80\2" + content + b".", value_names(), "here")


def test_what_python_writes_is_read():
    shared = [1, 2.5, "\u00fc", None, True, -5, 2**40, (1, 2), -(2**100), "x" * 300]
    value = {"a": shared, "b": [shared, shared], 3: (1,) * 5, ("x", 1): {"deep": [[[]]]}}
    for protocol in range(6):
        assert read_pickle(pickle.dumps(value, protocol), value_names(), "here") == value
    assert read_pickle(pickle.dumps(b"bytes", 4), value_names(), "here") == b"bytes"


def test_no_pickle_changes_a_class(tmp_path):
    """What one sets of a function, all files would be read with afterwards."""
    (tmp_path / "evil").mkdir()
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        (tmp_path / "evil" / ".metadata").write_bytes(b"\x80\x02ctorch._utils\n" + name.encode() + b"\n" + SLOTS + b".")
        with pytest.raises(InvalidCheckpointError):
            load_checkpoint(tmp_path / "evil")
    torch.save({"w": torch.arange(3.0)}, tmp_path / "good.pt")
    assert list(torch_file(tmp_path / "good.pt")[0].parts["model"]) == ["w"]


def changed_metadata(folder, change):
    """Save with torch, and change its metadata."""
    dcp.save({"w": torch.full((3, 4), 5.0), "step": 3}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    w = metadata.state_dict_metadata["w"]
    change(SimpleNamespace(all=metadata, w=w, chunk=w.chunks[0]))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def places(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "w")


def nested(times):
    value = []
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m.chunk, "offsets", torch.Size((-3, 0))), "-3 is no whole number"),
        (lambda m: setattr(m.chunk, "sizes", (3.9, 4.2)), "3.9 is no whole number"),
        (lambda m: setattr(m.w, "size", (3.9, 4.2)), "3.9 is no whole number"),
        (lambda m: m.w.chunks.clear(), "tensor 'w' of shape .3, 4. has chunks of 0 elements"),
        (lambda m: (m.w.chunks.clear(), setattr(m.w, "size", (2**33,))), "has chunks of 0 elements"),
        (lambda m: setattr(m.w, "size", (0, 2**62, 2**62)), "is no shape of a tensor"),
        (
            lambda m: setattr(places(m.all), "relative_path", "../x"),
            "names the file '../x'; expected a file of the same",
        ),
        (lambda m: setattr(places(m.all), "relative_path", nested(34)), "nests .* values, expected at most"),
        (lambda m: setattr(places(m.all), "relative_path", [["x"]]), r"names the file \[\['x'\]\]; expected"),
        (lambda m: setattr(places(m.all), "transform_descriptors", ["zstd"]), "was written with .'zstd'.; only files"),
        (lambda m: setattr(places(m.all), "offset", -1), "-1 is no whole number"),
        (lambda m: m.all.planner_data.update(w=("a",) * 200_000), "has 'w' at .*, expected at most 100 keys"),
        (lambda m: m.all.planner_data.update(step=("w",)), "has two values at .'w',|has two tensors"),
        (lambda m: m.all.storage_data.clear(), "has chunks of 0 elements"),
    ],
)
def test_metadata_of_torch_that_contradicts_itself(tmp_path, change, text):
    changed_metadata(tmp_path, change)
    refused(tmp_path, text)


def test_a_value_without_a_place_is_named(tmp_path):
    def change(m):
        for index in [index for index in m.all.storage_data if index.fqn == "step"]:
            del m.all.storage_data[index]

    changed_metadata(tmp_path, change)
    refused(tmp_path, "has no place of the value 'step'")


def with_header(folder, header):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b'{"w": ' + b"9" * 100_000 + b"}", "is no JSON: Exceeds the limit"),
        (b'{"w": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "is no JSON: maximum recursion depth"),
        (b'{"w": {"dtype": "F32", "shape": [0, %d, %d], "data_offsets": [0, 0]}}' % (2**62, 2**62), "is described by"),
        (
            b'{"w": [' + b"[]," * 4_000_001 + b"0]}",
            "has about 8,000,004 values beside 64 bytes of data, expected at most",
        ),
    ],
    ids=["digits", "deep", "shape", "many"],
)
def test_headers_that_are_too_much(tmp_path, header, text):
    with_header(tmp_path / "c", header)
    with pytest.raises(InvalidCheckpointError, match=f"/c: .*model.safetensors.*{text}"):
        load_checkpoint(tmp_path / "c")
    with pytest.raises((InvalidCheckpointError, RuntimeError), match=text):
        load_model(torch.nn.Linear(2, 2), tmp_path / "c")


def test_a_key_twice_among_many_is_found_at_once(tmp_path):
    names = ", ".join(f'"w{number}": 1' for number in [*range(60_000), 59_999])
    with_header(tmp_path / "c", ("{" + names + "}").encode())
    with pytest.raises(InvalidCheckpointError, match="the header of model.safetensors has the key 'w59999' twice"):
        load_checkpoint(tmp_path / "c")


def test_a_manifest_of_many_lists_is_refused_before_it_is_read(tmp_path):
    save({"step": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / "manifest.json").write_bytes(sealed({"a": [[]] * 4_100_000}))
    refused(tmp_path / "c", "manifest.json has about .* values beside .* bytes of data, expected at most 4,000,000")


@pytest.mark.parametrize(
    ("key", "value"),
    [("versions", [1]), ("versions", {"a": 1}), ("aliases", {"model": [1]}), ("step", "x"), ("step", -1)],
)
def test_a_manifest_with_other_types_is_named(tmp_path, key, value):
    save({"step": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    tree = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    del tree["hash"]
    (tmp_path / "c" / "manifest.json").write_bytes(sealed(tree | {key: value}))
    with pytest.raises(InvalidCheckpointError, match="manifest.json is not a manifest: "):
        summary(tmp_path / "c")


def test_values_beside_much_data_may_be_many():
    from hp_checkpoint.disk.storage import check_values

    content = json.dumps([0] * 4_100_000).encode()
    check_values(content, 20_000_000, "here")
    with pytest.raises(InvalidCheckpointError, match="^here has about 4,100,000 values beside 1,000 bytes of data"):
        check_values(content, 1000, "here")
    assert Manifest.from_bytes(Manifest(None, {}, {}).to_bytes(), "m").parts == {}


@pytest.mark.parametrize("count", [42, pytest.param(210, marks=pytest.mark.thorough)])
def test_mutants_of_every_format_are_named(count):
    """A share of what `nox -s robustness` makes: bytes, numbers, instructions and texts changed at random."""
    program = Path(__file__).parents[2] / "benchmarks" / "robust_hostile.py"
    done = subprocess.run(
        [sys.executable, program, "--mutants", str(count)], capture_output=True, text=True, timeout=600
    )
    assert not done.returncode and f"{count} mutants, 0 faults" in done.stdout, done.stdout + done.stderr
