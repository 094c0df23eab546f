# /// program
# ranks = 2
# losses = 'sum'  # the last rank has it
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""An unmodified Llama in two stages, split at its blocks, each rank with its own part."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_pipeline import PipelinedModel, ScheduleGPipe, split_model
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
if not ALONE:
    init_process_group()
    split = split_model(model, RANKS)
    model = PipelinedModel(ScheduleGPipe(split.pipeline_stage(RANK), micro_batch_num=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    tokens = torch.randint(64, (4, 8))
    if ALONE:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    else:
        losses = model.run(tokens, labels=tokens)
        loss = torch.stack(losses).mean() if losses else torch.tensor(0.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
