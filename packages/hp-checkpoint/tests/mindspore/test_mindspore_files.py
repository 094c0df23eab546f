"""Files of mindspore.save_checkpoint, read in place."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.experimental import MapParameter
from mindspore.train import serialization
from mindspore.train.checkpoint_pb2 import Checkpoint

from hp_checkpoint import InvalidCheckpointError, convert_full_checkpoint_to_dcp, dcp_to_full_state_dict
from hp_checkpoint.extend import to_hugging_face

KINDS = ("float16", "bfloat16", "float64", "int8", "uint16", "int64", "bool_")


@pytest.mark.parametrize("crc", [False, True])
def test_a_cell_and_cut_tensors(crc, tmp_path, monkeypatch):
    """Large tensors are cut at elements that are no rows; here at few."""
    monkeypatch.setattr(serialization, "SLICE_SIZE", 16)
    cell = nn.Dense(7, 5)
    weights = {each.name: each for each in cell.get_parameters()}
    weights |= {kind: Tensor(np.arange(6) % 2, getattr(mindspore, kind)) for kind in KINDS}
    weights |= {"scalar": Tensor(3.0), "deep": Tensor(np.arange(120).reshape(2, 3, 4, 5).astype(np.float32))}
    listed = [{"name": name, "data": value} for name, value in weights.items()]
    mindspore.save_checkpoint(listed, str(tmp_path / "x.ckpt"), crc_check=crc)
    convert_full_checkpoint_to_dcp(tmp_path / "x.ckpt", tmp_path / "dcp", "mindspore")
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].asnumpy().tolist() == value.asnumpy().tolist(), name


def test_what_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    mindspore.save_checkpoint([{"name": "w", "data": Tensor(np.arange(400.0))}], str(path))
    content = path.read_bytes()
    for damaged in (content[:-5], b"x" + content, content[:3], b"", content + b"crc"):
        path.chmod(0o600)
        path.write_bytes(damaged)
        with pytest.raises(InvalidCheckpointError, match="x.ckpt"):
            to_hugging_face(path, tmp_path / "model")
    mindspore.save_checkpoint([{"name": "w", "data": Tensor(1)}], str(path), enc_key=b"0123456789ABCDEF")
    with pytest.raises(InvalidCheckpointError, match=r"is no file of mindspore.save_checkpoint, or encrypted"):
        to_hugging_face(path, tmp_path / "model")
    with pytest.raises(ValueError, match="is a file of mindspore, and src_platform='torch'"):
        convert_full_checkpoint_to_dcp(path, tmp_path / "dcp", "torch")


def test_a_map_is_refused_and_its_keys_and_values_are_not(tmp_path):
    rows, path = np.arange(6, dtype=np.float32).reshape(2, 3), tmp_path / "x.ckpt"
    table = MapParameter(name="table", key_tensor=Tensor([7, 3], mindspore.int32), value_tensor=Tensor(rows))
    message = Checkpoint()
    value = message.value.add(tag="table")
    for array in table.export_data():
        content = array.tobytes()
        value.maptensor.tensor.add(dims=array.shape, tensor_type=str(array.dtype), tensor_content=content)
    path.write_bytes(message.SerializeToString())
    with pytest.raises(
        InvalidCheckpointError, match=r"'table' is .* MapParameter of .*; save its get_keys\(\) and get_v"
    ):
        convert_full_checkpoint_to_dcp(path, tmp_path / "dcp", "mindspore")
    parts = {"table.keys": table.get_keys(), "table.values": table.get_values()}
    mindspore.save_checkpoint([{"name": name, "data": part} for name, part in parts.items()], str(path))
    convert_full_checkpoint_to_dcp(path, tmp_path / "dcp", "mindspore")
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    again = MapParameter(name="table", key_tensor=found["table.keys"], value_tensor=found["table.values"])
    for one, other in zip(again.export_data(), table.export_data(), strict=True):
        np.testing.assert_array_equal(one, other)
