"""A rank's steps, bound to its stages and channels, and run.

Note [The bound program]
    What a step does is settled before the first run: its stage, its channels, where it finds its inputs. A run is a
    walk over a list of functions.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hp_pipeline.messages.channels import FAILED, Again, Failed, Message
from hp_pipeline.messages.wiring import (
    AnyChannel,
    Key,
    Piece,
    keys_of,
    message_counts,
    open_channels,
    receipts,
    stage_facts,
)
from hp_pipeline.orders.checking import parts_of
from hp_pipeline.orders.pipeline import SHARDING, SWAPPING, TRANSFERS, MetaStep, MetaStepType, Order, Pipeline
from hp_pipeline.orders.simulation import halves
from hp_pipeline.port import Swapper, port
from hp_pipeline.running.agreement import Agreement, PipelineError, StallWatchdog, gave_up
from hp_pipeline.running.overlap import CommComputeOverlap
from hp_pipeline.running.slices import KEYWORD, Arrived, MicroBatchState, SequenceState, whole_losses
from hp_pipeline.running.stage_memory import MOVES, ShardedStage
from hp_pipeline.stages.stage import PipelineStage, SharedParameters
from hp_platform import LostRankError
from hp_platform.extend import FailedRankError

_T = MetaStepType


@dataclass(frozen=True)
class Settings:
    """How a run is done: options of ``PipelineSchedule``.

    Attributes:
        scale_grads: see ``PipelineSchedule``, as for the next four.
        overlap_p2p: see there.
        patience: see there.
        overlap: see there.
        swapper: what ``swap`` stands for, None for nothing.
        fingerprint: of the order and its options; all ranks must have the same.
    """

    scale_grads: bool
    overlap_p2p: bool
    patience: float
    overlap: CommComputeOverlap | None
    swapper: Swapper | None
    fingerprint: int


class _Receive(NamedTuple):
    """What a step receives.

    Attributes:
        key: of the channel.
        channel: by which a message comes.
        released: messages of this rank that its sender has received before.
    """

    key: Key
    channel: AnyChannel
    released: Sequence[tuple[AnyChannel, Piece]]


class Runner:
    """One rank's part of a pipeline.

    Args:
        stages: of this rank.
        pipeline: what the order is for.
        rank: this rank's place in it.
        group: the pipeline's ranks.
        peers: the ranks of all pipelines that run together.
        order: all steps of all ranks.
        custom: functions that replace types of steps.
    """

    settings: Settings
    patience: StallWatchdog

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        pipeline: Pipeline,
        rank: int,
        group: Any,
        peers: Any,
        order: Order,
        custom: Mapping[_T, Callable[..., Any]],
    ) -> None:
        self.pipeline, self.rank, self.group, self.custom = pipeline, rank, group, custom
        self.stages: dict[int, PipelineStage] = {stage.stage_index: stage for stage in stages}
        self.split = {(stage, (micro, part)) for stage, micro, part in halves(order)}
        for stage in {stage for stage, _ in self.split} & set(self.stages):
            if port().is_module(self.stages[stage].submodule):
                port().prepare_split(self.stages[stage].submodule)
        self.ranks = Agreement(self.group, peers)
        self.shared: SharedParameters | None = None
        reduced = {each.stage_index for each in order[self.rank] if each.step_type in SHARDING}
        self.sharded = {stage: ShardedStage(self.stages[stage].submodule) for stage in self.stages if stage in reduced}
        self.swapped = {
            (each.stage_index, (each.micro_index, each.seq_index))
            for each in order[self.rank]
            if each.step_type is _T.OFFLOAD
        }
        self.order = order
        self.channels: dict[Key, AnyChannel] = {}
        self.counts: Counter[AnyChannel] = Counter()
        self.receipts: dict[tuple[Key, Piece], list[tuple[Key, Piece]]] = {}
        self.program: list[Callable[[], None]] = []
        # Of the run under way:
        self.flows: dict[tuple[int, Piece], MicroBatchState] = {}
        self.inbox: dict[tuple[int, int, Piece], Message] = {}
        self.outbox: dict[tuple[int, int, Piece], Message] = {}
        self.dead: set[tuple[int, int, Piece]] = set()
        self.failure: Exception | None = None
        self.text = ""
        self.batches: Mapping[Piece, Any] = {}
        self.losses: dict[Piece, Any] = {}

    # ---- binding ----
    def _bind(self) -> None:
        """Open the channels, compare shared weights, and bind the steps.

        All ranks do it at once, also if one of them has another program alone, for a channel has two ends.
        """
        shared = SharedParameters(list(self.stages.values()), self.pipeline, self.rank, self.group)
        facts = shared.facts, stage_facts(self.stages, several=self.pipeline.ranks != self.ranks.ranks)
        everyone = [pickle.loads(data) for data in self.ranks.share(pickle.dumps(facts))]
        shared.agree([weights for weights, _ in everyone])
        others = [stages for _, stages in everyone]
        self.channels = open_channels(self.pipeline, self.stages, self.ranks, others, ahead=self.settings.overlap_p2p)
        steps = self.order[self.rank]
        self.counts = message_counts(self.pipeline, steps, self.channels)
        keys = functools.partial(keys_of, self.pipeline)
        self.receipts = receipts(self.order, self.pipeline.placement, self.rank, keys)
        self.program, self.shared = [self._bound(step) for step in steps], shared

    def _bound(self, step: MetaStep) -> Callable[[], None]:
        if step.sub_steps:
            return self._bound_pair(step)
        kind, stage, micro = step.step_type, step.stage_index, step.micro_index
        assert stage is not None
        if kind in SHARDING:
            return self._bound_sharding(step, self.sharded[stage])
        assert micro is not None
        piece = micro, step.seq_index
        keys = keys_of(self.pipeline, step) if kind in TRANSFERS else ()
        if kind in (_T.FWD_RECV, _T.BWD_RECV):
            receives = [_Receive(key, self.channels[key], self._released(key, piece)) for key in keys]
            return functools.partial(self._receive, receives, piece)
        if kind in TRANSFERS:
            return functools.partial(self._send, [(key, self.channels[key]) for key in keys], piece)
        compute = {
            _T.FORWARD: self._forward,
            _T.BACKWARD: self._backward,
            _T.BACKWARD_INPUT: self._backward,
            _T.BACKWARD_WEIGHT: self._weights,
        }
        if kind in SWAPPING:
            return self._customized(step, lambda: MOVES[kind](self.flows[stage, piece]))
        return self._customized(step, functools.partial(compute[kind], stage, piece))

    def _customized(self, step: MetaStep, work: Callable[[], object]) -> Callable[[], None]:
        if step.step_type in self.custom:
            work = functools.partial(self.custom[step.step_type], step, work)
        return functools.partial(self._tried, step, work)

    def _released(self, key: Key, piece: Piece) -> list[tuple[AnyChannel, Piece]]:
        """List the messages of this rank that are known to have come when one of a piece comes."""
        return [(self.channels[sent], its) for sent, its in self.receipts.get((key, piece), ())]

    def _bound_sharding(self, step: MetaStep, sharded: ShardedStage) -> Callable[[], None]:
        """Bind a step of the ranks of a stage's shards: they take it together, after a failure too."""
        works: dict[_T, Callable[[], None]] = {
            _T.UNSHARD: sharded.unshard,
            _T.RESHARD: sharded.reshard,
            _T.REDUCE_GRAD: lambda: sharded.reduce(self.failure is not None),
        }
        work = works[step.step_type]
        if step.step_type in self.custom:
            work = functools.partial(self.custom[step.step_type], step, work)
        return functools.partial(self._tried, step, work, always=True)

    def _bound_pair(self, step: MetaStep) -> Callable[[], None]:
        parts, overlap = [self._bound(part) for part in step.sub_steps or ()], self.settings.overlap
        forward, backward = parts_of(step)
        if overlap is not None and overlap.meets(forward.stage_index or 0, backward.stage_index or 0):
            ahead, back = parts if step.step_type is _T.OVERLAP_F_B else reversed(parts)
            return self._customized(step, functools.partial(overlap.run, ahead, back))
        return self._customized(step, functools.partial(_run_all, parts))

    # ---- steps ----
    def _tried(self, step: MetaStep, work: Callable[[], object], *, always: bool = False) -> None:
        """Compute, unless this rank failed before; a failure is kept for the end of the run."""
        try:
            if self.failure is None or always:
                work()
        except LostRankError:
            raise
        except Exception as error:  # what a stage raises
            if self.failure is None:
                self._fail(step, error)

    def _fail(self, step: MetaStep, error: Exception) -> None:
        self.failure = error
        self.text = f"rank {self.ranks.name} at {step}: {type(error).__name__}: {error}"
        self.patience.failed(self.text)

    def _receive(self, receives: Sequence[_Receive], piece: Piece) -> None:
        for (source, target, ahead), channel, released in receives:
            if not ahead and (source, target, piece) in self.dead:
                continue
            flow = None if ahead else self.flows.get((source, piece))
            message = channel.receive(piece, None if flow is None else flow.outputs)
            for sender, sent in released:
                sender.release(sent)
            if isinstance(message, Failed):
                if ahead and message is FAILED:
                    self.dead.add((source, target, piece))
                if self.failure is None:
                    self.failure = PipelineError(f"{channel.name}: the sender had failed")
            elif ahead:
                self.inbox[source, target, piece] = message
            elif flow is not None:
                flow.gradients[target] = message.leaves

    def _send(self, channels: Sequence[tuple[Key, AnyChannel]], piece: Piece) -> None:
        for (source, target, ahead), channel in channels:
            if not ahead and (source, target, piece) in self.dead:
                continue
            if self.failure is None:
                outputs = self.flows[source, piece].outputs if ahead else self.outbox.pop((source, target, piece))
                assert outputs is not None
                try:
                    channel.send(outputs, piece)
                    continue
                except LostRankError:
                    raise
                except Exception as error:  # the receiver waits for a message
                    own = source if ahead else target
                    self._fail(MetaStep(piece[0], _T.FORWARD if ahead else _T.BACKWARD, own, None, piece[1]), error)
            if not channel.send_failed(piece) and ahead:
                self.dead.add((source, target, piece))

    def _forward(self, stage: int, piece: Piece) -> None:
        flow = self.flows[stage, piece] = MicroBatchState()
        args, kwargs = self.batches[piece]
        recording = port().recording() if self.pipeline.has_backward else port().without_gradients()
        deferring: Any = contextlib.nullcontext()
        saving: Any = deferring
        if (stage, piece) in self.split:
            flow.deferred, deferring = port().deferring(self.stages[stage].submodule)
        if (stage, piece) in self.swapped and self.settings.swapper is not None:
            saving = self.settings.swapper.saving(f"{stage}F{piece[0]}", self.stages[stage].submodule)
        with recording, deferring, saving as flow.swap:
            before = self.pipeline.predecessors[stage]
            if before:
                args = tuple(each for source in before for each in self._arrive(source, stage, piece))
            if self.pipeline.seq_slices > 1:
                flow.state = self._state(stage, piece)
                kwargs = {**kwargs, KEYWORD: flow.state}
            result = self.stages[stage].submodule(*args, **kwargs)
            if flow.joined:
                flow.check_joined(stage)
            if self.pipeline.successors[stage]:
                flow.outputs = Message.of(result)
            if flow.state is not None:
                flow.state.close()
        if self.pipeline.successors[stage]:
            return
        if self.pipeline.has_backward:
            loss = result["loss"] if isinstance(result, dict) and "loss" in result else getattr(result, "loss", result)
            if not port().is_tensor(loss) or port().shape(loss) != ():
                got = f"a tensor of shape {port().shape(loss)}" if port().is_tensor(loss) else type(loss).__name__
                raise TypeError(
                    f"the last stage must return a scalar loss, or something with .loss; it returned {got}."
                )
            needed = port().needs_gradient(loss)
            if not needed and self._trains(stage, flow):
                raise ValueError(
                    "the loss of the last stage needs no gradient, but its inputs or weights do: it was detached, or"
                    " computed without gradients. For forwards alone pass PipelineStage(..., has_backward=False)."
                )
            self.losses[piece] = port().detach(loss)
            flow.outputs = Message([loss], [needed], None)
        else:
            self.losses[piece] = result

    def _trains(self, stage: int, flow: MicroBatchState) -> bool:
        """Tell whether something that a stage computes with needs gradients."""
        weights = port().named_parameters(self.stages[stage].submodule).values()
        inputs = [tensor for arrived in flow.arrivals for tensor in arrived.arrival.tensors if port().is_tensor(tensor)]
        return any(map(port().needs_gradient, (*weights, *inputs)))

    def _arrive(self, source: int, stage: int, piece: Piece) -> tuple[Any, ...]:
        """Put what a stage before passed on at the root of a stage's graph; return the stage's arguments."""
        message = self.inbox.pop((source, stage, piece), None)
        if message is None:  # the stage before is on this rank
            outputs = self.flows[source, piece].outputs
            assert outputs is not None
            # A stage may write to what it gets: not to memory that is being sent.
            sent = self.pipeline.remote(source, self.pipeline.successors[source])
            own = port().copied if sent or outputs.joined else port().detach
            leaves = [own(leaf) if port().is_tensor(leaf) else leaf for leaf in outputs.leaves]
            message = Message(leaves, outputs.needed, outputs.structure, outputs.layouts, joined=outputs.joined)
        arrival = port().arrive(message.leaves, message.needed)
        leaves = list(arrival.tensors)
        if message.joined:
            self.flows[stage, piece].watch_joined(source, [leaves[place] for place in message.joined])
        for place, layout in message.layouts.items():
            leaves[place] = self.stages[stage].wrapped(leaves[place], layout)
        if len(leaves) > 1:
            leaves = [leaves[leaf.place] if type(leaf) is Again else leaf for leaf in leaves]
        if self.pipeline.has_backward:
            self.flows[stage, piece].arrivals.append(Arrived(source, arrival, message))
        value = port().unflatten(leaves, message.structure)
        return value if type(value) is tuple else (value,)

    def _state(self, stage: int, piece: Piece) -> SequenceState:
        micro, part = piece
        before = self.flows[stage, (micro, part - 1)].state if part else None
        return SequenceState(part, self.pipeline.seq_slices, before)

    def _backward(self, stage: int, piece: Piece) -> None:
        flow = self.flows[stage, piece]
        outputs, flow.outputs = flow.outputs, None
        assert outputs is not None
        if self.pipeline.successors[stage]:
            # The last stage first, as autograd does on one device, in whatever order they came.
            gradients, *others = [flow.gradients[after] for after in sorted(flow.gradients, reverse=True)]
            if others:
                gradients = [_total(column) for column in zip(gradients, *others, strict=True)]
            flow.gradients = {}
        else:
            factor = 1 / len(self.batches) if self.settings.scale_grads else 1.0
            gradients = [port().scaled(leaf, factor) for leaf in outputs.leaves]
        pairs = [
            (leaf, gradient)
            for leaf, need, gradient in zip(outputs.leaves, outputs.needed, gradients, strict=True)
            if need and gradient is not None
        ]
        state, flow.state = flow.state, None
        if state is not None:
            pairs += state.roots()
        if pairs:
            arrivals = [arrived.arrival for arrived in flow.arrivals] + (state.arrivals() if state is not None else [])
            roots = [leaf for leaf, _ in pairs]
            starts = [gradient for _, gradient in pairs]
            port().backward(self.stages[stage].submodule, arrivals, roots, starts, flow.deferred)
        if state is not None:
            state.pass_back()
        for source, arrival, message in flow.arrivals:
            leaves = arrival.gradients()
            if self.pipeline.placement[source] == self.rank:
                self.flows[source, piece].gradients[stage] = leaves
            else:
                nothing, (_, _, structure, layouts, origins, _) = [False] * len(leaves), message
                self.outbox[source, stage, piece] = Message(leaves, nothing, structure, layouts, origins)
        flow.arrivals = []
        if (stage, piece) not in self.split:
            del self.flows[stage, piece]

    def _weights(self, stage: int, piece: Piece) -> None:
        self.flows.pop((stage, piece)).deferred.run()

    # ---- a run ----
    def run(self, settings: Settings, batches: Mapping[Piece, Any], problem: Exception | None) -> list[Any]:
        """Run all steps; see ``PipelineSchedule.run``."""
        self.settings = settings
        for sharded in self.sharded.values():
            sharded.free()
        bound = self.shared is not None and not self.shared.replaced()
        options = settings.fingerprint, self.pipeline.micro_batches
        writes = self.shared.writes() if self.shared is not None else b""
        bound, changed, apart = self.ranks.begin(*options, batches, problem, bound=bound, writes=writes)
        if bound and apart and self.shared is not None:
            self.ranks.refuse(self.shared.compare([self.shared.keys[place] for place in apart]))
        if not bound:
            self._bind()
        elif changed:  # other batches make other messages: they are described anew
            for channel in self.channels.values():
                channel.describe_again()
        assert self.shared is not None
        self.shared.set_aside()
        self.batches = batches
        try:
            with StallWatchdog(settings.patience) as self.patience:
                losses = self._run()
                present = self.ranks.end(self.failure, self.text, self.shared.present())
        except FailedRankError as error:  # of another rank's failure an own one is a consequence
            raise gave_up(error) from (self.failure if self.ranks.name in error.texts else None)
        finally:
            self.failure, self.text = None, ""
        self.shared.add(present)
        return whole_losses(losses, self.pipeline.seq_slices, mean=settings.scale_grads)

    def _run(self) -> list[Any]:
        """Take all steps; return the losses of the pieces in order."""
        for sharded in self.sharded.values():
            sharded.begin()
        try:
            for channel in self.channels.values():
                channel.expect(self.counts[channel])
            for work in self.program:
                work()
                if self.failure is not None:
                    self.patience.move()
            for (source, _, ahead), channel in self.channels.items():
                kind = _T.FORWARD if ahead else _T.BACKWARD
                self._tried(MetaStep(None, kind, source), channel.finish, always=True)
            for sharded in self.sharded.values():
                sharded.end()
            return [self.losses[piece] for piece in sorted(self.losses)]
        except BaseException:
            for channel in self.channels.values():
                channel.forget()
            raise
        finally:
            self.batches = {}
            for state in (self.flows, self.inbox, self.outbox, self.dead, self.losses):
                state.clear()


def _run_all(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _total(gradients: Sequence[Any]) -> Any:
    """Add gradients, in their order; None where there are none."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
