"""Models in another dtype than their files: refused, unless it is asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hp_checkpoint import load_model, save_model
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import get_platform
from hp_testing import as_array, as_tensor, device_type, on_ranks


def model_of(array):
    mesh = init_device_mesh(device_type(), (2,))
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(as_tensor(array), mesh, [Shard(1)]))
    return model


@on_ranks(2)
def test_models_are_cast_on_request(tmp_path):
    array = np.random.default_rng(1).standard_normal((6, 10)).astype(np.float32)
    save_model(model_of(array), tmp_path / "half", dtype="float16")
    if get_platform().groups.rank() == 0:
        assert (load_file(tmp_path / "half" / "model.safetensors")["weight"] == array.astype(np.float16)).all()
    model = model_of(np.zeros_like(array))
    with pytest.raises(
        ValueError, match=r"'weight' is F32 of .* in the checkpoint F16 of shape .6, 10.. load_model\(..., cast=True\)"
    ):
        load_model(model, tmp_path / "half")
    load_model(model, tmp_path / "half", cast=True)
    assert (as_array(model.weight.full_tensor()) == array.astype(np.float16)).all()
    with pytest.raises(ValueError, match=r"'weight' is F32 of shape .6, 11., in the checkpoint F16 of shape"):
        load_model(model_of(np.zeros((6, 11), np.float32)), tmp_path / "half", cast=True)
    with pytest.raises(
        ValueError, match="dtype 'int8' is none to convert to; expected one of float64, float32, float16"
    ):
        save_model(model, tmp_path / "other", dtype="int8")


@on_ranks(1)
def test_transformers_loads_the_dtype_that_was_saved(tmp_path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, dtype="float32"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    save_model(model, tmp_path / "model", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype is torch.bfloat16
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
