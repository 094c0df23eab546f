"""A step's folder is a model that transformers loads, written by ranks that shard it over dp and tp."""

from __future__ import annotations

import torch

from hp_checkpoint import Checkpointer
from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import get_platform
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@on_ranks(4, timeout=120)
def test_transformers_loads_what_four_ranks_wrote(tmp_path):
    """Nothing runs between the save and `from_pretrained`; logits are equal, and so are the weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        logits = model(tokens).logits
    model.to(device_type())
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh["dp"])
    fully_shard(model, mesh["dp"])
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(7, model)
    if get_platform().groups.rank() == 0:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-00000007", local_files_only=True)
        assert type(loaded) is LlamaForCausalLM
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, truth[name]), name
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, logits)
    get_platform().collectives.barrier()
