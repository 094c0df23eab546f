"""`[context]`, `[pipeline]`, `[fsdp]`: how the ranks of an axis share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_plan.sections.bounds import at_least


@dataclass(frozen=True)
class ContextSection:
    """Attention over a sequence that is sharded over `cp`; see `hp_styles.ContextParallel`.

    Attributes:
        ulysses_degree: neighbouring ranks that exchange parts of the sequence for parts of the heads; keys and values
            go around the groups of them in a ring. None is all ranks, 1 a pure ring.
        inner_ring_degree: ranks of an inner ring, such as the groups of a host: keys and values come around it before
            they go on to the next. None is one ring.
        load_balance: each rank has a chunk of the sequence's head and one of its tail, so that under a causal mask all
            have the same work; false: one piece.
    """

    ulysses_degree: int | None = at_least(1, None)
    inner_ring_degree: int | None = at_least(1, None)
    load_balance: bool = True


@dataclass(frozen=True)
class PipelineSection:
    """Stages of the model on the ranks of `pp`, and their schedule.

    Attributes:
        schedule: order of the steps (see the table of hp-pipeline); `auto` looks for the fastest that holds no more
            than `1f1b` does, by the counted costs of the stages.
        micro_batches: into how many a rank's part of the batch is cut; none is one for each of its samples.
        split: blocks of each stage, from first to last; `auto` makes the slowest stage as fast as it can be by counted
            costs, `even` counts blocks.
        stages_per_rank: of `interleaved` and `looped-bfs`; none is 2. The other schedules have their own number.
    """

    schedule: Literal[
        "1f1b",
        "gpipe",
        "interleaved",
        "looped-bfs",
        "zb1p",
        "zb2p",
        "zbv",
        "v-half",
        "v-min",
        "dualpipev",
        "hanayo",
        "auto",
    ] = "1f1b"
    micro_batches: int | None = at_least(1, None)
    split: Literal["auto", "even"] | tuple[int, ...] = at_least(1, "auto")
    stages_per_rank: int | None = at_least(1, None)


@dataclass(frozen=True)
class FsdpSection:
    """Sharding of parameters over `dp_shard` and `cp`.

    Attributes:
        groups: patterns of modules whose parameters are gathered together; what no group holds belongs to the root.
            None are the blocks of the model's outermost lists; `[""]` is one group, the whole model.
        reshard_after_forward: free the gathered parameters after forward (true) or after backward (false). Or a number
            of neighbouring ranks that keep them sharded between them from forward to backward.
        offload: keep shards of parameters, gradients and optimizer states on the host, where the optimizer steps.
        param_dtype: compute in this dtype.
        reduce_dtype: reduce gradients in this dtype.
    """

    groups: tuple[str, ...] = ()
    reshard_after_forward: bool | int = at_least(1, True)
    offload: bool = False
    param_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
