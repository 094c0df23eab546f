"""Random numbers that a model draws in a step, as dropout does.

Note [Draws of a step]
    What is dropped depends on the sample, not on the rank that has it: else all ranks would drop the same of different
    samples. So before each micro-batch a rank seeds its generators with the step's seed and the micro-batch's number in
    the global batch. Ranks that share samples but hold other tokens (`cp`) or other layers (`pp`) have numbers of their
    own. Those of `tp` have the same ones: activations that are replicated have to stay equal, and a DTensor's shard
    takes its part of what all ranks draw alike.
"""

from __future__ import annotations

from collections.abc import Callable

from hp_plan.plan import ParallelPlan, data_parallel_place
from hp_platform import get_platform


def draws(plan: ParallelPlan, micro_batches: int) -> Callable[[int], None]:
    """Begin a step's draws; call the result with the number of each micro-batch before it.

    The step's seed is the last one given to `hp_platform.manual_seed`, the same on all ranks. Without one, generators
    go on as they are.

    Args:
        plan: says which samples, tokens and layers this rank has.
        micro_batches: of this rank in the step.
    """
    platform, mesh = get_platform(), plan.mesh
    seed = platform.random.seeded()
    if seed is None:
        return lambda number: None
    at = mesh.coordinate(platform.groups.rank())
    own, parts = at.get("cp", 0) * mesh.pp + at.get("pp", 0), mesh.cp * mesh.pp

    def begin(number: int) -> None:
        place = (data_parallel_place(plan) * micro_batches + number) * parts + own
        platform.random.reseed((seed * mesh.data_parallel * micro_batches * parts + place) % 2**63)

    return begin
