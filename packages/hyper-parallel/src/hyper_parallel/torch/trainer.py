"""Training a torch model, and saving the full model for transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hp_moe import register_experts
from hp_plan import ParallelPlan, apply, build_optimizer, build_schedule
from hp_plan.torch.extend import backward_loss, begin, clip_gradients, finish
from hp_platform import get_platform
from hyper_parallel.data import VOCABULARY, Rows


class Trainer:
    """A plan's model under the plan, its optimizer and schedule.

    Args:
        plan: the plan to train.

    Attributes:
        model: under the plan.
        optimizer: of its parameters.
        schedule: of the optimizer's learning rate.
        name: of its class.
        size: number of elements of its parameters.
    """

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan
        self._device = get_platform().devices.current_device()
        if plan.run.deterministic:
            _choose_deterministic_kernels(self._device)
        model = begin(plan)
        self.name = type(model).__name__
        self.size = sum(parameter.numel() for parameter in model.parameters())
        self.model = finish(apply(model, plan), plan)
        del model  # with pp it has other ranks' stages
        self.optimizer = build_optimizer(plan, self.model.named_parameters())
        self.schedule = build_schedule(plan, self.optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def step(self, rows: Rows) -> tuple[float | None, float]:
        """Take one optimizer step.

        Args:
            rows: this rank's samples.

        Returns:
            The loss of these samples, None on ranks without the model's last stage, and the norm of all gradients
            before clipping.
        """
        self.optimizer.zero_grad()
        packed = {"labels": rows.labels, "positions": rows.positions} if self._plan.data.packing else {}
        arrays = {"tokens": rows.tokens, **packed}
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        loss = backward_loss(self._plan, self.model, **tensors)
        norm = clip_gradients(self.model, self._plan.run.grad_clip)
        self.optimizer.step()
        self.schedule.step()
        return loss, norm.item()


def _choose_deterministic_kernels(device: Any) -> None:
    """Compute the same bits in each run, on any number of ranks of this machine; for the rest of the process."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # how a sum is split depends on their number, and that on the number of ranks
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first product
    torch.use_deterministic_algorithms(True)


PROMPT = "def "


def write_sample(plan: ParallelPlan, folder: Path, *, tokens: int = 96) -> str | None:
    """Load a checkpoint with `from_pretrained` and let it continue a prompt; None if it is not such model.

    Args:
        plan: the plan; its seed decides the sampled tokens.
        folder: of the checkpoint.
        tokens: number of tokens to write.
    """
    if not plan.model.of_transformers:
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
