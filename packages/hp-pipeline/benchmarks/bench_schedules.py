"""Orders that `synthesize` finds beside torch's own zero-bubble schedules, all on our simulator, at equal memory.

For random costs (input 0.6 to 1.6, weight 0.4 to 1.4, a message 0 to 0.2 of a forward's second): the bubble of the
faster of torch's ZBV and interleaved zero bubble, that of the fastest order found on the same placements within the
same peak of saved bytes, and the ratio.

    python packages/hp-pipeline/benchmarks/bench_schedules.py --sets 30
"""

from __future__ import annotations

import argparse
import random
import time

from torch.distributed import pipelining

from hp_pipeline import Costs, MetaStep, Order, Pipeline, check, placed, simulate, synthesize

TORCH = {"v": pipelining.ScheduleZBVZeroBubble, "loop": pipelining.ScheduleInterleavedZeroBubble}


def torch_order(shape: str, ranks: int, micro_batches: int) -> Order:
    """Return the computing steps of a schedule of torch's, whose constructor would ask for stages and a group."""
    schedule = TORCH[shape].__new__(TORCH[shape])
    rounds = max(1, micro_batches // ranks)
    vars(schedule).update(
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        n_local_stages=2,
        num_stages=2 * ranks,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    return {
        rank: tuple(MetaStep.of(str(each)) for each in schedule._calculate_single_rank_operations(rank) if each)
        for rank in range(ranks)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--moves", type=int, default=300)
    options = parser.parse_args()
    chance, ratios, seconds = random.Random(0), [], 0.0
    micro_batches = 3 * options.ranks
    for number in range(options.sets):
        cost = Costs(input=chance.uniform(0.6, 1.6), weight=chance.uniform(0.4, 1.4), send=chance.uniform(0, 0.2))
        pipelines = {shape: Pipeline(placed(shape, options.ranks), micro_batches, cost=cost) for shape in TORCH}  # type: ignore[arg-type]
        theirs = []
        for shape, pipeline in pipelines.items():
            order = torch_order(shape, options.ranks, micro_batches)
            check(order, pipeline)
            theirs.append(simulate(order, pipeline))
        best = min(theirs, key=lambda trace: trace.bubble)
        begin = time.process_time()
        orders = [(synthesize(each, max(best.peaks), moves=options.moves), each) for each in pipelines.values()]
        seconds += time.process_time() - begin
        own = min(simulate(*each).bubble for each in orders)
        ratios.append(own / best.bubble)
        print(
            f"{number:2d} input {cost.input:.2f} weight {cost.weight:.2f} send {cost.send:.2f}: torch {best.bubble:.2f}"
            f" ours {own:.2f} ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(
        f"{len(ratios)} sets, {options.ranks} ranks, {micro_batches} micro-batches, {options.moves} moves: ratio"
        f" {sum(ratios) / len(ratios):.3f} in the mean, {max(ratios):.3f} at most, {min(ratios):.3f} at least;"
        f" {seconds / len(ratios):.1f} s of CPU each"
    )


if __name__ == "__main__":
    main()
