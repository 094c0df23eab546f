"""Training a torch model, and saving the full model for transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_fsdp import full_state_dict
from hp_moe import register_experts
from hp_pipeline import PipelinedModel
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, build_schedule
from hp_plan.torch.extend import backward_loss, clip_gradients
from hp_platform import get_platform
from hyper_parallel.data import VOCABULARY, Rows
from hyper_parallel.torch.stages import gather_stages


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
        self.size = sum(parameter.numel() for parameter in model.parameters())
        self.model = apply(model.to(self._device), plan)
        self._optimizer = build_optimizer(plan, self.model.named_parameters())
        self._schedule = build_schedule(plan, self._optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self, rows: Rows) -> tuple[float | None, float]:
        """Take one optimizer step.

        Args:
            rows: this rank's samples.

        Returns:
            The loss of these samples, None on ranks without the model's last stage, and the norm of all gradients
            before clipping.
        """
        self._optimizer.zero_grad()
        packed = {"labels": rows.labels, "position_ids": rows.positions} if self._plan.data.packing else {}
        arrays = {"tokens": rows.tokens, **packed}
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        loss = backward_loss(self._plan, self.model, tensors.pop("tokens"), tensors or None)
        norm = clip_gradients(self.model, self._plan.run.grad_clip)
        self._optimizer.step()
        self._schedule.step()
        return loss, norm.item()

    def gather(self, loss: float | None, memory: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Gather the losses of the ranks that have one, and every rank's memory."""
        groups, collectives = get_platform().groups, get_platform().collectives
        ranks = groups.size()
        mine = [loss or 0.0, float(loss is not None), float(memory)]
        everyone = torch.empty(ranks * len(mine), dtype=torch.float64, device=self._device)
        own = torch.tensor(mine, dtype=torch.float64, device=self._device)
        collectives.all_gather(everyone, own, group=groups.new_group(range(ranks)))
        rows = everyone.view(ranks, len(mine)).tolist()
        return tuple(each for each, there, _ in rows if there), tuple(int(peak) for _, _, peak in rows)


PROMPT = "def "


def save_checkpoint(plan: ParallelPlan, model: nn.Module, folder: Path) -> None:
    """Gather the full model and write it on rank 0: config.json and model.safetensors. Every rank calls it.

    Args:
        plan: the plan of the model.
        model: after `hp_plan.apply`.
        folder: an existing folder.
    """
    if isinstance(model, PipelinedModel):
        state = gather_stages(model)
    else:
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

    experts = plan.model.overrides.get("experts_implementation")
    if plan.mesh.ep > 1 or experts is not None:
        # A checkpoint does not say; what the library takes by itself has no float64.
        options = {"experts_implementation": experts or register_experts()}
    else:
        options = {}
    with _no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
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
