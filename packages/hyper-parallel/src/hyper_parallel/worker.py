"""Programs of a rank, on either framework: verification and the training loop."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import hp_plan
import hp_platform
from hp_checkpoint.extend import Copies
from hp_pipeline import PipelineError
from hp_plan import ParallelPlan, VerifyResult
from hp_plan.extend import verifier
from hp_platform import get_platform
from hp_platform.extend import end_with_parent, launcher_place, record_flight, watch_parent
from hyper_parallel.data import has_tokens
from hyper_parallel.launching.launch import Job, Resume
from hyper_parallel.port import rank_process, training
from hyper_parallel.reports.display import Reporter, make_reporter
from hyper_parallel.reports.events import EventWriter, hand_over_output
from hyper_parallel.reports.output import FILES, METRICS, TEXTS, Curve, OutputError, Step, Summary, attempt, draw_loss
from hyper_parallel.reports.run_metadata import begin
from hyper_parallel.reports.sinks import JsonLines, Sink, open_sinks
from hyper_parallel.run import Run
from hyper_parallel.supervision.debugging import debugged
from hyper_parallel.supervision.run_end import Stop, keeping_warnings, leave_together, note, tell_end
from hyper_parallel.training.evaluating import Evaluation, evaluate, write_texts
from hyper_parallel.training.resuming import keep_lines

_PATIENCE = 20.0
_FOR_A_PERSON = timedelta(days=30)
_FORMAT = warnings.formatwarning


def train_rank(job: Job) -> Summary | None:
    """Train; rank 0 shows the run and returns its summary."""
    stop, warnings.formatwarning = Stop(job.plan.run.stop_within), format_warning
    with _rank(job, stop):
        assert job.folder is not None
        reporter = None
        if get_platform().groups.rank() == 0:
            reporter = EventWriter(job.events) if job.events else make_reporter(json_lines=job.json_lines)
        stop.listen()
        options: dict[str, Any] = {"resume": job.resume, "until": job.until, "stop": stop}
        return train(job.plan, job.folder, reporter=reporter, tell=functools.partial(note, job), **options)


def format_warning(message: Warning | str, kind: type[Warning], file: str, number: int, line: str | None = None) -> str:
    """Format a warning of the run as a line to its user; those of other code keep their source."""
    if Path(file).is_relative_to(Path(__file__).parent):
        return f"warning: {message}\n"
    return _FORMAT(message, kind, file, number, line)


def evaluate_rank(job: Job) -> Evaluation:
    """Evaluate the plan's model."""
    with _rank(job):
        return evaluate(job.plan, job.checkpoint, batches=job.until)


def verify_rank(job: Job) -> VerifyResult:
    """Verify the plan."""
    with _rank(job):
        return hp_plan.verify(job.plan)


def first_call_rank(job: Job) -> str | None:
    """Call the plan's model under `cp`, and return why it is refused."""
    with _rank(job):
        return verifier().refusal_under_cp(job.plan)


@contextmanager
def _rank(job: Job, stop: Stop | None = None) -> Iterator[None]:
    """Run the work inside a process group; the first rank that fails is the one that is reported."""
    # Ctrl-C reaches every process of a terminal. The launcher that has forked this one asks it to stop by SIGTERM.
    forked = multiprocessing.parent_process() is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN if forked else lambda *_: os._exit(130))
    if forked:
        end_with_parent()
        if job.events is not None:
            hand_over_output(job.events.parent)
    else:  # Whoever started this may have done so from a thread that ends.
        watch_parent()
    process, place = rank_process(), launcher_place()
    assert place is not None
    process.prepare(place)
    if job.flights is not None and place.rank >= 0:
        record_flight(job.flights, place.rank)
    try:
        hp_platform.init_process_group(timeout=None if job.debug_rank is None else _FOR_A_PERSON)
        with nullcontext() if job.debug_rank is None else debugged(place, job.debug_rank):
            yield
        # Ranks end together: rank 0 has more to do at the end, and may fail in it. A process that ends while gloo's
        # threads still let go of its last collective's tensors is aborted.
        get_platform().collectives.barrier()
        leave_together(job, place)
        hp_platform.destroy_process_group()
        if stop is not None and multiprocessing.parent_process() is not None:
            stop.end()
    except Exception as error:
        if (process.peer_lost(error) or failed_by_another(error)) and not (stop is not None and stop.asked):
            # The launcher hears of the peer that is gone or raises, ends this rank, and reports that peer.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_PATIENCE)
        else:
            tell_end(job, place, error)
            # The others may wait for this rank, as in the last barrier.
            get_platform().groups.give_up(f"{type(error).__name__}: {error}")
        raise


