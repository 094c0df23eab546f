# /// program
# ranks = 4
# tolerance = 1e-6  # the model's norms compute in float32
# ///
"""Layers at home on the host under replicas and tensor parallelism: Muon, accumulation, and a checkpoint in between."""

import torch

from hp_checkpoint import Checkpointer
from hp_fsdp import clip_grad_norm_
from hp_plan import ParallelPlan, apply, build_model, build_optimizer
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, report_step, report_weights

tables = {
    "model": {
        "config": "LlamaConfig",
        "overrides": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    },
    "optimizer": {"name": "muon", "lr": 1e-2},
    "run": {"dtype": "float64"},
}
tables["model"]["overrides"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
rows = slice(None)
if not ALONE:
    init_process_group()
    tables |= {"mesh": {"dp_replicate": 2, "tp": 2}, "memory": {"homes": {"model.layers.*": "host"}}}
    rows = slice(RANK // 2 * 2, RANK // 2 * 2 + 2)  # the ranks of one tp group have the same
plan = ParallelPlan.from_dict(tables)
model = apply(build_model(plan), plan)
optimizer = build_optimizer(plan, model.named_parameters())
torch.manual_seed(0)
for step in range(1, 6):
    for _ in range(2):
        tokens = torch.randint(64, (4, 8))[rows]
        loss = model(input_ids=tokens, labels=tokens).loss / 2
        loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach(), step)
    if step == 3 and not ALONE:
        with Checkpointer("checkpoints") as checkpoints:
            checkpoints.save(step, model, optimizer).wait()
            for each in model.parameters():
                torch.nn.init.zeros_(each)
            checkpoints.load(model, optimizer)

report_weights(model)
if not ALONE:
    destroy_process_group()
