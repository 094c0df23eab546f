"""Group relative policy optimization: one program generates and trains, under one plan.

python examples/loops/grpo.py
torchrun --standalone --nproc-per-node 2 examples/loops/grpo.py
torchrun --standalone --nproc-per-node 4 examples/loops/grpo.py --tp 2

The reward is the share of new tokens that are the one after the token before, so a model that counts gets 1. Tokens are
drawn by the number of their prompt, and gradients are summed in an order of their own (deterministic), so the rewards
are the same for any number of ranks. Log-probabilities before the update are those that generation reports: with
generation = "exact" they have the bits of training. Under tp, which has no such mode, they are computed again.
Objective: Shao et al., "DeepSeekMath", arXiv:2402.03300, section 4.1.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hp_platform
from hp_plan import FsdpSection, MeshSection, ParallelPlan, RunSection, apply, generating, log_probabilities

PROMPTS, GROUP, NEW, VOCABULARY = 8, 8, 8, 16


def make(plan: ParallelPlan) -> torch.nn.Module:
    """Return the model that training begins with, under a plan."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
    return apply(LlamaForCausalLM(config).to(getattr(torch, plan.run.dtype)), plan)


def reward(texts: torch.Tensor) -> torch.Tensor:
    """Return the share of new tokens that count on from the token before, (rows,)."""
    return ((texts[:, -NEW:] - texts[:, -NEW - 1 : -1]) % VOCABULARY == 1).double().mean(1)


def train(steps: int = 60, tp: int = 1, clip: float = 0.2, beta: float = 0.01) -> list[float]:
    """Return the mean reward of each step; run by every rank."""
    data = dist.get_world_size() // tp
    share = PROMPTS // data
    first = dist.get_rank() // tp * share
    exact = RunSection(deterministic=True, generation="exact")
    plan = ParallelPlan(
        mesh=MeshSection(dp_shard=data, tp=tp),
        styles="auto" if tp > 1 else {},
        fsdp=FsdpSection(groups=("model.layers.*",)),
        run=exact if tp == 1 else RunSection(dtype="float64"),
    )
    actor, reference = make(plan), make(plan).requires_grad_(False)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=5e-3, weight_decay=0.0)
    rewards = []
    for step in range(steps):
        prompts = torch.randint(VOCABULARY, (PROMPTS, 3), generator=torch.Generator().manual_seed(step))
        own, numbers = prompts[first : first + share], range(first, first + share)
        options = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": GROUP, "pad_token_id": 0}
        with generating(actor, seed=step) as generation:
            texts = actor.generate(own, attention_mask=torch.ones_like(own), samples=numbers, **options)
        scores = reward(texts)
        groups = scores.view(share, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            before = generation.log_probabilities
            if tp > 1:
                before = log_probabilities(actor, texts).log_probabilities[:, -NEW:]
            wanted = log_probabilities(reference, texts).log_probabilities[:, -NEW:]
        for update in range(2):
            now = log_probabilities(actor, texts).log_probabilities[:, -NEW:]
            ratio = (now - before).exp()
            assert update or bool((ratio == 1).all())  # what is trained first is what was generated, to the bit
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
            away = (wanted - now).exp() - (wanted - now) - 1
            loss = (beta * away - gain).mean()
            loss.backward()  # gradients are the means over the ranks
            optimizer.step()
            optimizer.zero_grad()
        total = scores.sum()
        dist.all_reduce(total)
        rewards.append(total.item() / (tp * PROMPTS * GROUP))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tp", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hp_platform.init_process_group()
    rewards = train(arguments.steps, arguments.tp)
    if dist.get_rank() == 0:
        print("rewards:", " ".join(f"{value:.6f}" for value in rewards))
    hp_platform.destroy_process_group()
