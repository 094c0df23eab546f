"""Trains LoRA adapters of peft on a sharded model whose own weights are frozen, and saves them as peft does.

torchrun --standalone --nproc-per-node 2 examples/loops/lora.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hp_platform
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply


def base() -> LlamaForCausalLM:
    """Make the model that is adapted."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def train(folder: str, steps: int = 5) -> list[float]:
    """Return the losses; run by every rank."""
    model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    tokens = torch.randint(64, (8, 16))

    # The plan's patterns name the modules of the model inside.
    plan = ParallelPlan(mesh=MeshSection(dp_shard=dist.get_world_size()), fsdp=FsdpSection(groups=("model.layers.*",)))
    model = apply(model, plan)

    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    adapters = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    model.save_pretrained(folder, state_dict=adapters)  # PeftModel.from_pretrained(base, folder) loads them
    return losses


if __name__ == "__main__":
    hp_platform.init_process_group()
    losses = train("runs/lora")
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    hp_platform.destroy_process_group()
