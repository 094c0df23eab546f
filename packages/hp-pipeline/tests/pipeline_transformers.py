"""Tiny models of transformers, split into stages, and the same in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_pipeline import PipelinedModel, PipelineSchedule, placed, split_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 37
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": 3}
_EAGER = {"experts_implementation": "eager"}  # the grouped product takes no float64
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 3,
    },
    "Gemma2": {"tie_word_embeddings": True, **_WINDOW},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **_EAGER},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, **_EAGER},
}


def build(family: str, head: str = "ForCausalLM", **options: Any) -> Any:
    """Build a model in float64, the same on every rank."""
    import transformers

    if family == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
        tokens = {"bos_token_id": None, "eos_token_id": None}
        dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **tokens, **dropout, **options)
        head = "LMHeadModel" if head == "ForCausalLM" else head
    else:
        sizes = {name: size for name, size in _COMMON.items() if name != "head_dim" or family != "Falcon"}
        config = getattr(transformers, f"{family}Config")(**{**sizes, **OPTIONS.get(family, {}), **options})
    torch.manual_seed(5)
    return getattr(transformers, family + head)(config).double()


def batch(rows: int, ignored: bool = False, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels; some labels are left out, in each row another number."""
    ids = torch.randint(VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    if ignored:
        for row in range(rows):
            labels[row, : row % 4 + 1] = -100
    return ids.to(device), labels.to(device)


def reference(model: nn.Module, rows: int, micro_batches: int, ignored: bool, steps: int = 2) -> list[torch.Tensor]:
    """Train in one process, micro-batch by micro-batch; return each step's mean loss."""
    optimizer, device = torch.optim.SGD(model.parameters(), lr=0.1), next(model.parameters()).device.type
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        ids, labels = batch(rows, ignored, device)
        items = labels[:, 1:].ne(-100).sum() / micro_batches
        parts = zip(ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
        outputs = [model(part, labels=own, num_items_in_batch=items, use_cache=False).loss for part, own in parts]
        for loss in outputs:
            loss.backward(torch.full_like(loss, 1 / micro_batches))
        losses.append(torch.stack(outputs).mean().detach())
        optimizer.step()
    return losses


def pipelined(
    model: nn.Module,
    kind: type[PipelineSchedule],
    micro_batches: int,
    group: Any,
    prepare: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> PipelinedModel:
    """Split a model, and take this rank's stages."""
    placement = placed(kind.shape, dist.get_world_size(group))
    split = split_model(model, len(placement), **options)
    own = [index for index, place in enumerate(placement) if place == dist.get_rank(group)]
    for index in own if prepare else ():
        prepare(split.stage(index))
    return PipelinedModel(kind([split.pipeline_stage(index) for index in own], micro_batches, group=group))
