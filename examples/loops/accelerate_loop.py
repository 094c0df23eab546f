"""Trains a model under a plan in a loop of accelerate, and saves it from all ranks.

    torchrun --standalone --nproc-per-node 2 examples/loops/accelerate_loop.py

`apply` comes before `prepare`, which leaves a sharded model as it is. accelerate's own FSDP plugin, mixed precision and
`save_state` are refused by name: a plan has `[fsdp]` and its dtypes, and hp-checkpoint saves.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hp_checkpoint import save_model
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply


def train(folder: str, steps: int = 5) -> list[float]:
    """Return the losses; run by every rank."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else accelerate sees one process where no GPU is
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    loader = DataLoader(torch.randint(64, (8, 16)), batch_size=8 // accelerator.num_processes)

    mesh = MeshSection(dp_shard=accelerator.num_processes)
    model = apply(model, ParallelPlan(mesh=mesh, fsdp=FsdpSection(groups=("model.layers.*",))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(steps):
        for own in loader:  # each rank's rows
            loss = model(input_ids=own, labels=own).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    save_model(model, folder)  # LlamaForCausalLM.from_pretrained(folder) loads it
    return losses


if __name__ == "__main__":
    print("losses:", " ".join(f"{loss:.4f}" for loss in train("runs/accelerate")))
    torch.distributed.destroy_process_group()
