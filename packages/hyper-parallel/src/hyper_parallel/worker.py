"""Programs of a rank, on either framework: verification and the training loop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import hp_plan
import hp_platform
from hp_plan import ParallelPlan, VerifyResult
from hp_plan.extend import data_parallel_rows
from hp_platform import get_platform
from hp_platform.extend import end_with_parent, watch_parent
from hyper_parallel.data import Samples, open_samples
from hyper_parallel.display import Reporter, make_reporter
from hyper_parallel.events import EventWriter
from hyper_parallel.launch import Job, launcher_place
from hyper_parallel.output import Step, Summary, as_json, draw_loss, last_loss
from hyper_parallel.port import Trainer, rank_process, training

_PATIENCE = 20.0


def train_rank(job: Job) -> Summary | None:
    """Train; rank 0 shows the run and returns its summary."""
    with _rank():
        assert job.folder is not None
        reporter = None
        if get_platform().groups.rank() == 0:
            reporter = EventWriter(job.events) if job.events else make_reporter(json_lines=job.json_lines)
        return train(job.plan, job.folder, reporter=reporter)


def verify_rank(job: Job) -> VerifyResult:
    """Verify the plan."""
    with _rank():
        return hp_plan.verify(job.plan)


@contextmanager
def _rank() -> Iterator[None]:
    """Run the work inside a process group; the first rank that fails is the one that is reported."""
    # Ctrl-C reaches every process of a terminal; the launcher reports it for all.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if multiprocessing.parent_process() is not None:
        end_with_parent()
    else:  # Whoever started this may have done so from a thread that ends.
        watch_parent()
    process, place = rank_process(), launcher_place()
    assert place is not None
    process.prepare(place)
    try:
        hp_platform.init_process_group()
        yield
        # Ranks end together: rank 0 has more to do at the end, and may fail in it. A process that ends while gloo's
        # threads still let go of its last collective's tensors is aborted.
        get_platform().collectives.barrier()
        hp_platform.destroy_process_group()
    except RuntimeError as error:
        if process.peer_lost(error):
            # The launcher hears of the peer that is gone, ends this rank, and reports that peer.
            time.sleep(_PATIENCE)
        raise


def train(plan: ParallelPlan, folder: Path, *, reporter: Reporter | None = None) -> Summary | None:
    """Train the plan's model and write the run's files. Every rank calls it.

    Args:
        plan: the plan to train.
        folder: where rank 0 writes plan.toml, metrics.jsonl, loss.png and checkpoint/.
        reporter: shown each step; rank 0's.

    Returns:
        The summary, on rank 0.
    """
    leader = get_platform().groups.rank() == 0
    framework = training()
    trainer = framework.Trainer(plan)
    samples = open_samples(plan.data, seed=plan.run.seed, vocabulary=plan.model.overrides.get("vocab_size"))
    title = f"{trainer.name} of {trainer.size:,} parameters on {_mesh(plan)}, {len(samples):,} samples"
    showing = reporter.running(title, steps=plan.run.steps) if reporter else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open(folder / "metrics.jsonl", "w", encoding="utf-8")) if leader else None
        stack.enter_context(showing)
        loop = _Loop(plan, trainer, samples)
        for index in range(plan.run.steps):
            step = loop.step(index)
            if lines is not None:
                lines.write(as_json(step) + "\n")
                lines.flush()
            if reporter is not None:
                reporter.step(step)
    framework.save_checkpoint(plan, trainer.model, folder / "checkpoint")
    if not leader:
        return None
    (folder / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
    draw_loss(loop.steps, folder / "loss.png", title=f"{trainer.name} on {_mesh(plan)}")
    summary = Summary(
        steps=len(loop.steps),
        first_loss=loop.steps[0].loss,
        last_loss=last_loss(loop.steps),
        tokens=len(loop.steps) * plan.data.batch_size * plan.data.sequence_length,
        seconds=sum(step.seconds for step in loop.steps),
        peak_memory=loop.peak_memory,
        folder=str(folder),
        checkpoint=str(folder / "checkpoint"),
        sample=framework.write_sample(plan, folder / "checkpoint"),
    )
    if reporter is not None:
        reporter.finished(summary)
    return summary


class _Loop:
    """The state of a run: what is trained, what was measured.

    Args:
        plan: of the run.
        trainer: the framework's.
        samples: of the training data.
    """

    def __init__(self, plan: ParallelPlan, trainer: Trainer, samples: Samples) -> None:
        self._plan, self._trainer, self._samples = plan, trainer, samples
        self._rows = data_parallel_rows(plan)
        self._platform = get_platform()
        self.steps: list[Step] = []
        self.peak_memory: tuple[int, ...] = ()

    def step(self, index: int) -> Step:
        """Take one optimizer step on this rank's part of the global batch."""
        start = time.perf_counter()
        data = self._plan.data
        first = index * data.batch_size
        rows = self._samples.rows(np.arange(first + self._rows.start, first + self._rows.stop))
        lr = self._trainer.lr
        loss, norm = self._trainer.step(rows)
        # Tensor parallel ranks have equal losses, so the mean over all that have one is that over data parallel ones.
        losses, self.peak_memory = self._trainer.gather(loss, self._platform.devices.peak_memory())
        seconds = time.perf_counter() - start
        step = Step(
            step=index + 1,
            loss=sum(losses) / len(losses),
            grad_norm=norm,
            lr=lr,
            tokens_per_second=data.batch_size * data.sequence_length / seconds,
            peak_memory=max(self.peak_memory),
            seconds=seconds,
        )
        self.steps.append(step)
        return step


def _mesh(plan: ParallelPlan) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes.items())
