"""What hp-pipeline costs beside torch.distributed.pipelining, interleaved in the same processes.

Measured are CPU seconds of whole steps whose stages compute next to nothing, for each action (compute, send, receive).
Medians, and ratios. "fake": of rank 1 of 4 in a fake group, less those of the same computing without a pipeline; a
message is a call of torch's fake backend, which delivers nothing. "ranks": of four ranks together, whose messages
arrive: torch's by gloo, ours by gloo and by the shared memory of hp-onesided.

    python packages/hp-pipeline/benchmarks/bench_pipeline.py --repeats 7
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_pipeline
from hp_pipeline import PipelineStage, placed
from hp_pipeline.messages.channels import Channel, Message
from hp_pipeline.running.runner import Runner, Settings
from hp_platform.extend import set_transport
from hp_testing import note_figure, run_ranks

RANKS, RANK, MICRO, WIDTH = 4, 1, 8, 4
NAMES = {
    "ScheduleGPipe": "ScheduleGPipe",
    "Schedule1F1B": "Schedule1F1B",
    "ScheduleInterleaved1F1B": "ScheduleInterleaved1F1B",
    "ScheduleZBV": "ScheduleZBVZeroBubble",
}


def timed(run: Callable[[], object], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begin) / times


def ours(name: str) -> tuple[Callable[[], object], int]:
    kind = getattr(hp_pipeline, name)
    placement = placed(kind.shape, RANKS)
    indices = [index for index, rank in enumerate(placement) if rank == RANK]
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), index, len(placement)) for index in indices]
    schedule = kind(stages, MICRO)
    order = hp_pipeline.lower(schedule.exec_order, schedule.pipeline)
    runner = schedule._runner = Runner(
        schedule.stages, schedule.pipeline, schedule.rank, schedule.group, schedule.peers, order, {}
    )

    # A fake group delivers nothing: neither what ranks tell each other nor what messages look like.
    def everyone(payload: bytes) -> list[bytes]:
        shared, facts = pickle.loads(payload)
        fact = next(iter(facts.values()))  # of a stage on one rank they are all the same
        return [pickle.dumps((shared, dict.fromkeys(own, fact))) for own in schedule.pipeline.stages]

    runner.ranks.share = everyone  # type: ignore[method-assign]
    runner.ranks.begin = lambda *args, **options: (True, False, [])  # type: ignore[method-assign]
    runner.settings = Settings(True, schedule.overlap_p2p, schedule.patience, None, None, schedule.fingerprint)
    runner._bind()
    schedule._kinds = [type(stage.submodule) for stage in stages]
    for (_, _, ahead), channel in runner.channels.items():
        assert isinstance(channel, Channel)
        channel.signature = Message.of(torch.zeros(1, WIDTH, requires_grad=ahead)).signature()
    x = torch.randn(MICRO, WIDTH)
    return lambda: schedule.run(x), len(order[RANK])


def theirs(name: str, rank: int = RANK) -> Callable[[], object]:
    kind = getattr(pipelining, NAMES[name])
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    indices = [rank] if single else ([rank, 2 * RANKS - 1 - rank] if name == "ScheduleZBV" else [rank, rank + RANKS])
    count = RANKS if single else 2 * RANKS
    example = torch.randn(1, WIDTH, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            nn.Linear(WIDTH, WIDTH), index, count, torch.device("cpu"), input_args=(example,), output_args=(example,)
        )
        for index in indices
    ]
    fake = dist.get_backend() == "fake"
    for stage in (
        stages if fake else ()
    ):  # which does not deliver the ranks' vote to use the shapes that they were given
        if hasattr(stage, "_warmup_backward_result"):
            stage._warmup_forward_vote = lambda *args, **kwargs: torch.ones(1, dtype=torch.int32)  # type: ignore[method-assign]
            stage._warmup_backward_result = lambda *args, **kwargs: torch.ones(1, dtype=torch.int32)  # type: ignore[method-assign]
    schedule = kind(stages[0] if single else stages, MICRO, loss_fn=lambda out, target: out.sum())
    x = torch.randn(MICRO, WIDTH)
    return lambda: schedule.step(*([] if rank or fake else [x]), target=x)


class Last(nn.Linear):
    """A last stage, which returns its loss."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).sum()


def of_ranks(name: str, repeats: int) -> tuple[int, list[list[float]]]:
    """Return a rank's number of actions, and its CPU seconds of a step: ours by each transport, and torch's."""
    torch.set_num_threads(1)
    kind, rank = getattr(hp_pipeline, name), dist.get_rank()
    placement = placed(kind.shape, RANKS)
    indices = [index for index, place in enumerate(placement) if place == rank]
    layers = [(Last if index == len(placement) - 1 else nn.Linear)(WIDTH, WIDTH) for index in indices]
    stages = [PipelineStage(layer, index, len(placement)) for layer, index in zip(layers, indices, strict=True)]
    schedule, x, peer = kind(stages, MICRO), torch.randn(MICRO, WIDTH), theirs(name, rank)

    def ours_by(transport: str) -> Callable[[], object]:
        def run() -> None:
            set_transport(transport)
            schedule.run(x)

        return run

    rows, candidates = [], (ours_by("auto"), ours_by("backend"), peer)
    for repeat in range(repeats + 1):
        row = []
        for each in candidates:
            dist.barrier()
            row.append(timed(each, 10))
        rows += [row] if repeat else []
    return len(hp_pipeline.lower(schedule.exec_order, schedule.pipeline)[rank]), rows


def bare(chunks: int) -> Callable[[], object]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(chunks)]
    parts = torch.randn(MICRO, WIDTH).requires_grad_().chunk(MICRO)

    def run() -> None:
        for layer in layers:
            for part in parts:
                leaf = part.detach().requires_grad_()
                layer(leaf).backward(leaf)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=("fake", "ranks"), default=("fake", "ranks"))
    options = parser.parse_args()
    for part in options.parts:
        (fake if part == "fake" else ranks)(options.repeats)


def ranks(repeats: int) -> None:
    print(
        f"{'four ranks, all together':26} {'actions':>8} {'torch us':>9} {'gloo us':>9} {'ratio':>6}"
        f" {'shared us':>10} ratio"
    )
    for name in NAMES:
        told = run_ranks(RANKS, of_ranks, name, repeats, timeout=600.0)
        actions = sum(count for count, _ in told)
        steps = [
            [sum(rank) for rank in zip(*rows, strict=True)] for rows in zip(*(own for _, own in told), strict=True)
        ]
        shared, gloo, other = (statistics.median(column) / actions * 1e6 for column in zip(*steps, strict=True))
        print(
            f"{name:26} {actions:8d} {other:9.1f} {gloo:9.1f} {gloo / other:6.2f} {shared:10.1f} {shared / other:5.2f}",
            flush=True,
        )


def fake(repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    print(
        f"{'schedule':26} {'actions':>8} {'ours us':>9} {'torch us':>9} {'ratio':>6}   (an action, over bare compute)"
    )
    for name in NAMES:
        run, actions = ours(name)
        peer, plain = theirs(name), bare(1 if name in ("ScheduleGPipe", "Schedule1F1B") else 2)
        rows = []
        for each in (run, peer, plain):
            each()
        for _ in range(repeats):
            rows.append([timed(each, 10) for each in (run, peer, plain)])
        own, other, base = (statistics.median(column) for column in zip(*rows, strict=True))
        own, other = ((value - base) / actions * 1e6 for value in (own, other))
        note_figure("host time an action over torch's", name, own / other)
        print(f"{name:26} {actions:8d} {own:9.1f} {other:9.1f} {own / other:6.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
