"""Styles by name, as plans in files and transformers' `base_model_tp_plan` write them, and styles that only names make.

Named styles keep activations DTensors from one module to the next: code that names global sizes runs unchanged, and
gradients of replicated parameters are whole wherever they are used.

Note [Plain regions]
Inside such a module no operation is intercepted, so its code may do whatever torch can: loops over experts, kernels
that are not operations of a DTensor, writes through views. That is right where the layout of its result is known from
its inputs alone. A part whose parameters and inputs are the same on every rank computes the same everywhere, and so
does its backward. Experts whose inner features are sharded compute one term of a sum, and so do experts that are whole
and on one rank each: the inputs' gradients are terms of a sum as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard, StridedShard
from hp_styles import port
from hp_styles.base import ParallelStyle, claim
from hp_styles.inputs import on_input, on_output
from hp_styles.tensor.styles import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel


class PlainRegion(ParallelStyle):
    """A module that runs on full plain tensors, the same on every rank; its parameters are replicated.

    For parts that hold what no style shards, such as state spaces and short convolutions. See Note [Plain regions].
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        f.replicate(module, device_mesh, self.src_data_rank)
        claim(module, self)
        f.run_replicated(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "PlainRegion()"


class PointwiseRegion(ParallelStyle):
    """An elementwise module without parameters, which runs on this rank's part of its input.

    For activations that are an autograd function of their own. See Note [Plain regions].
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().run_pointwise(module)
        return module

    def __repr__(self) -> str:
        return "PointwiseRegion()"


class ExpertsParallel(ParallelStyle):
    """Experts that run on this rank's part of their weights, with results summed over the ranks.

    The module is called with the tokens ``[n, hidden]``, and the experts chosen for each and their weights
    ``[n, k]``. Its parameters are sharded by styles of their own, which name them: all inner features over the ranks,
    (``packed_colwise`` on ``gate_up_proj``, ``rowwise`` on ``down_proj``), or whole experts (``grouped_gemm``). A
    parameter called ``down_proj_bias``, which is added once to each expert's result, counts on one rank only.

    Raises:
        ValueError: experts that the ranks don't divide; inputs that are not tensors; a module that draws dropout.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().run_experts(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "ExpertsParallel()"


def runs_on_parts(module: Any) -> bool:
    """Return True if a module computes on local parts without a layout inside, as with ``ExpertsParallel``."""
    return getattr(module, "_parallel_style", None) == repr(ExpertsParallel())


class IdentityExpert(ParallelStyle):
    """An expert that returns its input, inside ``ExpertsParallel``: each rank's is one of equal terms of the sum."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        claim(module, self)
        port.modules().divide_inside(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return "IdentityExpert()"


class PackedColwiseParallel(ParallelStyle):
    """Column parallelism of a Linear that packs several matrices (gate and up): each rank has a shard of each.

    On a parameter ``[..., out, in]``, such as experts' ``gate_up_proj``, it shards the dim before the last.

    Args:
        count: number of matrices; default 2.

    Raises:
        NotImplementedError: applied to a module that is not Linear.
    """

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        f = port.modules()
        if f.kind(module) != "linear":
            raise NotImplementedError(
                f"PackedColwiseParallel shards Linear modules, got {f.described(module)}; name the Linear module, or"
                " the parameter, as in 'mlp.experts.gate_up_proj'"
            )
        cut = (StridedShard(0, self.count),)
        f.partition(module, device_mesh, {"weight": cut, "bias": cut}, self.src_data_rank)
        claim(module, self)
        on_input(module, device_mesh, Replicate(), Replicate())
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return StridedShard(max(ndim - 2, 0), self.count)

    def __repr__(self) -> str:
        return f"PackedColwiseParallel(count={self.count})"


class PackedRowwiseParallel(ParallelStyle):
    """Sharding of a parameter ``[..., in, out]`` that packs several matrices: each rank has a shard of each.

    Args:
        count: number of matrices; default 2.

    Raises:
        NotImplementedError: applied to a module.
    """

    def __init__(self, *, count: int = 2) -> None:
        self.count = count

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        raise NotImplementedError(
            f"PackedRowwiseParallel is for a parameter, got {port.modules().described(module)}; name the parameter, as"
            " in 'mlp.experts.gate_up_proj'"
        )

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Replicate() if name == "bias" else StridedShard(ndim - 1, self.count)

    def __repr__(self) -> str:
        return f"PackedRowwiseParallel(count={self.count})"


class WholeExperts(ParallelStyle):
    """Sharding of a parameter ``[experts, ...]`` by expert, for a module with ``ExpertsParallel``.

    Raises:
        NotImplementedError: applied to a module.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        raise NotImplementedError(
            f"WholeExperts is for a parameter, got {port.modules().described(module)}; name the parameter, as"
            " in 'mlp.experts.gate_up_proj'"
        )

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Shard(0)

    def __repr__(self) -> str:
        return "WholeExperts()"


class Reduced(ParallelStyle):
    """Replication of a module's output: summed if it is partial, gathered if it is sharded."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        on_output(module, device_mesh, Replicate(), False)
        return module


class Untouched(ParallelStyle):
    """A style that does nothing: the module computes with its parameters as other styles shard them."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return module


# What each name does to a module.
STYLES = {
    "colwise": "output features sharded, input replicated, output sharded",
    "colwise_gather_output": "output features sharded, output gathered",
    "rowwise": "input features sharded, output summed over the ranks",
    "rowwise_split_input": "input features sharded, a replicated input is split first, output summed",
    "rowwise_split_input_scatter_output": "as rowwise_split_input, output summed and scattered along the sequence",
    "rowwise_scatter_output": "input features sharded, output summed and scattered along the sequence",
    "embedding_rowwise": "vocabulary sharded, output summed",
    "embedding_rowwise_scatter_output": "vocabulary sharded, output summed and scattered along the sequence",
    "embedding_colwise": "embedding features sharded, output gathered",
    "sequence": "runs on its part of the sequence, parameters replicated",
    "sequence_gather_output": "runs on its part of the sequence, output gathered",
    "replicate": "the same on every rank",
    "plain": "runs on whole plain tensors, the same on every rank",
    "pointwise": "computes element by element, on its part of any input",
    "packed_colwise": "output features of each of two matrices in one sharded",
    "packed_rowwise": "on a parameter: the last dim of each of two matrices in one sharded",
    "moe_tp_experts": "experts run on their part of the weights, output summed over the ranks",
    "grouped_gemm": "on a parameter: sharded by expert",
    "moe_identity_expert": "an expert that returns its input, one of equal terms of the sum",
    "all_reduce": "output summed, or gathered, on every rank",
    "local_params": "computes with its own parameters as other keys have sharded them",
}

# The names that a key may have that names a parameter.
PARAMETER_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "grouped_gemm", "replicate")

