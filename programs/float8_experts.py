# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A Mixtral under a plan whose experts, spread over two ranks, multiply in eight bits: scales are of one process."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from hp_plan import MeshSection, ParallelPlan, PrecisionSection, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
model = MixtralForCausalLM(MixtralConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
if not ALONE:
    init_process_group()
mesh = MeshSection() if ALONE else MeshSection(dp_shard=2, ep=2)
model = apply(model, ParallelPlan(mesh=mesh, precision=PrecisionSection(experts="float8-rowwise", kernels="emulated")))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    tokens = torch.randint(64, (4, 8))  # the same on all ranks: a scale is of all tokens that an expert gets
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
