"""The sections of a plan, each a frozen value that is checked by `hp_plan.schema`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_optim.extend import decayed

# Outermost first: the innermost axis (tp) has neighbouring ranks. `ep` is none of them: see `MeshSection`.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _at_least(minimum: float, default: Any) -> Any:
    return field(default=default, metadata={"minimum": minimum})


def _more_than(bound: float, default: Any) -> Any:
    return field(default=default, metadata={"above": bound})


def _within(minimum: float, below: float, default: Any) -> Any:
    return field(default=default, metadata={"minimum": minimum, "below": below})


def _each_within(minimum: float, below: float, default: Any) -> Any:
    return field(default=default, metadata={"minimum": minimum, "below": below})


@dataclass(frozen=True)
class ModelSection:
    """The model: a transformers configuration class, or a function of the user's.

    Attributes:
        config: name of a configuration class of transformers, such as `"Qwen3Config"`.
        task: what transformers builds from the configuration: a task, such as `"seq2seq-lm"`, `"masked-lm"` or
            `"image-text-to-text"`, or the name of a model class, such as `"CLIPModel"`; none means `"causal-lm"`.
        function: `"module:function"`; called with the overrides, returns an `nn.Module` whose `forward(input_ids,
            labels)`, or an `nn.Cell` whose `construct(input_ids, labels)`, returns a mapping with `loss`, as the models
            of transformers do.
        folder: where the function's module lies; none takes what Python finds, and the command line looks beside the
            plan's file as well.
        overrides: keyword arguments of either.
        weights: a safetensors file (or a folder with a model.safetensors) that the initial weights are read from, by
            name; none draws them from `run.seed`.
    """

    config: str | None = None
    task: str | None = None
    function: str | None = None
    folder: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None


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

    dp_replicate: int = _at_least(1, 1)
    dp_shard: int = _at_least(1, 1)
    cp: int = _at_least(1, 1)
    tp: int = _at_least(1, 1)
    pp: int = _at_least(1, 1)
    ep: int = _at_least(1, 1)

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

    ulysses_degree: int | None = _at_least(1, None)
    inner_ring_degree: int | None = _at_least(1, None)
    load_balance: bool = True


@dataclass(frozen=True)
class FsdpSection:
    """Sharding of parameters over `dp_shard` and `cp`.

    Attributes:
        groups: patterns of modules whose parameters are gathered together; what no group holds belongs to the root.
            None are the blocks of the model's outermost lists; `[""]` is one group, the whole model.
        reshard_after_forward: free the gathered parameters after forward (true) or after backward (false). A number,
            the size of a smaller group to keep them sharded over, is read and can't be applied yet.
        param_dtype: compute in this dtype.
        reduce_dtype: reduce gradients in this dtype.
    """

    groups: tuple[str, ...] = ()
    reshard_after_forward: bool | int = True
    param_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its constants.

    Attributes:
        name: `adamw`, `sgd`, `muon`, or `adamw8bit`: AdamW with states of eight bits.
        lr: the learning rate at the schedule's top.
        betas: AdamW's averaging of the gradient and of its square.
        eps: AdamW's divisor offset.
        weight_decay: decoupled for AdamW and Muon, added to the gradient for SGD.
        momentum: SGD's.
        muon: of `muon`, patterns of the parameters that Muon trains; AdamW trains the others. None means the hidden
            matrices: all but embeddings, output layers, norms and biases.
        muon_momentum: Muon's averaging of the gradient.
        no_decay: patterns of parameters without weight decay.
        swap_slices: of `adamw` and `muon`, keep states on the host, and bring them to the device in so many slices of a
            step; 0 keeps them on the device.
    """

    name: Literal["adamw", "sgd", "muon", "adamw8bit"] = "adamw"
    lr: float = _more_than(0.0, 1e-3)
    betas: tuple[float, float] = _each_within(0.0, 1.0, (0.9, 0.999))
    eps: float = _more_than(0.0, 1e-8)
    weight_decay: float = _at_least(0.0, 0.01)
    momentum: float = _at_least(0.0, 0.0)
    muon: tuple[str, ...] = ()
    muon_momentum: float = _within(0.0, 1.0, 0.95)
    no_decay: tuple[str, ...] = ()
    swap_slices: int = _at_least(0, 0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: up from 0 in `warmup_steps`, then by `kind` down to `final * lr`.

    Attributes:
        kind: `constant`, `linear`, `cosine` or `wsd`: warm up, stay, decay over the last `decay_steps`.
        warmup_steps: optimizer steps until the learning rate is the optimizer's.
        final: the last learning rate as a part of the optimizer's (no use for `constant`).
        decay_steps: of `wsd`; 0 is a tenth of the run.
        decay: of `wsd`, the shape: `linear`, `cosine`, `exponential` or `minus_sqrt`.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = _at_least(0, 0)
    final: float = _at_least(0.0, 0.0)
    decay_steps: int = _at_least(0, 0)
    decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"


@dataclass(frozen=True)
class DataSection:
    """Training data: text as bytes (a vocabulary of 256), or files of tokens.

    An epoch has each sample once, in an order that `run.seed` decides.

    Attributes:
        paths: text files or folders; none means the Python sources of the running interpreter's standard library. Or
            token files, `.bin` beside `.idx`, as `hyper-parallel data prepare` and Megatron write them.
        weights: of token files, each path's part of the samples, in any unit; none is by their tokens.
        packing: of token files, each sample holds whole documents, which don't see each other and of whose first token
            no loss is taken; false cuts samples from the tokens of all documents side by side.
        sequence_length: tokens of one sample.
        batch_size: samples of one step over all ranks.
        max_bytes: read no more than this of text as bytes.
    """

    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = _at_least(0.0, ())
    packing: bool = False
    sequence_length: int = _at_least(2, 128)
    batch_size: int = _at_least(1, 8)
    max_bytes: int = _at_least(1, 64_000_000)


@dataclass(frozen=True)
class RunSection:
    """One training run.

    Attributes:
        steps: optimizer steps.
        seed: of the weights and of the samples.
        dtype: of the weights.
        grad_clip: scale gradients down to this global norm; none leaves them alone.
        platform: the framework that the model is written for; none takes the one in use (see `get_platform`).
        checkpoint_every: save a checkpoint after so many steps; 0 saves at the end and when the run is stopped.
        keep: so many checkpoints, the newest.
        stop_within: seconds between SIGTERM and the end of a rank: enough for a step and a checkpoint.
    """

    steps: int = _at_least(1, 100)
    seed: int = _at_least(0, 0)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    grad_clip: float | None = _more_than(0.0, None)
    platform: Literal["torch", "mindspore"] | None = None
    checkpoint_every: int = _at_least(0, 0)
    keep: int = _at_least(1, 2)
    stop_within: float = _more_than(0.0, 25.0)


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
    micro_batches: int | None = _at_least(1, None)
    split: Literal["auto", "even"] | tuple[int, ...] = _at_least(1, "auto")
    stages_per_rank: int | None = _at_least(1, None)


@dataclass(frozen=True)
class MemorySection:
    """A rank's memory, and what it is made to fit.

    Attributes:
        budget: of a rank for its shard of weights, gradients and optimizer states, and for what backward needs of each
            block, such as `"20GiB"`; what of the latter does not fit is swapped or computed again, by a plan that the
            first step makes (`hp_offload.fit_memory`). None keeps everything.
        bandwidth: between device and host, bytes a second in each direction; 0 swaps nothing.
    """

    budget: str | None = None
    bandwidth: float = _at_least(0.0, 25e9)


def schedule_factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Return the factor of the learning rate at step `step` (from 0) of `steps`.

    >>> [schedule_factor(ScheduleSection("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.kind == "constant":
        return 1.0
    start = section.warmup_steps
    if section.kind == "wsd":
        start = max(start, steps - (section.decay_steps or max(1, steps // 10)))
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    falling = decayed(section.decay if section.kind == "wsd" else section.kind, progress)
    return section.final + (1.0 - section.final) * falling
