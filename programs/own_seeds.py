# /// program
# ranks = 4
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""Ranks that draw weights of their own train those of rank 0, on parts of sequences with a RoPE of the whole length."""

import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(RANK)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 10}
rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope, **sizes))
rows = slice(None)
if not ALONE:
    init_process_group()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = apply(model, ParallelPlan(mesh=MeshSection(dp_shard=2, cp=2)))
    assert any("have other initial weights than rank 0" in str(each.message) for each in said)
    rows = slice(RANK // 2 * 2, RANK // 2 * 2 + 2)  # the ranks of one cp group have the same
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

torch.manual_seed(1)
for _ in range(4):
    tokens = torch.randint(64, (4, 16))[rows]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
