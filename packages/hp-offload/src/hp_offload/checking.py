"""A plan of memory against what a step saves."""

from __future__ import annotations

import warnings
from collections import Counter

from hp_offload.policies import CheckpointPolicy
from hp_offload.port import Tensor, link
from hp_offload.saved import MemoryPlan, size

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
