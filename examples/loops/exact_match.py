"""Trains a model under a plan to turn words around, generates answers to all prompts, and counts those that are right.

torchrun --standalone --nproc-per-node 2 examples/loops/exact_match.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hp_platform
from hp_plan import FsdpSection, MeshSection, ParallelPlan, apply

LENGTH = 3  # letters of a word; a row is a word, token 0, and the word from its end


def rows() -> torch.Tensor:
    """Make the examples, the same on every rank."""
    words = torch.randint(1, 16, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.cat([words, torch.zeros(len(words), 1, dtype=torch.long), words.flip(1)], 1)


def train(model: Any, own: torch.Tensor, steps: int = 9) -> None:
    """Train on some rows; the loss is that of the answers alone."""
    labels = own.clone()
    labels[:, : LENGTH + 1] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(input_ids=own, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def matches(model: Any, own: torch.Tensor) -> torch.Tensor:
    """Tell for each row whether the answer that the model generates is the row's."""
    model.eval()
    prompts = own[:, : LENGTH + 1]
    written = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False
    )
    return (written == own).all(1)


def base() -> LlamaForCausalLM:
    """Make the model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **special, num_attention_heads=4, num_key_value_heads=2))


def exact_match(mesh: MeshSection) -> tuple[int, int]:
    """Return how many answers are right, and how many there are; run by every rank."""
    groups = ("model.layers.*",) if mesh.dp_shard > 1 else ()
    model = apply(base(), ParallelPlan(mesh=mesh, styles="auto", fsdp=FsdpSection(groups=groups)))

    # With `tp` all ranks have the same rows. Ranks call `generate` equally often, each gives its part of the weights.
    place = mesh.coordinate(dist.get_rank()).get("dp_shard", 0)
    own = rows().chunk(mesh.dp_shard)[place]
    train(model, own)
    right = matches(model, own)

    counts = torch.tensor([int(right.sum()), len(right)])
    dist.all_reduce(counts)  # each row was counted by all ranks of a tensor-parallel group
    right_ones, total = (counts // mesh.tp).tolist()
    return right_ones, total


if __name__ == "__main__":
    hp_platform.init_process_group()
    ranks = dist.get_world_size()
    for chosen in (MeshSection(dp_shard=ranks), MeshSection(tp=ranks)):
        count, total = exact_match(chosen)
        if dist.get_rank() == 0:
            print(f"{chosen}: {count} of {total} answers are right")
    hp_platform.destroy_process_group()
