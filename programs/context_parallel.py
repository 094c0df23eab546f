# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A sequence over two ranks: each has half of the tokens, attention sees all of them."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from hp_dtensor import init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ContextParallel, context_parallel_shard, parallelize_module
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    parallelize_module(model, mesh, {"model.layers.*.self_attn": ContextParallel(load_balance=True)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    tokens = torch.randint(64, (1, 17))
    part = {"ids": tokens[:, :-1], "positions": torch.arange(16)[None], "labels": tokens[:, 1:]}
    if not ALONE:
        part = context_parallel_shard(part, mesh, load_balance=True)
    logits = model(input_ids=part["ids"], position_ids=part["positions"], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), part["labels"].flatten())
    loss.backward()
    if not ALONE:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= RANKS
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
