"""The channels of a rank, which of them a step uses, and those between stages of different numbers of ranks.

Note [Stages of several ranks]
    A stage on several ranks returns DTensors. Their layout on its mesh, and the one that the next stage declares for
    its own, say which box of the global tensor each rank has and which it needs; among ranks that have the same box
    the receivers take turns. A gradient has the layout of its tensor, whole where that is replicated, so it goes back
    as another such message, from the second layout to the first. What is no DTensor comes from one rank, so it must be
    alike on all; a plain tensor that needs a gradient is refused, for nothing says whether the ranks' gradients of it
    are the same or to be added.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hp_pipeline.messages.channels import Channel, Failed, Message, links
from hp_pipeline.orders.pipeline import TRANSFERS, MetaStep, MetaStepType, Order, Pipeline
from hp_pipeline.port import port
from hp_pipeline.running.agreement import Agreement
from hp_pipeline.stages.layouts import TensorLayout, axes_of, place_of
from hp_pipeline.stages.stage import PipelineStage
from hp_platform import get_platform

Box = tuple[tuple[int, int], ...]
"""Of each dim of a global tensor, where a part begins and ends."""


class End(NamedTuple):
    """A rank of a stage.

    Attributes:
        rank: inside the pipeline's group.
        axes: sizes and names of the stage's mesh.
        place: on it.
        placements: in which DTensors arrive; None keeps those that they had.
    """

    rank: int
    axes: tuple[Any, ...]
    place: tuple[int, ...]
    placements: tuple[Any, ...] | None


def _box(layout: TensorLayout) -> Box:
    """Return the part of a rank.

    Raises:
        TypeError: a placement that is neither a shard nor replicated.
    """
    box, (sizes, _) = [(0, size) for size in layout.shape], layout.axes
    assert layout.place is not None
    for size, index, placement in zip(sizes, layout.place, layout.placements, strict=True):
        if type(placement).__name__ == "Shard":
            begin, end = box[placement.dim]
            rows = -(-(end - begin) // size)
            begin = min(begin + index * rows, end)
            box[placement.dim] = begin, min(begin + rows, end)
        elif not placement.is_replicate():
            raise TypeError(
                f"a {layout.kind.__name__} of {layout} goes between stages of different numbers of ranks; only shards"
                " and replicated axes do. redistribute() it before the stage returns it"
            )
    return tuple(box)


def moves(sources: Sequence[Box], targets: Sequence[Box]) -> dict[tuple[int, int], Box]:
    """Say which source sends which box to which target, so that each target has its own box once."""
    result = {}
    for place, target in enumerate(targets):
        owners = defaultdict(list)
        for index, source in enumerate(sources):
            owners[source].append(index)
        for source, indices in owners.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, target, strict=True))
            if all(begin < end for begin, end in common):
                result[indices[place % len(indices)], place] = common
    return result


def _inside(box: Box, of: Box) -> tuple[slice, ...]:
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(box, of, strict=True))


class MeshChannel:
    """One rank's end of the channels between two stages, in one direction: Note [Stages of several ranks].

    Args:
        name: for errors.
        own: this rank inside the pipeline's group.
        sources: the ranks of the stage that sends.
        targets: those of the stage that receives.
        channels: to or from each rank of the other stage.
        dead: pieces that some rank had failed to send, and which; shared by both directions.
    """

    def __init__(
        self,
        name: str,
        own: int,
        sources: Sequence[End],
        targets: Sequence[End],
        channels: Mapping[int, Channel],
        dead: dict[Any, set[int]],
    ) -> None:
        self.name, self.sources, self.targets, self.channels, self.dead = name, sources, targets, channels, dead
        self.sends = any(end.rank == own for end in sources)
        self.index = [end.rank for end in (sources if self.sends else targets)].index(own)

    def _ways(self, layout: TensorLayout, target: TensorLayout | None) -> tuple[list[Box], list[Box], TensorLayout]:
        """Return the boxes of all sources and targets, and the layout at the first target."""
        if target is None:
            first = self.targets[0]
            if first.placements is None and first.axes[0] != layout.axes[0]:
                raise ValueError(
                    f"{self.name}: a {layout.kind.__name__} of {layout} comes to a mesh of {first.axes[0]}; say how it"
                    " arrives there: PipelineStage(..., mesh=, placements=)."
                )
            target = replace(layout, placements=first.placements or layout.placements, axes=first.axes)
        sources = [_box(replace(layout, place=end.place)) for end in self.sources]
        return sources, [_box(replace(target, place=end.place)) for end in self.targets], target

    # ---- sending ----
    def send(self, message: Message, piece: Any) -> None:
        """Send each rank its part: see ``Channel.send``."""
        layouts: dict[int, TensorLayout] = {}
        parts = [Message([], message.needed, message.structure, layouts) for _ in self.targets]
        for place, leaf in enumerate(message.leaves):
            layout = message.layouts.get(place)
            if layout is None or not port().is_tensor(leaf):
                if port().is_tensor(leaf) and message.needed[place]:
                    raise TypeError(
                        f"{self.name}: the stage returned a plain tensor that needs a gradient, and one of the stages"
                        " is on several ranks. Return DTensor.from_local(tensor, mesh, placements), on a mesh of the"
                        " stage's ranks, which may be one."
                    )
                for index, part in enumerate(parts):
                    part.leaves.append(leaf if index % len(self.sources) == self.index else None)
                continue
            sources, targets, _ = self._ways(layout, message.origins.get(place))
            ways = moves(sources, targets)
            layouts[place] = layout
            for index, part in enumerate(parts):
                box = ways.get((self.index, index))
                part.leaves.append(None if box is None else leaf[_inside(box, sources[self.index])])
        ends = [self.channels[end.rank] for end in self.targets if end.rank not in self.dead.get(piece, ())]
        sent = [part for end, part in zip(self.targets, parts) if end.rank not in self.dead.get(piece, ())]
        packed = [channel.pack(part) for channel, part in zip(ends, sent, strict=True)]
        for channel, part in zip(ends, packed, strict=True):
            channel.post(part, piece)

    def send_failed(self, piece: Any) -> bool:
        """Send what the receivers wait for: see ``Channel.send_failed``."""
        for end in self.targets:
            if end.rank not in self.dead.get(piece, ()) and not self.channels[end.rank].send_failed(piece):
                self.dead.setdefault(piece, set()).add(end.rank)
        return True

    # ---- receiving ----
    def expect(self, count: int) -> None:
        """Begin to receive so many messages."""
        self.dead.clear()
        for channel in self.channels.values():
            channel.expect(count)

    def receive(self, piece: Any, outputs: Message | None) -> Message | Failed:
        """Wait for the next message's parts and put them together: see ``Channel.receive``."""
        parts: list[Message] = []
        for end in self.sources:
            if end.rank in self.dead.get(piece, ()):
                continue
            part = self.channels[end.rank].receive(piece, outputs)
            if isinstance(part, Failed):
                self.dead.setdefault(piece, set()).add(end.rank)
            else:
                parts.append(part)
        if len(parts) < len(self.sources):
            return Failed()
        first = parts[self.index % len(self.sources)]
        leaves, needed = list(first.leaves), list(first.needed)
        layouts: dict[int, TensorLayout] = {}
        origins = {place: layout for part in parts for place, layout in part.layouts.items()}
        for place, layout in origins.items():
            leaves[place], layouts[place] = self._join(place, layout, parts, outputs)
            needed[place] = any(part.needed[place] for part in parts)
        return Message(leaves, needed, first.structure, layouts, origins)

    def _join(
        self, place: int, layout: TensorLayout, parts: Sequence[Message], outputs: Message | None
    ) -> tuple[Any, TensorLayout]:
        """Put this rank's part of a leaf together; return it with its layout."""
        sources, targets, target = self._ways(layout, None if outputs is None else outputs.layouts[place])
        own = targets[self.index]
        device = self.channels[self.sources[0].rank].device
        local = port().empty((tuple(end - begin for begin, end in own), layout.dtype), device)
        for (source, index), box in moves(sources, targets).items():
            if index == self.index:
                value = parts[source].leaves[place]  # None is a gradient that this source has none of
                local[_inside(box, own)] = 0 if value is None else value
        return local, replace(target, place=self.targets[self.index].place)

    # ---- a run ----
    def describe_again(self) -> None:
        """Let the next message be described: see ``Channel.describe_again``."""
        for channel in self.channels.values():
            channel.describe_again()

    def release(self, piece: Any) -> None:
        """Let go of what was sent of a piece, which the receivers have."""
        for channel in self.channels.values():
            channel.release(piece)

    def finish(self) -> None:
        """Wait until all that was sent has been taken: see ``Channel.finish``."""
        for channel in self.channels.values():
            channel.finish()

    def forget(self) -> None:
        """Drop what is under way."""
        for channel in self.channels.values():
            channel.forget()


