# /// program
# ranks = 2
# losses = 'sum'  # the last rank has it
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""A Llama in two stages writes the texts that it is trained on: the same tokens on both ranks as in one process."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_plan import MeshSection, ParallelPlan, PipelineSection, apply, generating
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
model = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes, **heads))
if not ALONE:
    init_process_group()
    plan = ParallelPlan(mesh=MeshSection(pp=2), pipeline=PipelineSection(schedule="zbv", micro_batches=2))
    model = apply(model, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(4):
    prompts = torch.randint(64, (4, 3))
    with generating(model, seed=step) as generation:
        options = {"do_sample": True, "max_new_tokens": 5, "pad_token_id": 0}
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), samples=range(4), **options)
        written = generation.log_probabilities.double().mean()
    if ALONE:
        loss = model(input_ids=texts, labels=texts).loss
        loss.backward()
    else:
        losses = model.run(input_ids=texts, labels=texts)
        loss = torch.stack(losses).mean() + written if losses else torch.tensor(0.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach() + written if ALONE else loss)

report_weights(model)
if not ALONE:
    destroy_process_group()