# transformers' names that mean the same here. Gradients need no word of their own: they are right by construction.
ALIASES = {
    "replicated_with_grad_allreduce": "replicate",
    "mla_kv_a_proj": "replicate",
    "ep_router": "replicate",
    "ep_dispatch_experts": "moe_tp_experts",
    "sequence_parallel": "sequence",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}

_SCATTERED = {
    "rowwise": "rowwise_scatter_output",
    "rowwise_split_input": "rowwise_split_input_scatter_output",
    "embedding_rowwise": "embedding_rowwise_scatter_output",
}
SCATTERING = frozenset(_SCATTERED.values())
"""The styles whose output is scattered along the sequence."""


class _Replicated(ParallelStyle):
    """The parameters that the module itself holds are replicated, and a batch norm's statistics."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        port.modules().replicate_statistics(module, device_mesh, self.src_data_rank)
        port.modules().partition(module, device_mesh, {}, self.src_data_rank)
        return module

    def _parameter_placement(self, name: str, ndim: int) -> Placement:
        return Replicate()


class _GatheredSequence(SequenceParallel):
    """SequenceParallel whose output is gathered: once for all modules that read it."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        super().apply(module, device_mesh)
        gather = PrepareModuleOutput(
            output_layouts=self.sequence_sharding, desired_output_layouts=Replicate(), use_local_output=False
        )
        return gather.apply(module, device_mesh)


_SPLIT = {"output_layouts": Shard(-1), "use_local_output": False}
_WHOLE = {"output_layouts": Replicate(), "use_local_output": False}
_SEQUENCE = {"output_layouts": Shard(1), "use_local_output": False}

