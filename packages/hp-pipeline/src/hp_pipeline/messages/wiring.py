"""Which channels a rank has, and which of them a step uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_pipeline.messages.channels import Channel
from hp_pipeline.messages.links import links
from hp_pipeline.messages.mesh_channel import End, MeshChannel
from hp_pipeline.orders.pipeline import Pipeline
from hp_pipeline.orders.steps import TRANSFERS, MetaStep, MetaStepType, Order
from hp_pipeline.running.agreement import Agreement
from hp_pipeline.stages.layouts import axes_of, place_of
from hp_pipeline.stages.stage import PipelineStage
from hp_platform import get_platform

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