# ---- messages received before one is sent ----
_T = MetaStepType
Key = tuple[int, int, bool]
"""A channel: from stage, to stage, forward."""
Piece = tuple[int, int]
"""A micro-batch, and a slice of its sequences."""


def receipts(
    order: Order, placement: Sequence[int], rank: int, keys: Callable[[MetaStep], Sequence[Key]]
) -> dict[tuple[Key, Piece], list[tuple[Key, Piece]]]:
    """List for each message that a rank receives those of its own that its sender must have received before.

    Args:
        order: all steps of all ranks.
        placement: the rank of each stage.
        rank: this rank.
        keys: the channels of a send or receive.
    """
    result: dict[tuple[Key, Piece], list[tuple[Key, Piece]]] = {}
    for other, steps in order.items():
        received: list[tuple[Key, Piece]] = []
        for step in steps if other != rank else ():
            if step.step_type not in TRANSFERS or step.micro_index is None:
                continue
            piece = step.micro_index, step.seq_index
            for key in keys(step):
                if rank not in (placement[key[0]], placement[key[1]]):
                    continue
                if step.step_type in (_T.FWD_RECV, _T.BWD_RECV):
                    received.append((key, piece))
                else:
                    result[key, piece], received = received, []
    return result


AnyChannel = Channel | MeshChannel