_MADE: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ColwiseParallel(**_SPLIT),
    "colwise_gather_output": lambda: ColwiseParallel(**_WHOLE),
    "rowwise": lambda: RowwiseParallel(**_WHOLE),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), **_WHOLE),
    "rowwise_split_input_scatter_output": lambda: RowwiseParallel(input_layouts=Replicate(), **_SEQUENCE),
    "rowwise_scatter_output": lambda: RowwiseParallel(**_SEQUENCE),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), **_WHOLE),
    "embedding_rowwise_scatter_output": lambda: RowwiseParallel(input_layouts=Replicate(), **_SEQUENCE),
    "embedding_colwise": lambda: ColwiseParallel(**_WHOLE),
    "sequence": lambda: SequenceParallel(use_local_output=False),
    "sequence_gather_output": lambda: _GatheredSequence(use_local_output=False),
    "replicate": _Replicated,
    "plain": PlainRegion,
    "pointwise": PointwiseRegion,
    "packed_colwise": PackedColwiseParallel,
    "packed_rowwise": PackedRowwiseParallel,
    "moe_tp_experts": ExpertsParallel,
    "grouped_gemm": WholeExperts,
    "moe_identity_expert": IdentityExpert,
    "all_reduce": Reduced,
    "local_params": Untouched,
}


OVERLAPPING: dict[str, Callable[[], ParallelStyle]] = {
    "rowwise_scatter_output": lambda: RowwiseParallel(**_SEQUENCE, async_tensor_parallel="auto"),
    "rowwise_split_input_scatter_output": lambda: RowwiseParallel(
        input_layouts=Replicate(), **_SEQUENCE, async_tensor_parallel="auto"
    ),
}
"""The styles of a Linear whose reduce-scatter may go on under its product."""


def overlapping(style: str) -> ParallelStyle:
    """Create the style of a name of `OVERLAPPING`, with ``async_tensor_parallel="auto"``."""
    return OVERLAPPING[style]()


def canonical(style: str) -> str:
    """Return the style's name here; an unknown name is returned unchanged."""
    return ALIASES.get(style, style)


def named_style(name: str) -> ParallelStyle:
    """Create the style of a name.

    Args:
        name: a key of ``STYLES`` or ``ALIASES``.

    Raises:
        ValueError: there is none of that name; near misses are listed.
    """
    make = _MADE.get(canonical(name))
    if make is None:
        near = difflib.get_close_matches(name, [*STYLES, *ALIASES], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(STYLES)}"
        raise ValueError(f"unknown style {name!r}; {hint}")
    return make()


def sequence_parallel_plan(
    tensor_parallel_plan: Mapping[str, str], *, norms: Iterable[str], embedding: str | None = None
) -> dict[str, str]:
    """Shard the activations of a tensor parallel plan along the sequence between the blocks' matrices.

    What would be summed is summed and scattered, norms run on their part of the sequence, and their output is gathered
    once for the matrices that follow. An all-reduce is a reduce-scatter and an all-gather, so the bytes moved are those
    of the plan that was given, and the norms' activations take a share of the memory.

    Example:
        >>> plan = sequence_parallel_plan(
        ...     {
        ...         "layers.*.attention.[qkv]": "colwise",
        ...         "layers.*.attention.o": "rowwise",
        ...         "layers.*.mlp.up": "colwise",
        ...         "layers.*.mlp.down": "rowwise",
        ...         "head": "colwise_gather_output",
        ...     },
        ...     norms=["layers.*.norm1", "layers.*.norm2", "norm"],
        ...     embedding="embed",
        ... )
        >>> plan["layers.*.mlp.down"], plan["norm"]
        ('rowwise_scatter_output', 'sequence_gather_output')

    Args:
        tensor_parallel_plan: name or pattern -> name of a style, as of a transformers model's ``base_model_tp_plan``.
        norms: names or patterns of the norms on the residual stream. What reads such a norm gets the full sequence.
        embedding: the token embedding, whose output is the residual stream; its vocabulary is sharded where the plan
            does not say otherwise. None: the model is called with activations that are sharded along the sequence.

    Returns:
        The plan for ``parallelize_module``; activations have the sequence in dim 1.

    Raises:
        TypeError: a style that is not a name.
        ValueError: a norm that the plan names already.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    table: dict[str, str] = {}
    for pattern, style in tensor_parallel_plan.items():
        if not isinstance(style, str):
            raise TypeError(
                f"sequence_parallel_plan: {pattern!r} must have the name of a style, such as 'colwise', got a"
                f" {type(style).__name__}"
            )
        table[pattern] = _SCATTERED.get(canonical(style), canonical(style))
    if embedding is not None:
        table.setdefault(embedding, "embedding_rowwise_scatter_output")
    for norm in norms:
        if table.setdefault(norm, "sequence_gather_output") != "sequence_gather_output":
            raise ValueError(f"sequence_parallel_plan: the norm {norm!r} is {table[norm]!r} in the plan; name it once")
    return table
