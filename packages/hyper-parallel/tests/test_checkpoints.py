"""Checkpoints are Hugging Face models, with nothing between."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hp_checkpoint import load_model, save_model
from hp_dtensor import init_device_mesh
from hp_fsdp import full_state_dict, fully_shard
from hp_platform import get_platform
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@on_ranks(4, timeout=120)
def test_transformers_loads_what_four_ranks_wrote(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(device_type()).eval()
    truth = copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    layer = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh["tp"], layer)
        fully_shard(block, mesh["dp"])
    fully_shard(model, mesh["dp"])
    save_model(model, tmp_path / "model")
    tokens = torch.arange(8)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert type(loaded) is LlamaForCausalLM
    own = truth.cpu()
    for name, value in own.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert torch.equal(own(tokens).logits, loaded.eval()(tokens).logits)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if get_platform().groups.rank() == 0:
        loaded.save_pretrained(tmp_path / "hub", max_shard_size="10KB")
    get_platform().collectives.barrier()
    load_model(model, tmp_path / "hub")  # a folder without a manifest
    for name, value in full_state_dict(model).items():
        assert torch.equal(value.cpu(), own.state_dict()[name]), name
