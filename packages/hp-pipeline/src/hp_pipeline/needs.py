"""What a step needs to be done before it: the edges of the graph that ``check`` walks and ``simulate`` puts on clocks.

Note [What a step needs]
    A forward needs the forwards of the stages before it, or the receives of what they pass on where they are on other
    ranks, and the forward of the slice before it. A backward needs its forward, the backwards of the stages after it
    (or the receives), and the backward of the slice after it. A backward for the weights needs the one for the inputs.
    A send needs what it sends; a receive needs the sends to it. All but the last are steps of the same rank.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from hp_pipeline.pipeline import Pipeline
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["Needs", "needs_of"]

_T = MetaStepType
_F, _B, _I, _W = _T.FORWARD, _T.BACKWARD, _T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT
_FS, _FR, _BS, _BR = _T.FWD_SEND, _T.FWD_RECV, _T.BWD_SEND, _T.BWD_RECV


class Needs:
    """The needs of steps in a pipeline.

    Args:
        pipeline: what the steps are for.
        split: the stages and micro-batches whose backward is in two halves: (stage, micro-batch, slice).
        lowered: sends and receives are steps; else a compute step needs those of other ranks themselves.
    """

    def __init__(self, pipeline: Pipeline, split: Collection[tuple[int, int, int]], lowered: bool) -> None:
        self._split, self._slices = frozenset(split), pipeline.seq_slices
        self._listed: dict[MetaStep, tuple[MetaStep, ...]] = {}
        placement = pipeline.placement
        self._before, self._after, self._far_before, self._far_after = [], [], [], []
        for stage in range(len(placement)):
            before, after = pipeline.predecessors[stage], pipeline.successors[stage]
            far_before, far_after = pipeline.remote(stage, before), pipeline.remote(stage, after)
            self._before.append([each for each in before if not lowered or each not in far_before])
            self._after.append([each for each in after if not lowered or each not in far_after])
            self._far_before.append(far_before)
            self._far_after.append(far_after)
        self._lowered = lowered

    def backward(self, stage: int, micro: int, part: int) -> MetaStep:
        """Return the step after which the gradients of a stage's inputs are there."""
        return MetaStep(micro, _I if (stage, micro, part) in self._split else _B, stage, None, part)

    def __call__(self, each: MetaStep) -> tuple[MetaStep, ...]:
        """List the steps that must be done before this one begins; for a composite, those of both its parts."""
        listed = self._listed.get(each)
        if listed is None:
            listed = self._listed[each] = tuple(self._list(each))
        return listed

    def _list(self, each: MetaStep) -> list[MetaStep]:
        micro, kind, stage, parts, part = each
        if parts:
            return [need for sub in parts for need in self(sub)]
        if micro is None or stage is None:
            return []
        if kind is _F:
            needs = [MetaStep(micro, _F, other, None, part) for other in self._before[stage]]
            if self._lowered and self._far_before[stage]:
                needs.append(MetaStep(micro, _FR, stage, None, part))
            if part:
                needs.append(MetaStep(micro, _F, stage, None, part - 1))
            return needs
        if kind is _B or kind is _I:
            needs = [MetaStep(micro, _F, stage, None, part)]
            needs += [self.backward(other, micro, part) for other in self._after[stage]]
            if self._lowered and self._far_after[stage]:
                needs.append(MetaStep(micro, _BR, stage, None, part))
            if part + 1 < self._slices:
                needs.append(self.backward(stage, micro, part + 1))
            return needs
        if kind is _W:
            return [MetaStep(micro, _I, stage, None, part)]
        if kind is _FS:
            return [MetaStep(micro, _F, stage, None, part)]
        if kind is _BS:
            return [self.backward(stage, micro, part)]
        if kind is _FR:
            return [MetaStep(micro, _FS, other, None, part) for other in self._far_before[stage]]
        if kind is _BR:
            return [MetaStep(micro, _BS, other, None, part) for other in self._far_after[stage]]
        earlier = {_T.OFFLOAD: _F, _T.WAIT_OFFLOAD: _T.OFFLOAD, _T.LOAD: _T.WAIT_OFFLOAD, _T.WAIT_LOAD: _T.LOAD}
        return [MetaStep(micro, earlier[kind], stage, None, part)] if kind in earlier else []


@functools.lru_cache(maxsize=8)
def needs_of(pipeline: Pipeline, split: frozenset[tuple[int, int, int]]) -> Needs:
    """Get the needs of computing steps, those of one pipeline listed once for all orders that are compared."""
    return Needs(pipeline, split, lowered=False)
