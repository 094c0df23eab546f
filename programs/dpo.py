# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""DPO: chosen and rejected answers under a model and its frozen reference."""

import copy

import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
reference = copy.deepcopy(model).requires_grad_(False).eval()
if not ALONE:
    init_process_group()
    for whole in (model, reference):
        for layer in whole.model.layers:
            fully_shard(layer)
        fully_shard(whole)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def score(judge, tokens):
    logits = judge(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    return logits[:, 3:-1].gather(-1, tokens[:, 4:, None]).sum((1, 2))  # of the answer's tokens


for _ in range(4):
    prompt = torch.randint(64, (4, 4))
    chosen, rejected = (torch.cat([prompt, torch.randint(64, (4, 5))], 1) for _ in range(2))
    both = torch.cat([own(chosen), own(rejected)])
    with torch.no_grad():
        before = score(reference, both)
    gain = (score(model, both) - before).chunk(2)
    loss = -logsigmoid(0.5 * (gain[0] - gain[1])).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
