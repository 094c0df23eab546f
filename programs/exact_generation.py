# /// program
# ranks = 2
# tolerance = 1e-6  # exact generation is for float32 and bfloat16
# ///
"""A policy trained on what it wrote, in exact generation: before an update its first ratio is 1, to the bit."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import FsdpSection, MeshSection, ParallelPlan, RunSection, apply, generating, log_probabilities
from hp_platform import destroy_process_group, init_process_group
from reporting import RANK, RANKS, own, report_step, report_weights

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
model = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes, **heads))
init_process_group()
run = RunSection(deterministic=True, generation="exact")
groups = {"fsdp": FsdpSection(groups=("model.layers.*",))} if RANKS > 1 else {}
model = apply(model, ParallelPlan(mesh=MeshSection(dp_shard=RANKS), run=run, **groups))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(4):
    prompts = own(torch.randint(64, (4, 3)))
    numbers = range(RANK * len(prompts), (RANK + 1) * len(prompts))
    with generating(model, seed=step) as generation:
        options = {"do_sample": True, "max_new_tokens": 5, "pad_token_id": 0}
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), samples=numbers, **options)
    ratio = (log_probabilities(model, texts).log_probabilities[:, -5:] - generation.log_probabilities).exp()
    assert bool((ratio == 1).all()), f"ratios from {float(ratio.min())} to {float(ratio.max())}"
    reward = (texts[:, -5:] % 2 == 0).float() - 0.5
    loss = -(ratio * reward).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
destroy_process_group()
