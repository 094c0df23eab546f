"""A rank of a cluster on this process's device: its kernels run, and others' messages are played."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from hp_dtensor.torch.extend import local_view, materialize
from hp_moe.extend import forced_routes, skewed
from hp_plan.application import apply
from hp_plan.dry.report import RankReport
from hp_plan.dry.simulated import Measured
from hp_plan.dry.stages import Listening, Repeating, Said, StagePeers
from hp_plan.plan import ParallelPlan
from hp_plan.torch.build import build_empty, build_parallel_model, compute_buffers
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.playing import Played, dry, own_host_memory, without_collector
from hp_plan.torch.dry.reading import report_of
from hp_plan.torch.sequences.context_guard import unguarded
from hp_platform import get_platform
from hp_platform.torch.dry import Copies, played_world

_COUNTED = 3  # steps that a ledger reads: as many as the longest that `dry` plays by itself
_SCALE = 0.02  # standard deviation of drawn weights


def listen(plan: ParallelPlan, rank: int, steps: int, routes: float, peers: StagePeers) -> Said:
    """Play a stage without memory, and note what others say to it.

    Args:
        plan: the plan.
        rank: the stage's.
        steps: that `run_rank` measures.
        routes: the first expert's tokens over the mean.
        peers: what other stages say.
    """
    torch.set_num_threads(1)
    listening = Listening(peers)
    with dry(plan, rank, steps=_COUNTED + steps, peers=listening, routes=skewed(routes)):
        return listening.said


def run_rank(
    plan: ParallelPlan, rank: int, steps: int, routes: float, said: Said | None, peers: StagePeers
) -> tuple[str, Measured, int | None, RankReport]:
    """Run a rank's steps on this process's device, which has no world of its own.

    Args:
        plan: the plan.
        rank: the rank.
        steps: how many, of which the first is not counted.
        routes: the first expert's tokens over the mean.
        said: by other stages; None without stages.
        peers: nobody.

    Returns:
        The device, what was measured, the allocator's peak (None on a CPU), and the report of a ledger.

    Raises:
        ValueError: the steps made a weight that is not finite.
    """
    devices = get_platform().devices
    on_cpu = devices.kind == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    world = played_world(plan.mesh.world_size, rank, peers=None if said is None else Repeating(said))
    with world as copies, without_collector(), forced_routes(skewed(routes)), unguarded(), own_host_memory():
        played = Played(plan, Ledger((devices.kind,), modules=True), devices.current_device(), _build)
        played.draw_tokens()
        with torch.compiler.set_stance("force_eager"):
            for number in range(_COUNTED):
                played.step()
                if number == 0:
                    gc.collect()
        report, clock = report_of(played, rank), _Clock(copies)
        for number in range(steps):
            played.step(clock)
            if number == 0:
                gc.collect()
                clock.steps.clear()
                devices.reset_peak_memory()
        _check_finite(played.model)
        return (
            "cpu, one core" if on_cpu else devices.name(),
            clock.measured(on_cpu=on_cpu),
            None if on_cpu else devices.peak_memory(),
            report,
        )


class _Clock:
    """Reads the seconds of each phase of steps.

    Args:
        copies: that stand for messages.

    Attributes:
        steps: of each step, by phase: its seconds, those of the CPU, and those of copies, which are in neither.
    """

    def __init__(self, copies: Copies) -> None:
        self.steps: list[dict[str, tuple[float, float, float]]] = []
        self._copies, self._phase = copies, ""
        self._begun = 0.0, 0.0

    def __enter__(self) -> None:
        """Begin a step."""
        self.steps.append({})

    def __exit__(self, *error: Any) -> None:
        """End it."""
        self.begin("")

    def begin(self, phase: str) -> None:
        """Begin a phase, when the device has done what it was given."""
        get_platform().devices.synchronize()
        now = time.perf_counter(), time.process_time()
        copied, busy = self._copies.take()
        if self._phase:
            seconds, cpu = (end - begin for begin, end in zip(self._begun, now, strict=True))
            self.steps[-1][self._phase] = seconds - copied, cpu - busy, copied
        self._phase = phase
        self._begun = time.perf_counter(), time.process_time()

    def measured(self, *, on_cpu: bool) -> Measured:
        """Return the medians.

        Args:
            on_cpu: the CPU computes.
        """

        def median(place: int, *phases: str) -> float:
            return statistics.median(sum(step[phase][place] for phase in phases) for step in self.steps)

        both = "forward", "optimizer"
        return Measured(
            median(0, "forward"), median(0, "optimizer"), median(1, *both) if on_cpu else None, median(2, *both)
        )


def _build(plan: ParallelPlan) -> Any:
    """Build this rank's part of a model, without the rest; of one that a function returns, all of it first."""
    if not plan.model.of_transformers:
        return build_parallel_model(plan)
    model = apply(build_empty(plan), plan)
    materialize(model, get_platform().devices.current_device())
    compute_buffers(model)
    _draw(model, torch.Generator(get_platform().devices.current_device()).manual_seed(0))
    return model


@torch.no_grad()
def _draw(model: Any, numbers: torch.Generator) -> None:
    """Draw this rank's matrices; vectors are ones, biases zeros, and so are buffers that a file would have."""
    parameters = dict(model.named_parameters())
    known = {id(parameter) for parameter in parameters.values()}
    for name, parameter in parameters.items():
        local = local_view(parameter)
        if not local.dtype.is_floating_point or name.endswith("bias"):
            local.zero_()
        elif parameter.dim() > 1:
            local.normal_(0.0, _SCALE, generator=numbers)
        else:
            local.fill_(1.0)
    for value in model.state_dict(keep_vars=True).values():
        if id(value) not in known:
            local_view(value).zero_()


def _check_finite(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not bool(local_view(parameter).isfinite().all()):
            raise ValueError(
                f"simulate_rank: the weight {name} is not finite any more, so that kernels ran on values that training"
                " does not have; lower optimizer.lr, or set run.grad_clip"
            )
