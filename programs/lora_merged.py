# /// program
# ranks = 2
# constant = false  # the last step is the merged model's
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""Adapters that were trained on ranks, gathered, and merged into the model of one process."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hp_fsdp import full_state_dict, fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base(), config)
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
torch.manual_seed(1)
for _ in range(4):
    tokens = own(torch.randint(64, (4, 8)))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())
state = model.state_dict() if ALONE else full_state_dict(model)
whole = get_peft_model(base(), config)
whole.load_state_dict(state)
merged = whole.merge_and_unload()
with torch.no_grad():
    tokens = torch.arange(16).view(2, 8)
    report_step(merged(input_ids=tokens, labels=tokens).loss)

report_weights(merged)
if not ALONE:
    destroy_process_group()
