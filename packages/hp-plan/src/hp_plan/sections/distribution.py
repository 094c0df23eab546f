"""`[mesh]`, `[context]`, `[pipeline]`, `[fsdp]` and `[experts]`: ranks, and how they share a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hp_plan.reading.tables import at_least

# Outermost first: the innermost axis (tp) has neighbouring ranks. `ep` is none of them: see `MeshSection`.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class MeshSection:
    """Sizes of the mesh axes. An axis of size 1 is left out of the mesh.

    Attributes:
        dp_replicate: data parallel replicas, each a whole copy.
        dp_shard: data parallel ranks that share one copy (fully sharded).
        cp: context parallel.
        tp: tensor parallel.
        pp: pipeline stages.
        ep: expert parallel: over how many ranks experts are spread, of the `dp_shard * cp * tp` that share a copy of
            the model. It is a second view of those ranks (folding), so it adds none: the others of them,
            `dp_shard * cp * tp / ep`, share the experts of one rank.
    """

    dp_replicate: int = at_least(1, 1)
    dp_shard: int = at_least(1, 1)
    cp: int = at_least(1, 1)
    tp: int = at_least(1, 1)
    pp: int = at_least(1, 1)
    ep: int = at_least(1, 1)

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the device mesh, outermost first, and their sizes.

        Never empty: one rank is a `dp_shard` axis of size 1, and replicas always have a `dp_shard` axis inside.
        """
        sizes = {name: getattr(self, name) for name in AXES}
        axes = {name: size for name, size in sizes.items() if size > 1}
        if not axes or set(axes) == {"dp_replicate"} or ("dp_replicate" in axes and "dp_shard" not in axes):
            axes["dp_shard"] = sizes["dp_shard"]
        return {name: axes[name] for name in AXES if name in axes}

    @property
    def described(self) -> str:
        """The axes and their sizes for people, as `dp_shard 2 x tp 4`."""
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items())

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes over which parameters are sharded: those whose ranks have the same weights and other tokens."""
        return tuple(name for name in ("dp_shard", "cp") if name in self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs: the product of the axes."""
        return math.prod(self.axes.values())

    @property
    def sharing(self) -> int:
        """Number of ranks that share one copy of a stage's parameters; `ep` divides them."""
        return self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of parts that the global batch is split into."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis.

        >>> MeshSection(pp=2, dp_shard=2, tp=2).coordinate(6)
        {'pp': 1, 'dp_shard': 1, 'tp': 0}
        """
        places = {}
        for name, size in reversed(self.axes.items()):
            rank, places[name] = divmod(rank, size)
        return {name: places[name] for name in self.axes}


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
            than `1f1b` does, by the counted costs of the stages, and as if messages took no time.
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


@dataclass(frozen=True)
class ExpertsSection:
    """Experts over `ep`: how tokens come to them; see `hp_moe.ExpertParallel`.

    Attributes:
        combine: `fast` sends a token once to each rank that has any of its experts, and adds their results up there;
            `exact` once for each expert: the same bits wherever experts are.
        exchange: `all_to_all`, or for few ranks `all_gather`, which sends all tokens to all of them.
        capacity: tokens of each rank that an expert takes; the last beyond it are dropped, and warned of. Shapes are
            static then. None drops none.
        chunks: parts of a rank's tokens: one is computed while another travels.
        slots: replicas of hot experts that each rank has room for.
        every: steps after which replicas are chosen anew, or drops are told, by `hyper-parallel train`.
    """

    combine: Literal["fast", "exact"] = "fast"
    exchange: Literal["all_to_all", "all_gather"] = "all_to_all"
    capacity: int | None = at_least(1, None)
    chunks: int = at_least(1, 1)
    slots: int = at_least(0, 0)
    every: int = at_least(1, 50)
