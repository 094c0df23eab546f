# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""transformers' own switch for activation checkpointing, on sharded layers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
model.gradient_checkpointing_enable()
if not ALONE:
    init_process_group()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    tokens = own(torch.randint(64, (4, 8)))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
