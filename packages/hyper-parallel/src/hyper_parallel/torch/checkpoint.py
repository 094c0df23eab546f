"""Saving the full model for transformers, and text written by the model loaded from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_fsdp import full_state_dict
from hp_plan import ParallelPlan, build_model
from hp_platform import get_platform
from hyper_parallel.data import VOCABULARY

PROMPT = "def "


def save_checkpoint(plan: ParallelPlan, model: nn.Module, folder: Path) -> None:
    """Gather the full model and write it on rank 0: config.json and model.safetensors. Every rank calls it.

    Args:
        plan: the plan of the model.
        model: after `hp_plan.apply`.
        folder: an existing folder.
    """
    state = full_state_dict(model, rank0_only=True, cpu=True)
    if get_platform().groups.rank() != 0:
        return
    if plan.model.config is None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
        return
    # transformers writes its own format from its own class; on meta, so that the weights are held once.
    plain: Any = build_model(plan, device="meta")
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    with _no_progress_bars():
        plain.save_pretrained(folder)


def write_sample(plan: ParallelPlan, folder: Path, *, tokens: int = 96) -> str | None:
    """Load a checkpoint with `from_pretrained` and let it continue a prompt; None if it is not such model.

    Args:
        plan: the plan; its seed decides the sampled tokens.
        folder: of the checkpoint.
        tokens: number of tokens to write.
    """
    if plan.model.config is None:
        return None
    from transformers import AutoModelForCausalLM

    with _no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    prompt = torch.tensor([list(PROMPT.encode())])
    torch.manual_seed(plan.run.seed)
    written = model.eval().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.7,
        pad_token_id=0,
    )
    return bytes(token for token in written[0].tolist() if token < VOCABULARY).decode("utf-8", errors="replace")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