def pipeline_ranks(stages: Sequence[PipelineStage], group: Any) -> int:
    """Count the ranks of a pipeline, each of which may be several processes: Note [Stages of several ranks].

    Args:
        stages: of this process.
        group: all processes.

    Raises:
        ValueError: the group has no messages from a stage's device.
        NotImplementedError: shared weights on stages of several ranks.
    """
    processes, ranks = get_platform().groups.size(group), stages[0].stage_num // len(stages)
    for stage in stages if processes > 1 else ():
        get_platform().collectives.has_tags(group, stage.device)
    if ranks >= processes or any(stage.mesh is None for stage in stages):
        return processes
    if any(stage.shared_parameters for stage in stages):
        raise NotImplementedError(
            f"{processes} ranks run the {ranks} ranks of a pipeline; weights that its stages share must be on stages of"
            " one rank each: pass the group that joins the ranks of one place."
        )
    return ranks


def keys_of(pipeline: Pipeline, step: MetaStep) -> list[Key]:
    """List the channels of a send or receive."""
    stage, kind = step.stage_index, step.step_type
    assert stage is not None
    ahead = kind in (_T.FWD_SEND, _T.FWD_RECV)
    if kind in (_T.FWD_RECV, _T.BWD_SEND):
        return [(other, stage, ahead) for other in pipeline.remote(stage, pipeline.predecessors[stage])]
    return [(stage, other, ahead) for other in pipeline.remote(stage, pipeline.successors[stage])]


def message_counts(
    pipeline: Pipeline, steps: Sequence[MetaStep], channels: Mapping[Key, AnyChannel]
) -> Counter[AnyChannel]:
    """Count the messages that a rank's steps receive on each channel."""
    counts: Counter[AnyChannel] = Counter()
    for step in steps:
        if step.step_type in (_T.FWD_RECV, _T.BWD_RECV):
            counts.update(channels[key] for key in keys_of(pipeline, step))
    return counts


