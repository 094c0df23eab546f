# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A Llama whose activations are sharded along the sequence between its matrices."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
if not ALONE:
    init_process_group()
    model = apply(model, ParallelPlan(mesh=MeshSection(tp=RANKS), styles="auto-sequence"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(5):
    tokens = torch.randint(64, (4, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
