# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""The usual loss, then losses of what is inside of sharded blocks: attention weights, what a hook kept."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import MeshSection, ParallelPlan, apply
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANKS, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
if not ALONE:
    init_process_group()
    model = apply(model, ParallelPlan(mesh=MeshSection(dp_shard=RANKS)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
kept = []
model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))

for step in range(6):
    tokens = own(torch.randint(64, (4, 8)))
    out = model(input_ids=tokens, labels=tokens, output_attentions=True)
    loss = (out.loss.double(), out.attentions[-1].square().mean(), kept[0].square().mean())[step % 3]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss, out = loss.detach(), kept.clear()  # the graph goes
    report_step(loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