def failed_by_another(error: Exception) -> bool:
    """Tell whether an error says that a stage failed on another rank: on that one it has a cause of its own."""
    return isinstance(error, PipelineError) and isinstance(error.__cause__, PipelineError | None)


def train(
    plan: ParallelPlan,
    folder: Path,
    *,
    reporter: Reporter | None = None,
    resume: Resume = "no",
    until: int | None = None,
    stop: Stop | None = None,
    tell: Callable[[str], object] | None = None,
    copies: Copies | None = None,
    newest: int | None = None,
    proved: bool = False,
    begun: Callable[[Run], object] | None = None,
) -> Summary | None:
    """Train the plan's model and write the run's files. Every rank calls it.

    Args:
        plan: the plan to train.
        folder: where rank 0 writes plan.toml, run.json, metrics.jsonl and loss.png, and all ranks checkpoints/.
        reporter: shown each step; rank 0's.
        resume: "auto" goes on from the folder's newest checkpoint.
        until: stop after this step.
        stop: tells whether to stop before the end.
        tell: called with what became of the last finished step when the run fails.
        copies: of this rank's state, kept each step, and gone on from where there are some.
        newest: as of `Run`.
        proved: as of `Run`.
        begun: called with the run before its first step.

    Returns:
        The summary, on rank 0.
    """
    leader = get_platform().groups.rank() == 0
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(keeping_warnings(get_platform().groups.rank()))
        recovering: dict[str, Any] = {"copies": copies, "newest": newest, "proved": proved}
        run = stack.enter_context(Run(plan, folder, resume=resume, until=until, stop=stop, tell=tell, **recovering))
        kept.write_to(run.folder)
        if begun is not None:
            begun(run)
        name, curve, sinks = run.trainer.name, Curve(), list[Sink]()
        record = begin(run.folder, plan, run.contents, step=run.step, ranks=run.ranks)
        tokens = sum(content.tokens for content in run.contents)
        trainer = run.trainer
        trained = "" if trainer.trained == trainer.size else f", of which {trainer.trained:,} are trained,"
        mesh = plan.mesh.described + (f" (ep {plan.mesh.ep})" if plan.mesh.ep > 1 else "")
        title = f"{name} of {trainer.size:,} parameters{trained} on {mesh}, {tokens:,} tokens{run.cut}"
        title += f", replaying every {plan.sdc.replay_every} steps" if plan.sdc.replay_every else ""
        title += ", comparing replicas" if plan.sdc.replicas else ""
        title += f", going on from step {run.step}" if run.step else ""
        if record is not None:
            (run.folder / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
            for values in keep_lines(run.folder / METRICS, run.written):
                curve.add(Step(**values))
            keep_lines(run.folder / TEXTS, run.written)
            sinks = [JsonLines(run.folder / METRICS), *open_sinks(plan.metrics.sinks, run.folder, record)]
            for sink in sinks:
                stack.callback(_closed, sink, run.missed)
        if reporter is not None:
            stack.enter_context(reporter.running(title, steps=plan.run.steps))
        for step in run.steps():
            curve.add(step)
            for sink in sinks:
                sink.write(step.step, step.metrics())
                for number, text in enumerate(step.texts):
                    sink.text(f"prompt {number} after step {step.step}", text)
            if leader and step.texts:
                write_texts(run.folder / TEXTS, step)
            if reporter is not None:
                reporter.step(step)
    if not leader:
        return None
    if not len(curve):
        fix = "train on with more steps (run.steps), or choose another folder with --out"
        raise OutputError(f"{folder} has a finished run of {run.step} steps, and no {METRICS} of them; {fix}")
    checkpoint = run.checkpoints.path(run.step)
    sample = None
    with attempt("loss.png", run.missed):
        draw_loss(curve, run.folder / "loss.png", title=f"{name} on {plan.mesh.described}")
    if run.finished and not has_tokens(plan.data):
        with attempt("a text of the model", run.missed):
            sample = training().write_sample(plan, checkpoint)
    summary = Summary(
        steps=len(curve),
        first_loss=curve.losses[0],
        last_loss=curve.last_loss,
        tokens=curve.tokens,
        seconds=curve.seconds,
        peak_memory=run.peak_memory,
        folder=str(folder),
        checkpoint=str(folder / checkpoint.relative_to(run.folder)),
        sample=sample,
        missed=tuple(run.missed),
        averaged=curve.averaged,
        files=tuple(name for name in FILES if (run.folder / name).exists()),
    )
    if reporter is not None:
        with attempt("the summary", run.missed):  # nobody may read it any more
            reporter.finished(summary)
    return summary


def _closed(sink: Sink, missed: list[str]) -> None:
    with attempt(f"the last metrics of {type(sink).__name__}", missed):
        sink.close()