Facts = Mapping[int, tuple[bool, tuple[Any, ...]]]
"""By stage: its messages may differ; and the axes, place and placements of its mesh."""


def stage_facts(stages: Mapping[int, PipelineStage], *, several: bool) -> Facts:
    """Describe a rank's stages for the other ranks; ``several`` of them may run one stage."""
    one = ((1,), None), (0,), None
    return {
        index: (
            stage.dyn_shape,
            (axes_of(stage.mesh), place_of(stage.mesh), stage.placements) if several else one,
        )
        for index, stage in stages.items()
    }


def open_channels(
    pipeline: Pipeline, stages: Mapping[int, PipelineStage], ranks: Agreement, everyone: Sequence[Facts], *, ahead: bool
) -> dict[Key, AnyChannel]:
    """Open this rank's ends of the channels; all ranks call it at once.

    Args:
        pipeline: where stages are.
        stages: of this rank.
        ranks: all processes.
        everyone: the ``stage_facts`` of each.
        ahead: receive messages ahead, where the backend can.

    Raises:
        ValueError: ranks that are not those of the stages' meshes; on all ranks.
    """
    ends = _ends(pipeline, everyone)
    dynamic = {stage for own in everyone for stage, (dyn_shape, _) in own.items() if dyn_shape}
    pairs = sorted((a, b) for b, before in enumerate(pipeline.predecessors) for a in before)
    directions = (True, False) if pipeline.has_backward else (True,)
    placement = pipeline.placement
    keys = [(*pair, forth) for pair in pairs for forth in directions if placement[pair[0]] != placement[pair[1]]]
    # By channel the stages that send and receive, and for each two ranks of theirs a link.
    flows = [(source, target) if forth else (target, source) for source, target, forth in keys]
    routes = [(one.rank, other.rank) for a, b in flows for one in ends[a] for other in ends[b]]
    device = next(iter(stages.values())).device
    ways = iter(links(ranks.group, device, routes, ahead=ahead))
    channels: dict[Key, AnyChannel] = {}
    dead: dict[tuple[int, int], dict[Any, set[int]]] = {}
    for key, (a, b) in zip(keys, flows, strict=True):
        source, target, forth = key
        name = f"stage {source} -> stage {target}, {'forward' if forth else 'backward'}"
        parts = {}
        for one, other in [(one, other) for one in ends[a] for other in ends[b]]:
            link = next(ways)
            if link is not None:
                own = stages[a if a in stages else b]
                peer = other.rank if one.rank == ranks.rank else one.rank
                parts[peer] = Channel(name, link, own.device, bool(dynamic & {a, b}))
        if not parts:
            continue
        if len(ends[a]) == len(ends[b]) == 1:
            (channels[key],) = parts.values()
        else:
            lost = dead.setdefault((source, target), {})
            channels[key] = MeshChannel(name, ranks.rank, ends[a], ends[b], parts, lost)
    return channels


def _ends(pipeline: Pipeline, everyone: Sequence[Facts]) -> list[list[End]]:
    """List the ranks of each stage, in the order of their places."""
    result = []
    for stage in range(len(pipeline.placement)):
        ends = [End(rank, *own[stage][1]) for rank, own in enumerate(everyone) if stage in own]
        ends.sort(key=lambda end: end.place or ())
        count = 1
        for size in ends[0].axes[0] if ends else ():
            count *= size
        places = {end.place for end in ends}
        if len(places) != len(ends) or len(ends) != count or len({(end.axes, end.placements) for end in ends}) > 1:
            raise ValueError(
                f"stage {stage} is on the ranks {[end.rank for end in ends]} of the pipeline, with the meshes"
                f" {sorted({str(end.axes[0]) for end in ends})}: each rank of a stage's mesh runs the stage, with the"
                " same mesh and placements, and no other rank does."
            )
        result.append(ends)
    return result
