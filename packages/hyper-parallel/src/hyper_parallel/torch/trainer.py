"""Training a torch model, and saving the full model for transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_fsdp import clip_grad_norm_, full_state_dict, global_grad_norm
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, build_schedule
from hp_plan.torch.extend import forward_loss
from hp_platform import get_platform
from hyper_parallel.data import VOCABULARY


class Trainer:
    """A plan's model under the plan, its optimizer and schedule.

    Args:
        plan: the plan to train.

    Attributes:
        model: under the plan.
        name: of its class.
        size: number of elements of its parameters.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._device = get_platform().devices.current_device()
        model = build_model(plan)
        self.name = type(model).__name__
        self.model = apply(model.to(self._device), plan)
        self.size = sum(parameter.shape.numel() for parameter in self.model.parameters())
        self._optimizer = build_optimizer(plan, self.model.named_parameters())
        self._schedule = build_schedule(plan, self._optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self, rows: Any) -> tuple[float, float]:
        """Take one optimizer step.

        Args:
            rows: this rank's samples, a numpy array of tokens.

        Returns:
            The loss of these samples, and the norm of all gradients before clipping.
        """
        parameters, clip = list(self.model.parameters()), self._plan.run.grad_clip
        self._optimizer.zero_grad()
        loss = forward_loss(self._plan, self.model, torch.from_numpy(rows).to(self._device))
        loss.backward()
        norm = global_grad_norm(parameters) if clip is None else clip_grad_norm_(parameters, clip)
        self._optimizer.step()
        self._schedule.step()
        return loss.item(), norm.item()

    def gather(self, loss: float, memory: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Gather every rank's loss and memory."""
        groups, collectives = get_platform().groups, get_platform().collectives
        ranks = groups.size()
        mine = torch.tensor([loss, float(memory)], dtype=torch.float64, device=self._device)
        everyone = torch.empty(ranks * 2, dtype=torch.float64, device=self._device)
        collectives.all_gather(everyone, mine, group=groups.new_group(range(ranks)))
        losses, peaks = zip(*everyone.view(ranks, 2).tolist(), strict=True)
        return losses, tuple(int(peak) for peak in peaks)


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
