"""Styles by name, as plans in files and transformers' `base_model_tp_plan` write them.

Named styles keep activations DTensors from one module to the next: code that names global sizes runs unchanged, and
gradients of replicated parameters are whole wherever they are used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hp_dtensor import DeviceMesh, Placement, Replicate, Shard
from hp_styles import port
from hp_styles.base import ParallelStyle
from hp_styles.packed import PackedColwiseParallel, PackedRowwiseParallel, Reduced, Untouched, WholeExperts
from hp_styles.regions import ExpertsParallel, IdentityExpert, PlainRegion, PointwiseRegion
from hp_styles.styles import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel

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
