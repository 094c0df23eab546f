"""The training loop of one rank."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch
from torch import nn

from hp_fsdp import clip_grad_norm_, global_grad_norm
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, build_schedule
from hp_plan.samples import data_parallel_rows
from hp_plan.torch.samples import forward_loss
from hp_platform import get_platform
from hyper_parallel.data import ByteText
from hyper_parallel.display import Reporter
from hyper_parallel.metrics import Step, Summary, as_json, draw_loss, last_loss
from hyper_parallel.torch.checkpoint import save_checkpoint, write_sample


def train(plan: ParallelPlan, folder: Path, *, reporter: Reporter | None = None) -> Summary | None:
    """Trains the plan's model and writes the run's files. Every rank calls it.

    Args:
        plan: what to train, on what, how long.
        folder: where rank 0 writes plan.toml, metrics.jsonl, loss.png and checkpoint/.
        reporter: shown each step; rank 0's.

    Returns:
        The summary, on rank 0.
    """
    platform = get_platform()
    leader = platform.groups.rank() == 0
    device = platform.devices.current_device()
    model = build_model(plan)
    name = type(model).__name__
    model = apply(model.to(device), plan)
    text = ByteText(plan.data.paths, max_bytes=plan.data.max_bytes)
    title = f"{name} of {_count(model):,} parameters on {_mesh(plan)}, {len(text):,} bytes of text"
    showing = reporter.running(title, steps=plan.run.steps) if reporter else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open(folder / "metrics.jsonl", "w", encoding="utf-8")) if leader else None
        stack.enter_context(showing)
        loop = _Loop(plan, model, text)
        for index in range(plan.run.steps):
            step = loop.step(index)
            if lines is not None:
                lines.write(as_json(step) + "\n")
                lines.flush()
            if reporter is not None:
                reporter.step(step)
    save_checkpoint(plan, model, folder / "checkpoint")
    if not leader:
        return None
    (folder / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
    draw_loss(loop.steps, folder / "loss.png", title=f"{name} on {_mesh(plan)}")
    summary = Summary(
        steps=len(loop.steps),
        first_loss=loop.steps[0].loss,
        last_loss=last_loss(loop.steps),
        tokens=len(loop.steps) * plan.data.batch_size * plan.data.sequence_length,
        seconds=sum(step.seconds for step in loop.steps),
        peak_memory=loop.peak_memory,
        folder=str(folder),
        checkpoint=str(folder / "checkpoint"),
        sample=write_sample(folder / "checkpoint", seed=plan.run.seed) if plan.model.config is not None else None,
    )
    if reporter is not None:
        reporter.finished(summary)
    return summary


class _Loop:
    """The state of a run: model, optimizer, what was measured."""

    def __init__(self, plan: ParallelPlan, model: nn.Module, text: ByteText) -> None:
        self._plan, self._model, self._text = plan, model, text
        self._optimizer = build_optimizer(plan, model.parameters())
        self._schedule = build_schedule(plan, self._optimizer)
        self._rows = data_parallel_rows(plan)
        self._platform = get_platform()
        self._device = self._platform.devices.current_device()
        self.steps: list[Step] = []
        self.peak_memory: tuple[int, ...] = ()

    def step(self, index: int) -> Step:
        """One optimizer step on this rank's part of the global batch."""
        start = time.perf_counter()
        plan, parameters = self._plan, list(self._model.parameters())
        rows = self._text.batch(
            seed=plan.run.seed,
            step=index,
            batch_size=plan.data.batch_size,
            sequence_length=plan.data.sequence_length,
            rows=self._rows,
        )
        self._optimizer.zero_grad()
        loss = forward_loss(plan, self._model, torch.from_numpy(rows).to(self._device))
        loss.backward()
        if plan.run.grad_clip is not None:
            norm = clip_grad_norm_(parameters, plan.run.grad_clip)
        else:
            norm = global_grad_norm(parameters)
        mean_loss = self._exchange(loss.detach())
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._schedule.step()
        seconds = time.perf_counter() - start
        step = Step(
            step=index + 1,
            loss=mean_loss,
            grad_norm=norm.item(),
            lr=lr,
            tokens_per_second=plan.data.batch_size * plan.data.sequence_length / seconds,
            peak_memory=max(self.peak_memory),
            seconds=seconds,
        )
        self.steps.append(step)
        return step

    def _exchange(self, loss: torch.Tensor) -> float:
        """The global loss; every rank's memory is noted on the way."""
        ranks = self._platform.groups.size()
        peak = float(self._platform.devices.peak_memory())
        mine = torch.stack([loss.double(), torch.tensor(peak, dtype=torch.float64, device=self._device)])
        everyone = torch.empty(ranks * len(mine), dtype=torch.float64, device=self._device)
        group = self._platform.groups.new_group(range(ranks))
        self._platform.collectives.all_gather(everyone, mine, group=group)
        # Tensor parallel ranks have equal losses, so the mean over all ranks is that over the data parallel ones.
        losses, peaks = zip(*everyone.view(ranks, len(mine)).tolist(), strict=True)
        self.peak_memory = tuple(int(bytes_) for bytes_ in peaks)
        return sum(losses) / ranks


def _count(model: nn.Module) -> int:
    return sum(parameter.shape.numel() for parameter in model.parameters())


def _mesh(plan: ParallelPlan) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes.items())
