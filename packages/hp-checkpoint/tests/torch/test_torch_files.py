"""Files of torch.save, read in place and without running them."""

from __future__ import annotations

import os
import random

import pytest
import torch
from safetensors.torch import load_file

from hp_checkpoint import (
    InvalidCheckpointError,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    load,
    load_checkpoint,
    save,
)
from hp_checkpoint.extend import to_hugging_face
from hp_checkpoint.formats.torch_files import torch_file

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")


def test_a_training_s_state(tmp_path):
    """Of a module and an optimizer; views, other strides, and dtypes that have no storage class."""
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    base = torch.arange(24).reshape(4, 6)
    others = {
        "turned": base.t(),
        "part": base[1:3, 2:5],
        "columns": torch.arange(800).reshape(8, 100)[:, 3:5],
        "u16": torch.arange(3).to(torch.uint16),
        "empty": torch.zeros(0, 2),
    }
    others |= {"fp8": torch.ones(4).to(torch.float8_e4m3fn), "parameter": model.weight, "scalar": torch.tensor(2.0)}
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3, "more": [others, None, "x"]}
    torch.save(state, tmp_path / "all.pt")
    convert_full_checkpoint_to_dcp(tmp_path / "all.pt", tmp_path / "dcp", "torch")
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    assert found["step"] == 3 and found["more"][1:] == [None, "x"]
    assert found["optim"]["param_groups"] == state["optim"]["param_groups"]
    pairs = [(found["model"][name], each) for name, each in state["model"].items()]
    pairs += [(found["more"][0][name], each) for name, each in others.items()]
    pairs += [(found["optim"]["state"][str(n)][k], v) for n, s in state["optim"]["state"].items() for k, v in s.items()]
    for got, each in pairs:
        assert got.dtype == each.dtype and got.shape == each.shape and got.tolist() == each.tolist()


def test_the_weights_of_an_older_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = {"w": torch.randn(3, 4), "b": torch.arange(3).bfloat16()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        InvalidCheckpointError, match="has pytorch_model.bin, .* `hyper-parallel checkpoint convert FILE"
    ):
        load({}, checkpoint_id=tmp_path, no_dist=True)
    assert to_hugging_face(tmp_path / "pytorch_model.bin", tmp_path / "model") == ["config.json", "model.safetensors"]
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    with pytest.raises(FileExistsError, match="model exists; name a folder that doesn't"):
        to_hugging_face(tmp_path / "pytorch_model.bin", tmp_path / "model")
    save(torch.load(tmp_path / "pytorch_model.bin"), checkpoint_id=tmp_path / "other", no_dist=True)
    to_hugging_face(tmp_path / "other", tmp_path / "again")
    for folder in ("model", "other", "again"):
        load(found := {name: torch.zeros_like(each) for name, each in weights.items()}, checkpoint_id=tmp_path / folder)
        assert all(torch.equal(found[name], each) for name, each in weights.items())


def test_a_file_in_place_of_a_folder(tmp_path):
    file = tmp_path / "x.pt"
    torch.save({"w": torch.arange(3), "step": 4}, file)
    for call in (lambda: load({}, checkpoint_id=file, no_dist=True), lambda: load_checkpoint(file)):
        with pytest.raises(
            InvalidCheckpointError, match="x.pt is a file, .*`hyper-parallel checkpoint convert .*x.pt TARGET"
        ):
            call()
    convert_full_checkpoint_to_dcp(file, tmp_path / "folder", "torch")  # as the error says
    assert load_checkpoint(tmp_path / "folder")["step"] == 4


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"w": Evil()}, r"names posix.system, which is refused"),
        ([torch.zeros(1)], "has a list, expected a dictionary"),
        ({"w": torch.ones(1).expand(3)}, r"'w' repeats elements .*; save it after .contiguous\(\)"),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, r"names torch.ComplexDoubleStorage"),
        (torch.nn.Linear(1, 1), r"names torch.nn.modules.linear.Linear"),
    ],
    ids=["code", "list", "repeated", "dtype", "module"],
)
def test_what_is_refused(value, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(InvalidCheckpointError, match=text):
        convert_full_checkpoint_to_dcp(tmp_path / "x.pt", tmp_path / "dcp", "torch")
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]
    if "contiguous" in text:
        torch.save({"w": value["w"].contiguous()}, tmp_path / "x.pt")
        convert_full_checkpoint_to_dcp(tmp_path / "x.pt", tmp_path / "dcp", "torch")
        assert dcp_to_full_state_dict(tmp_path / "dcp")["w"].tolist() == [1.0] * 3


def test_damaged_files_and_other_platforms(tmp_path):
    torch.save({"w": torch.zeros(5000)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidCheckpointError, match="x.pt is no archive of torch.save"):
        to_hugging_face(tmp_path / "x.pt", tmp_path / "model")
    damaged = random.Random(0)
    for _ in range(300):
        changed = bytearray(content)
        for at in (damaged.randrange(600), damaged.randrange(len(content) - 600, len(content))):
            changed[at] = damaged.randrange(256)
        (tmp_path / "x.pt").write_bytes(changed)
        try:
            torch_file(tmp_path / "x.pt")
        except InvalidCheckpointError:
            pass
    torch.save({"w": torch.zeros(5)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidCheckpointError, match="x.pt is no archive of torch.save"):
        to_hugging_face(tmp_path / "x.pt", tmp_path / "model")
    with pytest.raises(ValueError, match="x.pt is a file of torch, and src_platform='mindspore'"):
        convert_full_checkpoint_to_dcp(tmp_path / "x.pt", tmp_path / "dcp", "mindspore")
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]
