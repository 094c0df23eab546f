# /// program
# ranks = 4
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""GPT-OSS under tensor parallelism: attention sinks in the clipped norm, experts balanced over padded batches."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
eager = {"experts_implementation": "eager"}  # torch's grouped product has no float64
model = GptOssForCausalLM(GptOssConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **experts, **eager))
rows = slice(None)
if not ALONE:
    init_process_group()
    mesh, groups = MeshSection(dp_shard=2, tp=2), FsdpSection(groups=("model.layers.*",))
    model = apply(model, ParallelPlan(mesh=mesh, styles="auto", fsdp=groups))
    rows = slice(RANK // 2 * 2, RANK // 2 * 2 + 2)  # the ranks of one tp group have the same
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

for _ in range(4):
    tokens = torch.randint(64, (4, 8))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = mask[3, 6:] = 0  # as many labels in each half of the batch
    labels = tokens.masked_fill(mask == 0, -100)
    loss = model(input_ids=tokens[rows], attention_mask=mask[rows], labels=labels[rows]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
