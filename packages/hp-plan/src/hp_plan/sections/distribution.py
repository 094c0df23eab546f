"""How ranks share a model and compute: `[mesh]`, `[communication]`, `[context]`, `[pipeline]`, `[fsdp]` and so on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

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
        ranks_per_host: consecutive ranks that share a host; none is not known. What `order = "auto"`, and the bytes
            between hosts that `lint` and `dryrun` tell, go by. Where ranks are in a run, they find out themselves.
        order: the axes from the outermost, whose neighbours are farthest apart, to the innermost; `pp` comes first,
            then those that are not named; `dp_shard` before `cp`. None is the usual one: `pp`, `dp_replicate`,
            `dp_shard`, `cp`, `tp`. `auto` is the one by which the fewest bytes go between hosts, by estimates of what
            each axis sends.
    """

    dp_replicate: int = at_least(1, 1)
    dp_shard: int = at_least(1, 1)
    cp: int = at_least(1, 1)
    tp: int = at_least(1, 1)
    pp: int = at_least(1, 1)
    ep: int = at_least(1, 1)
    ranks_per_host: int | None = at_least(1, None)
    order: Literal["auto"] | tuple[str, ...] = ()

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
        axes = self.axes
        for name in reversed(self.axis_order):
            rank, places[name] = divmod(rank, axes[name])
        return {name: places[name] for name in axes}

    def rank_grid(self) -> np.ndarray:
        """Return the ranks as an array with the axes of `axes`, in that order.

        >>> MeshSection(dp_shard=2, tp=2, order=("tp", "dp_shard")).rank_grid().tolist()
        [[0, 2], [1, 3]]

        Raises:
            RuntimeError: `order` is "auto", and was not chosen yet.
        """
        order, axes = self.axis_order, self.axes
        grid = np.arange(self.world_size).reshape([axes[name] for name in order])
        return grid.transpose([order.index(name) for name in axes])

    @property
    def axis_order(self) -> tuple[str, ...]:
        """The axes from the outermost to the innermost, as ranks are counted; RuntimeError where none was chosen."""
        if self.order == "auto":
            raise RuntimeError(
                '[mesh] order = "auto" was not chosen yet: train plan = hp_plan.order_axes(plan) in place of this plan.'
            )
        named = [name for name in self.order if name in self.axes]
        return tuple(sorted(self.axes, key=lambda name: (name != "pp", named.index(name) if name in named else -1)))


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
class PrecisionSection:
    """Products in eight bits, by torchao (`pip install 'torchao>=0.18,<0.19'`; PyTorch).

    Weights, gradients and optimizer states stay in the dtypes of `[run]` and `[fsdp]`; only what is multiplied is cast.

    Attributes:
        linear: the model's Linear layers multiply in this format: `float8-tensorwise` with one scale a tensor (e4m3,
            gradients e5m2), `float8-rowwise` with one for each row (e4m3, scales that are powers of two), `mxfp8` with
            one for each 32 elements of a row. None: in the dtype of the model.
        experts: the grouped products of experts multiply in this format: `float8-rowwise` with one scale for each row
            of tokens, and of an expert's weight, `mxfp8` with one for each 32 elements of it. None: in the dtype of the
            model.
        exclude: patterns of Linear layers and experts, or of modules around them, that stay in the dtype of the model.
            None: the output layer, and routers of experts. Attention and adapters stay in any case.
        all_gather: `float8` gathers the weights of these layers as the bytes that are multiplied, a quarter of
            float32's; with `float8-tensorwise`, whose scales are then reduced once a forward.
        kernels: `auto` multiplies by the device's products in eight bits, and is refused where it has none; `emulated`
            by products of the same numbers in float32, on any device, which is slow and the same on all.
    """

    linear: Literal["float8-tensorwise", "float8-rowwise", "mxfp8"] | None = None
    experts: Literal["float8-rowwise", "mxfp8"] | None = None
    exclude: tuple[str, ...] | None = None
    all_gather: Literal["float8"] | None = None
    kernels: Literal["auto", "emulated"] = "auto"

    @property
    def formats(self) -> dict[str, str]:
        """Return key -> format, of the keys that are given: `linear`, `experts`."""
        return {key: form for key in ("linear", "experts") if (form := getattr(self, key)) is not None}


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


@dataclass(frozen=True)
class CommunicationSection:
    """What collectives go through, how gradients travel between hosts, what goes on under products; see hp-onesided.

    Attributes:
        transport: `auto` goes through memory where ranks share a host, and through the backend elsewhere; `backend`
            always through the backend.
        wire: axis = dtype, `dp_replicate` alone: its gradients are sent as `bf16`, or as `int8` or `e4m3` in blocks
            of 128 with a scale, and summed in float32. Refused where its ranks share a host.
        async_tensor_parallel: `auto` lets the reduce-scatter of a layer's output along the sequence (`auto-sequence`,
            and the styles that scatter) go on under the layer's product, where `hp_onesided.choose` says that it can:
            on GPUs and NPUs, where it was never run; on CPUs it gains nothing, and nothing changes. `off` does one
            after the other.
    """

    transport: Literal["auto", "backend"] = "auto"
    wire: Mapping[str, str] = field(default_factory=dict)
    async_tensor_parallel: Literal["auto", "off"] = "off"
