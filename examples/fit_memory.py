"""Fits a small Llama of transformers into a budget for what it saves between forward and backward.

    python examples/fit_memory.py [--part 0.5]

One step is traced, a plan is made for the budget, and the model follows it; the losses have the bits of the same model
without it. Needs `pip install "hp-offload[torch,plan]" transformers`.
"""

from __future__ import annotations

import argparse
import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is made here, nothing is downloaded

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hp_offload import apply_memory_plan, plan_memory, trace_saved

STEPS = 5


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> list[float]:
    """Return the losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a small Llama into a budget")
    parser.add_argument("--part", type=float, default=0.5, help="budget, as a part of all that is saved")
    part = parser.parse_args().part
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    plain = LlamaForCausalLM(config)
    model, tokens = copy.deepcopy(plain), torch.randint(256, (2, 128))
    saved = trace_saved(model, (), {"input_ids": tokens, "labels": tokens})
    plan = plan_memory(saved, budget=int(part * sum(each.bytes for each in saved)), bandwidth=25e9)
    print(plan)
    apply_memory_plan(model, plan)
    losses = train(model, tokens)
    print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    assert losses == train(plain, tokens), "the same bits as without the plan"


if __name__ == "__main__":
    main()
