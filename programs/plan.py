# /// program
# ranks = 4
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A plan applied to an unmodified Llama: tensor parallelism by its own table, layers sharded."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
rows = slice(None)
if not ALONE:
    init_process_group()
    mesh, groups = MeshSection(dp_shard=2, tp=2), FsdpSection(groups=("model.layers.*",))
    model = apply(model, ParallelPlan(mesh=mesh, styles="auto", fsdp=groups))
    rows = slice(RANK // 2 * 2, RANK // 2 * 2 + 2)  # the ranks of one tp group have the same
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    tokens = torch.randint(64, (4, 8))[rows]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
