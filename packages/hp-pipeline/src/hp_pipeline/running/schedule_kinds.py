"""The schedules of `hp_pipeline.schedules` that run, each a class of its name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hp_pipeline import schedules
from hp_pipeline.orders.pipeline import Shape
from hp_pipeline.running.schedule import PipelineSchedule
from hp_pipeline.stages.stage import PipelineStage


class ScheduleGPipe(PipelineSchedule):
    """All forwards, then all backwards: see ``schedules.gpipe``."""

    make = staticmethod(schedules.gpipe)


class Schedule1F1B(PipelineSchedule):
    """One forward, one backward: see ``schedules.one_f_one_b``."""

    make = staticmethod(schedules.one_f_one_b)


class ScheduleZB1P(PipelineSchedule):
    """Backwards in two halves at 1F1B's memory: see ``schedules.zb1p``."""

    make = staticmethod(schedules.zb1p)


class ScheduleSeqPP(Schedule1F1B):
    """1F1B over slices of sequences: see ``schedules.seq_pp``.

    ``ScheduleSeqPP(stage, micro_batch_num, seq_slices=4)``; other arguments are those of ``PipelineSchedule``. Losses
    are those of slices: their mean is that of the whole where each is a mean over as many tokens. Where tokens are left
    out of a loss (padding), divide sums by the count in the whole batch and pass ``scale_grads=False``.
    """

    make = staticmethod(schedules.seq_pp)


class ScheduleInterleaved1F1B(PipelineSchedule):
    """1F1B over several stages a rank: see ``schedules.interleaved``.

    Args:
        stages: the stages of this rank.
        micro_batch_num: into how many micro-batches a batch is cut.
        overlap_b_f: a backward and the forward after it run together, ``F, (B F)*, B``: see ``CommComputeOverlap``.
        enable_dxdw_split: of a backward that runs together with a forward only the half for the inputs does; the half
            for the weights comes after.
        **options: those of ``PipelineSchedule``.

    Raises:
        ValueError: ``enable_dxdw_split`` without ``overlap_b_f``.
    """

    shape: Shape = "loop"

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        micro_batch_num: int,
        *,
        overlap_b_f: bool = False,
        enable_dxdw_split: bool = False,
        **options: Any,
    ) -> None:
        if enable_dxdw_split and not overlap_b_f:
            raise ValueError(
                "ScheduleInterleaved1F1B: enable_dxdw_split=True splits the backwards that run together with a forward;"
                " it needs overlap_b_f=True. ScheduleZB1P and ScheduleZBV split backwards without."
            )
        order = functools.partial(schedules.interleaved, overlap=overlap_b_f, split=enable_dxdw_split)
        super().__init__(stages, micro_batch_num, **{"order": order, **options})


class ScheduleInterleavedZeroBubble(PipelineSchedule):
    """Interleaved 1F1B in halves, without bubbles: see ``schedules.interleaved_zb``."""

    shape: Shape = "loop"
    make = staticmethod(schedules.interleaved_zb)


class ScheduleLoopedBFS(PipelineSchedule):
    """All micro-batches through each stage in turn: see ``schedules.looped_bfs``."""

    shape: Shape = "loop"
    make = staticmethod(schedules.looped_bfs)


class ScheduleZBV(PipelineSchedule):
    """Zero bubble, stages there and back: see ``schedules.zbv``."""

    shape: Shape = "v"
    make = staticmethod(schedules.zbv)


class ScheduleVHalf(PipelineSchedule):
    """Half of 1F1B's memory: see ``schedules.v_half``."""

    shape: Shape = "v"
    make = staticmethod(schedules.v_half)


class ScheduleVMin(PipelineSchedule):
    """The least memory: see ``schedules.v_min``."""

    shape: Shape = "v"
    make = staticmethod(schedules.v_min)


class ScheduleDualPipeV(PipelineSchedule):
    """Forwards and backwards in pairs, stages there and back: see ``schedules.dual_pipe_v``."""

    shape: Shape = "v"
    make = staticmethod(schedules.dual_pipe_v)
