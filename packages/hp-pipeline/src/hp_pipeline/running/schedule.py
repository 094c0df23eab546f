"""Schedules that run: an order, the stages of this rank, and a step of the model; each kind is a class.

Note [A run]
    At the first run all ranks compare their orders, so that a rank with another number of micro-batches is named
    before anything is sent. Each rank then goes through its lowered steps. At the end they wait for their messages and
    tell each other whether a stage failed (Note [A stage that failed]).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hp_pipeline import schedules
from hp_pipeline.messages.wiring import pipeline_ranks
from hp_pipeline.orders.checking import check
from hp_pipeline.orders.pipeline import (
    SWAPPING,
    TRANSFERS,
    MetaStep,
    MetaStepType,
    Order,
    Pipeline,
    Shape,
    compute_parts,
    placed,
)
from hp_pipeline.port import port
from hp_pipeline.running.overlap import CommComputeOverlap
from hp_pipeline.running.runner import Piece, Runner, Settings
from hp_pipeline.running.slices import SEQUENCE, Dim, check_slices, cut
from hp_pipeline.running.stage_memory import lowered, refuse_order, swapper_of
from hp_pipeline.schedules import forwards_of
from hp_pipeline.stages.stage import PipelineStage, copies
from hp_platform import get_platform

Custom = Callable[..., Any]
Steps = Mapping[int, str | Iterable[MetaStep]]


class PipelineSchedule:
    """An order of steps and what is needed to run it.

    Args:
        stages: the stages of this rank, or its only one.
        micro_batch_num: into how many micro-batches a batch is cut.
        args_batch_dim: for each positional input the dim that is cut, -1 for none; by default 0.
        kwargs_batch_dim: the same by name.
        output_concat_dim: without backward, the dim along which the outputs of micro-batches are joined; None leaves a
            list.
        scale_grads: gradients are those of the mean of the micro-batches' losses; False leaves those of the sum.
        group: the pipeline's ranks, in its order; None is all ranks.
        peers: the ranks of all pipelines that run together, as those of data or tensor parallelism: what a stage raises
            on one of them, all raise. None is this pipeline's.
        placement: the pipeline rank of each stage; None is the schedule's own.
        boundaries: pairs of stages between which something is passed on; None is a line: see ``Pipeline``. A stage that
            takes from several gets what they return one after the other, in the order of the stages.
        order: the order, or a function that makes it of ``pipeline``; None is the schedule's own.
        seq_slices: into how many slices sequences are cut; stages then take a ``SequenceState``: Note [Slices].
        args_seq_dim: for each positional input the dim that is cut into slices, -1 for none; by default 1.
        kwargs_seq_dim: the same by name.
        overlap: runs the two steps of a pair together; None runs them one after the other.
        swap: what a forward saves waits for its backward on the host, moved by hp-offload, or by an object like its
            ``SwapManager()``.
        overlap_p2p: receive up to two messages of each channel ahead, where the backend can, while the rank computes;
            False begins to receive where the order needs a message. Sends run beside the computation either way.
        patience: seconds that a rank whose stage failed gets nowhere until it ends the run of all; see ``run``.

    Attributes:
        pipeline: what the order is for.
        exec_order: computing steps by rank, read-only. Another order may be assigned; it is checked at once.

    Raises:
        ValueError: stages that are not those of this rank's place, or an order that does not run to its end.
    """

    shape: Shape = "line"
    make: Callable[[Pipeline], Order] | None = None

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        micro_batch_num: int,
        args_batch_dim: Sequence[Dim] | None = None,
        kwargs_batch_dim: Mapping[str, Dim] | None = None,
        output_concat_dim: int | None = None,
        *,
        scale_grads: bool = True,
        group: Any = None,
        peers: Any = None,
        placement: Sequence[int] | None = None,
        boundaries: Sequence[tuple[int, int]] | None = None,
        order: Order | Callable[[Pipeline], Order] | None = None,
        seq_slices: int = 1,
        args_seq_dim: Sequence[Dim] | None = None,
        kwargs_seq_dim: Mapping[str, Dim] | None = None,
        overlap: CommComputeOverlap | None = None,
        swap: Any = False,
        overlap_p2p: bool = True,
        patience: float = 30.0,
    ) -> None:
        self.swapper = swapper_of(swap)
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        groups = get_platform().groups
        self.group = groups.default_group() if group is None else group
        self.peers = self.group if peers is None else peers
        outside = sorted(set(groups.ranks(self.group)) - set(groups.ranks(self.peers)))
        if outside:
            raise ValueError(
                f"{type(self).__name__}: peers= are the ranks of all pipelines that run together, got a group of"
                f" {groups.ranks(self.peers)}, without the ranks {outside} of this pipeline."
            )
        self.rank, processes = groups.rank(self.group), groups.size(self.group)
        self.micro_batch_num, self.scale_grads = micro_batch_num, scale_grads
        self.args_batch_dim, self.kwargs_batch_dim = args_batch_dim, kwargs_batch_dim
        self.output_concat_dim, self.overlap_p2p, self.patience = output_concat_dim, overlap_p2p, patience
        self.args_seq_dim, self.kwargs_seq_dim, self.overlap = args_seq_dim, kwargs_seq_dim, overlap
        if not self.stages:
            raise ValueError(f"{type(self).__name__}: rank {self.rank} has no stage.")
        count = self.stages[0].stage_num
        ranks = pipeline_ranks(self.stages, self.group)
        if placement is None:
            chunks = count // ranks if self.shape == "loop" else None
            placement = placed(self.shape, ranks, chunks)
            if len(placement) != count:
                raise ValueError(
                    f"{type(self).__name__} on {ranks} ranks has {len(placement)} stages, stage_num is {count};"
                    f" placed({self.shape!r}, {ranks}) lists their ranks. For stages on several ranks pass mesh=."
                )
        backward = {stage.has_backward for stage in self.stages}
        if len(backward) > 1:
            raise ValueError(
                f"{type(self).__name__}: rank {self.rank} has stages with has_backward=True and False; a pipeline runs"
                " backwards through all stages or none. Frozen stages need no option."
            )
        self.pipeline = Pipeline(
            tuple(placement),
            micro_batch_num,
            seq_slices,
            boundaries=None if boundaries is None else tuple(boundaries),
            has_backward=self.stages[0].has_backward,
        )
        own = [stage.stage_index for stage in self.stages]
        if ranks != processes:
            self.rank = self.pipeline.placement[own[0]]
        if own != list(self.pipeline.stages[self.rank]) or {stage.stage_num for stage in self.stages} != {count}:
            raise ValueError(
                f"{type(self).__name__}: rank {self.rank} of {ranks} runs the stages"
                f" {self.pipeline.stages[self.rank]} of {count}, got {self.stages}."
            )
        check_slices(self.stages, seq_slices)
        self._custom: dict[MetaStepType, Custom] = {}
        self._runner: Runner | None = None
        self._kinds: list[type] = []
        order = self.make if order is None else order
        if order is None:
            raise ValueError(
                f"{type(self).__name__} has no order of its own: pass order=, or take a class such as Schedule1F1B."
            )
        if callable(order):
            order = order(self.pipeline) if self.pipeline.has_backward else forwards_of(order, self.pipeline)
        self.exec_order = order

    @classmethod
    def from_steps(
        cls, order: Steps, stages: PipelineStage | Sequence[PipelineStage], **options: Any
    ) -> PipelineSchedule:
        """Return the schedule of an order: its micro-batches, slices and placement are those that the steps name.

        ``PipelineSchedule.from_steps({0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}, stage)`` is 1F1B on two ranks.

        Args:
            order: for each rank its computing steps, or their short forms in one text: Note [How steps are written].
            stages: the stages of this rank, or its only one.
            **options: those of the constructor.

        Raises:
            ValueError: a text that is no step, a stage that two ranks run, or an order that does not run to its end.
        """
        read = {
            rank: tuple(map(MetaStep.of, own.split()) if isinstance(own, str) else own) for rank, own in order.items()
        }
        parts = [(rank, part) for rank, own in read.items() for step in own for part in compute_parts(step)]
        places: dict[int, int] = {}
        for rank, part in parts:
            assert part.stage_index is not None
            if places.setdefault(part.stage_index, rank) != rank:
                ranks = sorted({places[part.stage_index], rank})
                raise ValueError(f"{cls.__name__}: the ranks {ranks} both run stage {part.stage_index}, at {part}.")
        if sorted(places) != list(range(len(places))) or not places:
            raise ValueError(f"{cls.__name__}: the steps name the stages {sorted(places)}, not all from 0.")
        micro_batches = 1 + max(part.micro_index or 0 for _, part in parts)
        slices = 1 + max(part.seq_index for _, part in parts)
        options = {"placement": [places[stage] for stage in sorted(places)], "seq_slices": slices, **options}
        return PipelineSchedule(stages, micro_batches, order=read, **options)

    @property
    def exec_order(self) -> Order:
        """Computing steps by rank."""
        return self._order

    @exec_order.setter
    def exec_order(self, order: Order) -> None:
        check(order, self.pipeline, meetings=self.overlap.meetings if self.overlap is not None else None)
        if self.swapper is None and any(each.step_type in SWAPPING for steps in order.values() for each in steps):
            raise ValueError(f"{type(self).__name__}: exec_order moves saved tensors to the host; pass swap=True.")
        self._order = MappingProxyType({rank: tuple(steps) for rank, steps in order.items()})
        self._runner = None
        vars(self).pop("fingerprint", None)

    def register_custom_function(self, step_type: MetaStepType, fn: Custom) -> None:
        """Replace what a type of step does.

        Args:
            step_type: a computing type, also one of two steps that run together.
            fn: called as ``fn(step, run)``; ``run()`` is the step's own work.

        Raises:
            ValueError: sends and receives, which ranks do in pairs.
        """
        if step_type in TRANSFERS:
            raise ValueError(f"register_custom_function: {step_type} is a send or receive, which nothing may replace.")
        self._custom[step_type] = fn
        self._runner = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch, forwards and backwards; gradients are added to those that there are. All ranks call it.

        Args:
            *args: inputs of the first stage, on its rank.
            **kwargs: keyword inputs of this rank's stages.

        Returns:
            On the last stage's rank one loss a micro-batch, without their graphs; [] on others. That of a micro-batch
            in slices is their mean, with ``scale_grads=False`` their sum, as gradients are. Without backward the
            outputs, joined along ``output_concat_dim`` where that is not None.

        Raises:
            ValueError: an input that micro-batches do not divide, or a rank with another order: on all ranks.
            PipelineError: a stage failed, on any rank of any of the ``peers``: on all of them. Gradients are
                incomplete; set them to zero. Where it failed on one of the ranks that communicate inside of a stage,
                the process groups are broken, as the text says: Note [A stage that failed on one of its ranks].
            LostRankError: the process of a rank has ended.
        """
        problem: Exception | None = None
        batches: dict[Piece, Any] = {}
        try:
            batches = self._cut(args, kwargs)
        except Exception as error:  # also what a module's `prepare_batch` raises
            problem = error
        kinds = [type(stage.submodule) for stage in self.stages]
        if self._runner is None or kinds != self._kinds:  # sharding a module changes its class
            own = [(stage.stage_index, stage.submodule) for stage in self.stages]
            order = lowered(self.exec_order, self.pipeline, self.rank, own, swap=self.swapper is not None)
            text = refuse_order(order, self.rank, own, self.overlap)
            problem = problem if text is None else ValueError(text)
            self._runner = Runner(self.stages, self.pipeline, self.rank, self.group, self.peers, order, self._custom)
            self._kinds = kinds if text is None else []
        settings = Settings(
            self.scale_grads, self.overlap_p2p, self.patience, self.overlap, self.swapper, self.fingerprint
        )
        outputs = self._runner.run(settings, batches, problem)
        if self.output_concat_dim is not None and not self.pipeline.has_backward and outputs:
            return port().concatenate(outputs, self.output_concat_dim)
        return outputs

    def _cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Piece, Any]:
        for stage in self.stages if self.scale_grads else ():
            kwargs = stage.prepare_batch(kwargs, self.micro_batch_num * self.pipeline.seq_slices)
        batches = cut(args, kwargs, self.micro_batch_num, self.args_batch_dim, self.kwargs_batch_dim)
        slices = self.pipeline.seq_slices
        if slices == 1:
            return {(micro, 0): inputs for micro, inputs in enumerate(batches)}
        return {
            (micro, part): inputs
            for micro, batch in enumerate(batches)
            for part, inputs in enumerate(cut(*batch, slices, self.args_seq_dim, self.kwargs_seq_dim, SEQUENCE))
        }

    def copies(self) -> list[Any]:
        """List this rank's copies of shared weights of which another rank has the first: those not to count twice.

        For ``hp_fsdp.clip_grad_norm_(parameters, max_norm, group=schedule.group, copies=schedule.copies())``.
        """
        return copies(self.stages, self.pipeline, self.rank)

    def take_gradients(self, parameters: Iterable[Any]) -> tuple[Any, ...]:
        """Take the gradients that runs have left for parameters, and set them back to none.

        On MindSpore, whose optimizers are called with gradients: ``optimizer(schedule.take_gradients(parameters))``. On
        PyTorch optimizers find them where backward leaves them, in ``grad``.

        Args:
            parameters: those of this rank's stages, such as ``optimizer.parameters``.

        Returns:
            One gradient a parameter. For one without, None on PyTorch and zeros on MindSpore, as its
            ``value_and_grad`` returns.
        """
        return tuple(map(port().take_gradient, parameters))

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that is the same on two ranks only if their orders are."""
        pipeline = self.pipeline
        shape = pipeline.placement, pipeline.predecessors, pipeline.has_backward
        text = repr((sorted(self.exec_order.items()), shape, self.micro_batch_num, self.scale_grads))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


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
