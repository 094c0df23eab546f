# /// program
# ranks = 2
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""Reinforcement learning: the actor writes, a critic and a frozen reference judge, both are trained."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hp_fsdp import fully_shard, register_fsdp_forward_method
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
actor = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
reference = copy.deepcopy(actor).requires_grad_(False).eval()
critic = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
if not ALONE:
    init_process_group()
    for whole in (actor, reference):
        for layer in whole.model.layers:
            fully_shard(layer)
        fully_shard(whole)
    fully_shard(critic)
    register_fsdp_forward_method(actor, "generate")
optimizers = [torch.optim.SGD(actor.parameters(), lr=0.2), torch.optim.AdamW(critic.parameters(), lr=1e-2)]


def log_probabilities(model, tokens):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, 3:]


for _ in range(3):
    prompt = own(torch.randint(64, (4, 4)))
    with torch.no_grad():
        tokens = actor.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
        before = log_probabilities(reference, tokens)
    reward = (tokens[:, 4:] % 2).double()
    now = log_probabilities(actor, tokens)
    value = critic(tokens)[:, 3:-1, 0]
    advantage = (reward - 0.1 * (now - before)).detach() - value
    loss = -(advantage.detach() * now).mean() + advantage.square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    report_step(loss.detach())

report_weights(actor, critic)
if not ALONE:
    destroy_process_group()
