"""Context parallelism in cases: a small transformers model of each family, what it is called with, and the verdict."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_dtensor import init_device_mesh
from hp_plan.torch.compared import Float64
from hp_platform import get_platform
from hp_styles import ContextParallel, context_parallel_shard, context_parallel_unshard, parallelize_module
from hp_testing import device_type

LENGTH, VOCABULARY = 16, 19
TOLERANCE = 1e-10
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gemma3")
BATCHES = ("whole", "whole, mask of ones", "left padding", "right padding", "packed", "packed at ranks", "packed, ones")


def build(family: str, window: int | None) -> Any:
    """A model of two layers in float64; of Gemma 3 and Qwen 2 one slides and one sees all."""
    import transformers as t

    if family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**_SIZES))
    elif family == "mistral":
        model = t.MistralForCausalLM(t.MistralConfig(sliding_window=window, **_SIZES))
    elif family == "qwen2":
        slides = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
        model = t.Qwen2ForCausalLM(t.Qwen2Config(**slides, **_SIZES))
    elif family == "phi3":
        model = t.Phi3ForCausalLM(t.Phi3Config(sliding_window=window, **_SIZES))
    else:
        types = ["sliding_attention" if window else "full_attention", "full_attention"]
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(sliding_window=window, layer_types=types, head_dim=4, **_SIZES))
    return model.to(torch.float64).to(device_type()).train()


def batch_of(kind: str, size: int) -> dict[str, torch.Tensor]:
    """What the model is called with in one process, the next tokens, and which of them count."""
    ids = torch.randint(1, VOCABULARY, (2, LENGTH + 1), device=device_type())
    places = torch.arange(LENGTH, device=device_type()).expand(2, -1)
    batch = {"input_ids": ids[:, :-1], "position_ids": places, "targets": ids[:, 1:]}
    counts = torch.ones(2, LENGTH, dtype=torch.bool, device=device_type())
    if kind == "whole, mask of ones":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if kind.endswith("padding"):
        counts[1, : 6 if kind.startswith("left") else 3] = False
        if kind.startswith("right"):
            counts = counts.flip(1)
        batch["attention_mask"] = counts.long()
    if kind.startswith("packed"):
        part = LENGTH // size
        ends = {"packed": (5, 8, 9, 16), "packed, ones": (5, 8, 9, 16)}.get(kind, tuple(range(part, LENGTH + 1, part)))
        starts = (0, *ends[:-1])
        documents = torch.cat([torch.arange(end - start) for start, end in zip(starts, ends, strict=True)])
        batch["position_ids"] = documents.to(device_type()).expand(2, -1)
    if kind == "packed, ones":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return {**batch, "counts": counts}


def run(model: Any, batch: dict[str, torch.Tensor], *, exact: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the sum of the losses of the tokens that count.

    Args:
        model: the model.
        batch: as of ``batch_of``, or a part of it.
        exact: norms and rotary positions in float64 too, which recomputed layers would not be.
    """
    named = {name: x for name, x in batch.items() if name not in ("targets", "counts")}
    with Float64() if exact else contextlib.nullcontext():
        logits = model(**named, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return logits, losses.masked_fill(~batch["counts"].flatten(), 0.0).sum()


@dataclass(frozen=True)
class Case:
    """A model, a style and a batch.

    Attributes:
        family: the model's.
        window: its sliding window; None is none.
        degree: ranks of a Ulysses group; None is all.
        load_balance: of the style and of the cut.
        batch: one of ``BATCHES``.
        inner: ranks of an inner ring; None is one ring.
    """

    family: str
    window: int | None
    degree: int | None
    load_balance: bool
    batch: str
    inner: int | None = None


def judge(case: Case) -> str:
    """``"right"``, ``"refused: ..."``, or what is wrong; runs on a rank."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    mesh = init_device_mesh(device_type(), (size,), ("cp",))
    model, batch = build(case.family, case.window), batch_of(case.batch, size)
    reference = copy.deepcopy(model)
    want, loss = run(reference, batch)
    loss.backward()
    degrees = {"ulysses_degree": case.degree, "inner_ring_degree": case.inner}
    style = ContextParallel(**degrees, load_balance=case.load_balance)
    parallelize_module(model, mesh, {"model.layers.*.self_attn": style})
    part = context_parallel_shard(batch, mesh, load_balance=case.load_balance)
    try:
        logits, loss = run(model, part)
    except (ValueError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"refused: {type(error).__name__}: {error}"
    loss.backward()
    got = context_parallel_unshard(logits.detach(), mesh, load_balance=case.load_balance)
    worst = (got - want)[batch["counts"]].abs().max().item()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        get_platform().collectives.all_reduce(p.grad, group=mesh.get_group())
        worst = max(worst, (p.grad - q.grad).abs().max().item() / max(1.0, q.grad.abs().max().item()))
    return "right" if worst <= TOLERANCE else f"wrong by {worst:.1e}"


def judge_all(cases: list[Case]) -> list[str]:
    """The verdicts of several cases; runs on a rank."""
    return [judge(case) for case in cases]
