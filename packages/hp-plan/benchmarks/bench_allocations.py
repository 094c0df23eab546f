"""Peaks of a training step on gloo ranks: what torch's profiler lists, against the ledger and the staging of messages.

python packages/hp-plan/benchmarks/bench_allocations.py [PLAN ...]

The plans are those of tests/dry_plans.py. The profiler lists each allocation of torch's allocator, on gloo's threads
too, and the ledger those of operators. What lies between is named: what was there before (mostly what the last step's
messages hold), and staging. For an all-gather of B gathered bytes gloo's thread takes a flat copy of B;
reduce-scatters, all-reduces and exchanges have buffers that are not of torch's allocator. gloo's threads let go of all
of it at a moment of their own, so that here each message is waited for at once, and a little longer; the step with the
least is shown.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import runpy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLANS = Path(__file__).resolve().parents[1] / "tests" / "dry_plans.py"
CHOSEN = (
    *("fsdp", "hsdp", "tp", "cp", "ep", "pp", "fsdp x tp", "recompute", "bfloat16", "no reshard", "tied"),
    "muon, recompute, bfloat16",
)
STEPS, FIRST = 5, 2  # taken, and the first that is compared: states and caches are there
PAUSE = 0.004  # seconds after a message


@dataclass(frozen=True)
class Peaks:
    """Bytes of a step of a rank.

    Attributes:
        ledger: the most of storages that operators made.
        before: what the profiler has at the step's begin, and not the ledger.
        named: the most of both and the staging of a message.
        profiler: the most that the profiler lists.
    """

    ledger: int
    before: int
    named: int
    profiler: int


def staging(kind: str, size: int) -> int:
    """Return the bytes that gloo takes from the allocator for a message, of as many as observers are told."""
    return size if kind == "all_gather" else 0


def measure(rank: int, world: int, tables: dict[str, Any], store: str, results: Any) -> None:
    """Take a plan's steps on a rank, and report their peaks from rank 0."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(HYPER_PARALLEL_DEVICE="cpu", HF_HUB_OFFLINE="1")
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from hp_moe.extend import balanced, forced_routes
    from hp_plan import ParallelPlan
    from hp_plan.torch.dry.ledger import Ledger
    from hp_plan.torch.dry.playing import Played, without_collector
    from hp_plan.torch.dry.reading import report_of
    from hp_platform import collectives
    from hp_platform.extend import observers

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
        setattr(collectives, name, waited(getattr(collectives, name)))
    found: list[tuple[int, Sequence[int], list[tuple[int, int]]]] = []
    whole = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with whole, without_collector(), forced_routes(balanced):
        played = Played(ParallelPlan.from_dict(tables), Ledger(("cpu",)), torch.device("cpu"))
        for number in range(STEPS):
            messages: list[tuple[int, int]] = []

            def observe(kind: str, size: int, group: Any, into: list[tuple[int, int]] = messages) -> None:
                into.append((played.ledger.step.operations, staging(kind, size)))

            observers.append(observe)
            with record_function(f"step {number}"):
                played.step()
            observers.remove(observe)
            live = report_of(played, rank).trace.live
            found.append((sum(played.ledger.step.start.values()), live, messages))
    if rank == 0:
        events = list(whole.profiler.kineto_results.events())
        results.put([compare(number, events, *found[number]) for number in range(FIRST, STEPS)])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Over:
    """The handle of a message that has been waited for."""

    def wait(self) -> None:
        """Do nothing."""


def waited(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that is done, and whose threads have let go, when it returns."""

    def run(*tensors: Any, async_op: bool = False, **options: Any) -> Over | None:
        collective(*tensors, **options)
        time.sleep(PAUSE)
        return Over() if async_op else None

    return run


def compare(
    number: int, events: Sequence[Any], start: int, live: Sequence[int], messages: Sequence[tuple[int, int]]
) -> Peaks:
    """Compare a step's allocations with what the ledger read of it.

    Args:
        number: of the step.
        events: of the profile.
        start: bytes that the ledger has at its begin.
        live: the most of them at each operation.
        messages: the operation before each, and its staging.
    """
    [span] = [each for each in events if each.name() == f"step {number}"]
    now = before = peak = 0
    for each in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        now += each.nbytes()
        if each.start_ns() < span.start_ns():
            before = peak = now
        elif each.start_ns() <= span.end_ns():
            peak = max(peak, now)
    most = max(max(live), *(live[operation] + staged for operation, staged in messages))
    return Peaks(max(live), before - start, most + before - start, peak)


def run(tables: dict[str, Any]) -> list[Peaks]:
    """Start a plan's ranks, and return the peaks of rank 0's steps."""
    world = math.prod(size for axis, size in tables["mesh"].items() if axis != "ep")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, world, tables, store, results), daemon=True)
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        found = results.get()
        for each in ranks:
            each.join()
    return found


def main() -> None:
    """Print a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=CHOSEN)
    plans = runpy.run_path(str(PLANS))
    known = {**plans["USUAL"], **plans["THOROUGH"]}
    heads = ("ledger", "before", "staging", "sum", "profiler", "difference")
    print("".join([f"{'bytes of rank 0':27}", *(f"{each:>11}" for each in heads)]))
    for name in parser.parse_args().plans:
        peaks = min(run(known[name]), key=lambda each: each.profiler)
        staged = peaks.named - peaks.ledger - peaks.before
        numbers = [f"{each:11,}" for each in (peaks.ledger, peaks.before, staged, peaks.named, peaks.profiler)]
        print("".join([f"{name:27}", *numbers, f"{peaks.profiler / peaks.named - 1:+11.2%}"]), flush=True)


if __name__ == "__main__":
    main()
