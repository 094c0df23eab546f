"""Trains a model of transformers by a loop of one's own; two lines of it are hp_plan's.

torchrun --standalone --nproc-per-node 2 examples/loops/plain.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hp_platform
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply


def train(steps: int = 5) -> list[float]:
    """Return the losses; run by every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.randint(64, (8, 16))

    plan = ParallelPlan(mesh=MeshSection(dp_shard=dist.get_world_size()), fsdp=FsdpSection(groups=("model.layers.*",)))
    model = apply(model, plan)

    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()  # gradients are the means over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    hp_platform.init_process_group()
    losses = train()
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    hp_platform.destroy_process_group()
