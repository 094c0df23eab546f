# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""Samples whose labels are all masked: in some steps a rank has no token that counts."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANKS, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
if not ALONE:
    init_process_group()
    mesh = MeshSection(dp_shard=RANKS)
    model = apply(model, ParallelPlan(mesh=mesh, fsdp=FsdpSection(groups=("model.layers.*",))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(4):
    tokens = torch.randint(64, (4, 8))
    labels = tokens.clone()
    labels[0, :5] = -100
    if step % 2:
        labels[2:] = -100
    counted = (labels[:, 1:] != -100).sum() / RANKS  # ranks' losses are averaged
    loss = model(input_ids=own(tokens), labels=own(labels), num_items_in_batch=counted).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
