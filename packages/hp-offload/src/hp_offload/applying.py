"""Models that are traced and follow a plan of memory, and the check of the plan against what their steps save."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hp_offload.planning import BudgetError, plan_memory
from hp_offload.port import Tensor, link, port
from hp_offload.saved import CheckpointPolicy, MemoryPlan, Saved, size
from hp_platform.extend import own_rank

M = TypeVar("M")


def trace_saved(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
) -> list[Saved]:
    """Run one step of a model, and measure what it saves for backward.

    Each storage is listed once. Parameters, buffers and the arguments are left out. What a block is given, what several
    blocks save, and what no block computes can neither be computed again nor swapped, so its `recompute` is infinite.
    Gradients, buffers and random numbers are as before afterwards.

    Args:
        model: a module without checkpoints or swaps; its blocks are the modules whose name ends with the first number
            in it, such as "model.layers.3".
        args: of its forward.
        kwargs: keyword arguments of its forward.
        loss: maps the output to the scalar that the step differentiates. Default: its `"loss"`, else the sum of what
            requires gradients.

    Returns:
        What is saved, in the order of making. Times are seconds of this device, measured operation by operation.

    Raises:
        TypeError: not a module.
        ValueError: nothing requires gradients.
        NotImplementedError: a block runs twice; on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"trace_saved takes a module, got {type(model).__name__}.")
    return port().trace(model, tuple(args), dict(kwargs or {}), loss)


def apply_memory_plan(model: M, plan: MemoryPlan) -> M:
    """Let the blocks of a model follow a plan; names of parameters and modules stay, gradients have the same bits.

    Args:
        model: the one that was traced, changed in place.
        plan: of `plan_memory`.

    Returns:
        The model.

    Raises:
        TypeError: not a module, or not a plan.
        ValueError: the plan names a block that the model has not; in the first step, a site that its block has not.
        NotImplementedError: on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"apply_memory_plan takes a module, got {type(model).__name__}.")
    if not isinstance(plan, MemoryPlan):
        raise TypeError(f"apply_memory_plan takes the MemoryPlan of plan_memory, got {type(plan).__name__}.")
    port().apply(model, plan)
    return model


def fit_memory(model: M, budget: int, *, bandwidth: float = 25e9, in_flight: int = 1) -> M:
    """Let a model keep what it saves within a budget, by a plan that is made in its first step.

    The first call with gradients traces a step of its own, with the arguments of the call, then plans and applies the
    plan; the traced step itself holds everything at once. With several ranks, all of which make that call, the plan is
    rank 0's, measured there: collectives inside of blocks stay in one order.

    Args:
        model: a module, changed in place; every rank calls this.
        budget: see `plan_memory`.
        bandwidth: see `plan_memory`; the default is that of PCIe 4.0 with 16 lanes.
        in_flight: see `plan_memory`.

    Returns:
        The model. Its first call raises ValueError on every rank if the budget is below the least possible.

    Raises:
        TypeError: not a module.
        NotImplementedError: on MindSpore.
    """
    if not port().is_module(model):
        raise TypeError(f"fit_memory takes a module, got {type(model).__name__}.")

    def fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = trace_saved(model, args, kwargs)
        apply_memory_plan(model, _shared_plan(saved, budget, bandwidth, in_flight))

    port().before_first_step(model, fit)
    return model


def _shared_plan(saved: Sequence[Saved], budget: int, bandwidth: float, in_flight: int) -> MemoryPlan:
    """Make a plan on rank 0 and return it on every rank."""
    failure: ValueError | None = None
    plan = MemoryPlan({}, 0, 0.0)
    if own_rank() == 0:
        try:
            plan = plan_memory(saved, budget, bandwidth, in_flight=in_flight)
        except ValueError as error:
            failure = error
    # Every rank has the same number of codes: a failure is the one after the policies', and then the least budget.
    own = [plan.policies.get(each.site, CheckpointPolicy.MUST_SAVE) for each in saved]
    least = failure.least if isinstance(failure, BudgetError) else 0
    codes = port().share([*own, int(failure is not None), least])
    *codes, failed, least = codes
    if failure is not None:
        raise failure
    if failed:
        raise BudgetError(budget, least) if least else ValueError("fit_memory: rank 0 has no plan; its error says why.")
    sizes = {each.site: each.bytes for each in saved if each.alias_of is None}
    policies = {each.site: CheckpointPolicy(code) for each, code in zip(saved, codes)}
    return MemoryPlan(policies, plan.predicted_peak, plan.predicted_step, sizes)


_TOLERANCE = 0.05


class MemoryPlanWarning(UserWarning):
    """A step saves more, or less, than its plan of memory says: plan again, with arguments like these."""


class MemoryCheck:
    """Counts the bytes of a model's second step, and compares them with the plan's.

    The first step names what is saved; from the second one on the shapes are those of training.

    Attributes:
        planned: bytes of each site.
        blocks: those whose second step is not over.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.planned = plan.bytes
        self.blocks: set[str] = set()
        self._expected: Counter[CheckpointPolicy] = Counter()
        self._counted: Counter[CheckpointPolicy] = Counter()

    def add(self, policy: CheckpointPolicy, planned: int, tensor: Tensor) -> None:
        """Count a saved tensor whose storage the plan counts."""
        if planned:
            self._expected[policy] += planned
            self._counted[policy] += link().nbytes(link().storage(tensor))

    def finish(self, block: str) -> None:
        """End a block's second forward; after the last one warn if the bytes are off by more than 5%."""
        self.blocks.discard(block)
        total, off = self._expected.total(), self._counted.total() - self._expected.total()
        if self.blocks or abs(off) <= _TOLERANCE * total:
            return
        kinds = ", ".join(
            f"{size(self._counted[policy])} {word} (planned {size(self._expected[policy])})"
            for policy, word in (
                (CheckpointPolicy.MUST_SAVE, "kept"),
                (CheckpointPolicy.MUST_SWAP, "swapped"),
                (CheckpointPolicy.MUST_RECOMPUTE, "computed again"),
            )
        )
        warnings.warn(
            f"The second step under a plan of memory saves {off / total:+.0%} of what the plan counts: {kinds}. Its"
            " peak is off by as much. Trace and plan with arguments of the shapes that training has.",
            MemoryPlanWarning,
            stacklevel=2,
        )
