"""Styles by name, as plans in files and transformers' `base_model_tp_plan` write them.

Named styles keep activations DTensors from one module to the next: code that names global sizes runs unchanged, and
gradients of replicated parameters are whole wherever they are used.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Placement, Replicate, Shard, StridedShard
from hp_styles.base import ParallelStyle
from hp_styles.tensor.regions import (
    ExpertsParallel,
    GatheredSequence,
    IdentityExpert,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    PlainRegion,
    PointwiseRegion,
    Reduced,
    Replicated,
    Untouched,
    WholeExperts,
)
from hp_styles.tensor.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

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


@dataclass(frozen=True)
class NamedStyle:
    """What a name of a style means, and where it may stand.

    Attributes:
        meaning: what it does to a module, in one clause.
        make: creates the style; one for each module.
        accepts: kinds of modules that it is for, as ``("linear",)``; empty: any.
        parameters: whether a key that names a parameter may have it.
        on_modules: whether a key that names a module may have it.
        weight: how the ranks have the weight.
        counterpart: name of the style for an Embedding where this one is for a Linear, or the other way round.
        scattered: name of the style whose output is scattered along the sequence instead of summed.
        overlapped: creates the style whose reduce-scatter goes on under its product.
    """

    meaning: str
    make: Callable[[], ParallelStyle]
    accepts: tuple[str, ...] = ()
    parameters: bool = False
    on_modules: bool = True
    weight: Placement = Replicate()
    counterpart: str | None = None
    scattered: str | None = None
    overlapped: Callable[[], ParallelStyle] | None = None


def _linear(meaning: str, weight: Placement, make: Callable[..., ParallelStyle], /, **options: Any) -> NamedStyle:
    return NamedStyle(meaning, make, ("linear",), weight=weight, **options)


def _embedding(meaning: str, weight: Placement, make: Callable[..., ParallelStyle], /, **options: Any) -> NamedStyle:
    return NamedStyle(meaning, make, ("embedding",), weight=weight, **options)


def _scattering(**arguments: Any) -> Callable[[], ParallelStyle]:
    return functools.partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=False, **arguments)


_AHEAD = {"async_tensor_parallel": "auto"}
_WHOLE = {"output_layouts": Replicate(), "use_local_output": False}
_SPLIT = {"input_layouts": Replicate()}
_split_columns = functools.partial(ColwiseParallel, output_layouts=Shard(-1), use_local_output=False)
_whole_columns = functools.partial(ColwiseParallel, **_WHOLE)
_whole_rows = functools.partial(RowwiseParallel, **_WHOLE)
_split_rows = functools.partial(RowwiseParallel, **_SPLIT, **_WHOLE)

STYLES: dict[str, NamedStyle] = {
    "colwise": _linear(
        "output features sharded, input replicated, output sharded",
        Shard(0),
        _split_columns,
        parameters=True,
        counterpart="embedding_colwise",
    ),
    "colwise_gather_output": _linear(
        "output features sharded, output gathered", Shard(0), _whole_columns, counterpart="embedding_colwise"
    ),
    "rowwise": _linear(
        "input features sharded, output summed over the ranks",
        Shard(1),
        _whole_rows,
        parameters=True,
        counterpart="embedding_rowwise",
        scattered="rowwise_scatter_output",
    ),
    "rowwise_split_input": _linear(
        "input features sharded, a replicated input is split first, output summed",
        Shard(1),
        _split_rows,
        counterpart="embedding_rowwise",
        scattered="rowwise_split_input_scatter_output",
    ),
    "rowwise_split_input_scatter_output": _linear(
        "as rowwise_split_input, output summed and scattered along the sequence",
        Shard(1),
        _scattering(**_SPLIT),
        counterpart="embedding_rowwise_scatter_output",
        overlapped=_scattering(**_SPLIT, **_AHEAD),
    ),
    "rowwise_scatter_output": _linear(
        "input features sharded, output summed and scattered along the sequence",
        Shard(1),
        _scattering(),
        counterpart="embedding_rowwise_scatter_output",
        overlapped=_scattering(**_AHEAD),
    ),
    "embedding_rowwise": _embedding(
        "vocabulary sharded, output summed",
        Shard(0),
        _split_rows,
        counterpart="rowwise",
        scattered="embedding_rowwise_scatter_output",
    ),
    "embedding_rowwise_scatter_output": _embedding(
        "vocabulary sharded, output summed and scattered along the sequence",
        Shard(0),
        _scattering(**_SPLIT),
        counterpart="rowwise_scatter_output",
    ),
    "embedding_colwise": _embedding(
        "embedding features sharded, output gathered", Shard(1), _whole_columns, counterpart="colwise"
    ),
    "sequence": NamedStyle(
        "runs on its part of the sequence, parameters replicated",
        functools.partial(SequenceParallel, use_local_output=False),
    ),
    "sequence_gather_output": NamedStyle(
        "runs on its part of the sequence, output gathered",
        functools.partial(GatheredSequence, use_local_output=False),
    ),
    "replicate": NamedStyle("the same on every rank", Replicated, parameters=True),
    "plain": NamedStyle("runs on whole plain tensors, the same on every rank", PlainRegion),
    "pointwise": NamedStyle("computes element by element, on its part of any input", PointwiseRegion),
    "packed_colwise": _linear(
        "output features of each of two matrices in one sharded",
        StridedShard(0, 2),
        PackedColwiseParallel,
        parameters=True,
        counterpart="embedding_colwise",
    ),
    "packed_rowwise": NamedStyle(
        "on a parameter: the last dim of each of two matrices in one sharded",
        PackedRowwiseParallel,
        parameters=True,
        on_modules=False,
    ),
    "moe_tp_experts": NamedStyle(
        "experts run on their part of the weights, output summed over the ranks", ExpertsParallel
    ),
    "grouped_gemm": NamedStyle("on a parameter: sharded by expert", WholeExperts, parameters=True, on_modules=False),
    "moe_identity_expert": NamedStyle(
        "an expert that returns its input, one of equal terms of the sum", IdentityExpert
    ),
    "all_reduce": NamedStyle("output summed, or gathered, on every rank", Reduced),
    "local_params": NamedStyle("computes with its own parameters as other keys have sharded them", Untouched),
}
"""The styles that a plan in a file may name."""


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
    style = STYLES.get(canonical(name))
    if style is None:
        near = difflib.get_close_matches(name, [*STYLES, *ALIASES], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(STYLES)}"
        raise ValueError(f"unknown style {name!r}; {hint}")
    return style.make()


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
        name = canonical(style)
        table[pattern] = (STYLES[name].scattered if name in STYLES else None) or name
    if embedding is not None:
        table.setdefault(embedding, "embedding_rowwise_scatter_output")
    for norm in norms:
        if table.setdefault(norm, "sequence_gather_output") != "sequence_gather_output":
            raise ValueError(f"sequence_parallel_plan: the norm {norm!r} is {table[norm]!r} in the plan; name it once")
    return table
