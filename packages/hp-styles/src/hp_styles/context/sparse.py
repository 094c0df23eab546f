"""Context parallelism of DeepSeek Sparse Attention: its indexer, its attention and the indexer's loss.

Note [Whole keys]
    A query may select any token before it, so neither an exchange of heads nor a ring fits. Queries stay sharded. Keys,
    which are small here (one head of the indexer, one latent for all heads), are gathered over the axis in the
    sequence's own order. Indices of tokens, including those that the indexer selects, are places in the full sequence
    on every rank. In backward, the gradients of the keys are summed over the ranks, and each rank gets its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hp_dtensor import DeviceMesh
from hp_styles import port
from hp_styles.base import ParallelStyle, check_mesh


@dataclass(kw_only=True, eq=False)
class SparseStyle(ParallelStyle):
    """Base of the styles here; see `DSASparseAttentionContextParallel` for the arguments.

    Attributes:
        sharded_heads: a DTensor's heads may be sharded over another axis.
    """

    query: str | int = "query"
    keys: Sequence[str | int] = ("key",)
    positions: str | None = "positions"
    seq_dim: int = 1
    load_balance: bool = False
    use_local_output: bool = False

    sharded_heads = False

    def __post_init__(self) -> None:
        what = type(self).__name__
        if isinstance(self.keys, str) or not self.keys:
            raise ValueError(f"{what}: keys are the names or positions of one or more inputs, got {self.keys!r}")
        self.keys = tuple(self.keys)
        named = [self.query, *self.keys, self.positions]
        if len(set(named)) < len(named):
            raise ValueError(f"{what}: query, keys and positions must be different inputs, got {named}")
        if self.seq_dim < 0:
            raise ValueError(
                f"{what}: seq_dim={self.seq_dim} counts from the end, but queries and keys may differ in their "
                "number of dims; count from the start"
            )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        check_mesh(device_mesh, type(self).__name__)
        port.context().attach_sparse(module, device_mesh, self)
        return module


@dataclass(kw_only=True, eq=False)
class DSASparseAttentionContextParallel(SparseStyle):
    """Sparse attention from this rank's part of the sequence to tokens selected from all of it.

    For any module whose inputs are queries, keys (the latent that serves as keys and values, values, rotary parts) and
    the selected tokens. The keys are gathered over the axis in one message before its forward; in backward their
    gradients are summed over the ranks in one reduce-scatter. All other tensors stay this rank's parts. The module runs
    on plain tensors with fewer queries than keys. It gets the queries' places in the full sequence, and the indices of
    selected tokens as places there, as `DSAIndexerContextParallel` returns them. Gradients are those of one device.

    Example:
        >>> class Attention(nn.Module):                              # alone: positions are 0, 1, 2, ...
        ...     def forward(self, query, key, value, selected, positions=None): ...
        >>> style = DSASparseAttentionContextParallel(keys=("key", "value"), load_balance=True)
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention.core": style})

    The caller shards tokens, positions and labels with ``context_parallel_shard`` and sums gradients, as for
    ``ContextParallel``.

    Args:
        query: the queries among the inputs of the module's forward: the name, or the position if it has no name.
            Outputs get its layout.
        keys: the inputs to gather, likewise; default ``("key",)``. A tensor that is passed twice, as key and value, is
            sent once.
        positions: the name of the argument that gets the queries' places in the full sequence, int64 of shape
            [queries], in place of the caller's; default ``"positions"``. None for a module that needs none, because a
            mask over all keys is among its inputs, or it attends to everything that was selected.
        seq_dim: the sequence's dim in the queries and keys, from the start; default 1 (0 for [tokens, heads, size]).
        load_balance: rank i holds chunks i and 2n - 1 - i of 2n, as in ``ContextParallel``; default False.
        use_local_output: return DTensors' local parts as plain tensors; default False, outputs are DTensors if
            the queries are.

    Raises:
        ValueError: arguments that forward does not have, or do not fit each other; ranks that do not ascend; (in
            forward) parts of unequal length, or layouts of DTensors that do not fit. Ranks compare their parts once
            per call of the module given to ``parallelize_module``, and all of them raise.
        TypeError: (in forward) a missing input, or one that is not a tensor; queries and keys of which some are
            DTensors.
        RuntimeError: a second context parallel style on a module; (in backward) second derivatives.
        NotImplementedError: on MindSpore; (in forward) under torch.compile.

    Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, section 2.1; gathered keys: Llama Team, "The Llama 3 Herd of
    Models", arXiv:2407.21783, section 3.3.2.
    """

    sharded_heads = True


@dataclass(kw_only=True, eq=False)
class DSAIndexerContextParallel(SparseStyle):
    """Indexer: scores the tokens of the full sequence for this rank's queries, and selects from them.

    For a module whose inputs are the indexer's queries, keys and the weights of its heads, and whose outputs (selected
    tokens, their scores) have the queries' sequence in ``seq_dim``. The keys are gathered; selected tokens are places
    in the full sequence. See `DSASparseAttentionContextParallel`.

    Example:
        >>> class Indexer(nn.Module):
        ...     def forward(self, query, key, weights, positions=None): ...
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention.indexer": DSAIndexerContextParallel()})

    Args:
        query, keys, positions, seq_dim, load_balance, use_local_output: see `DSASparseAttentionContextParallel`.

    Raises:
        ValueError: as there; and DTensors with heads sharded over another axis, since scores are a sum over heads.
        TypeError, RuntimeError, NotImplementedError: as there.

    Source: as there.
    """


@dataclass(kw_only=True, eq=False)
class DSAIndexerLossContextParallel(SparseStyle):
    """The loss that trains the indexer's scores towards the distribution of attention, over all tokens of the group.

    For a module whose inputs are attention's queries and keys and the indexer's, and whose output, alone or first of
    several, is the loss. The keys of both are gathered, in one message for those that need a gradient and one for those
    that do not. The loss is the same on all ranks, the mean or the sum over all tokens. With plain tensors each rank's
    gradients are those of its own tokens' loss, like those of the model's loss, and are averaged over the ranks with
    them (summed, if both losses are sums); with DTensors they are complete.

    Example:
        >>> class Loss(nn.Module):
        ...     def forward(self, query, key, query_index, key_index, weights, selected, positions=None): ...
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention.loss": DSAIndexerLossContextParallel()})

    Args:
        query: see `DSASparseAttentionContextParallel`.
        keys: likewise; default ``("key", "key_index")``.
        reduction: how the module reduces the loss over its tokens: ``"mean"``, over all of them, the default;
            ``"sum"``; or ``"none"``, where it has the queries' sequence in ``seq_dim`` and stays sharded.
        positions, seq_dim, load_balance, use_local_output: see `DSASparseAttentionContextParallel`.

    Raises:
        ValueError: as there, or an unknown reduction; and DTensors with heads sharded over another axis, since the
            distribution is a sum over heads.
        TypeError, RuntimeError, NotImplementedError: as there.

    Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, section 2.1.
    """

    keys: Sequence[str | int] = ("key", "key_index")
    reduction: Literal["mean", "sum", "none"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(
                f"{type(self).__name__}: reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}"
            )


@dataclass(kw_only=True, eq=False)
class EarlySparseStyle(SparseStyle):
    """Base of styles on a module that holds both the projections and the core."""

    core: str
    projections: Mapping[str | int, str]

    def __post_init__(self) -> None:
        super().__post_init__()
        what = type(self).__name__
        self.projections = dict(self.projections)
        others = [key for key in self.projections if key not in self.keys]
        if others or not self.projections:
            raise ValueError(
                f"{what}: projections must be for one or more of keys={self.keys}, got {list(self.projections)};"
                f" without any, use {what.removeprefix('Async')}"
            )


@dataclass(kw_only=True, eq=False)
class AsyncDSASparseAttentionContextParallel(DSASparseAttentionContextParallel, EarlySparseStyle):
    """DSASparseAttentionContextParallel whose keys are sent as soon as they have been projected.

    Apply it to the module that holds both the attention and the submodules that compute its keys. The gather of a key
    starts when the named submodule has run, overlaps with what the model computes next, and is awaited at attention. In
    backward, the sum of its gradients starts when attention has computed them, and is awaited before that submodule's
    backward. Each named submodule takes one message, and the other keys one together. Results are those of the
    synchronous form.

    Attention's key must be exactly the output of the named submodule, or a view of it that splits or joins the dims
    after the sequence; anything else is an error. In latent attention, the latent's norm can be named. A key that a
    function rotates is not the output of any submodule.

    Example:
        >>> style = AsyncDSASparseAttentionContextParallel(core="core", keys=("key", "key_rope"),
        ...                                                projections={"key": "latent_norm"})
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention": style})

    Args:
        core: the name of the submodule that computes attention, to which the other arguments apply.
        projections: for one or more of ``keys``, the name of the submodule whose output it is.
        query, keys, positions, seq_dim, load_balance, use_local_output: see `DSASparseAttentionContextParallel`.

    Raises:
        ValueError: as there; or a submodule that the module does not have; (in forward) DTensors whose queries are
            sharded over an axis over which the keys sent early are replicated.
        RuntimeError: as there; (in forward) attention runs before a named submodule, or twice, or its key is not that
            output.
        TypeError, NotImplementedError: as there.

    Source: as there.
    """


@dataclass(kw_only=True, eq=False)
class AsyncDSAIndexerContextParallel(DSAIndexerContextParallel, EarlySparseStyle):
    """DSAIndexerContextParallel whose keys are sent as soon as they have been projected.

    Example:
        >>> style = AsyncDSAIndexerContextParallel(core="indexer", projections={"key": "index_norm"})
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention": style})

    Args:
        core, projections: see `AsyncDSASparseAttentionContextParallel`.
        query, keys, positions, seq_dim, load_balance, use_local_output: see `DSASparseAttentionContextParallel`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `DSAIndexerContextParallel` and
            `AsyncDSASparseAttentionContextParallel`.

    Source: as there.
    """


@dataclass(kw_only=True, eq=False)
class AsyncDSAIndexerLossContextParallel(DSAIndexerLossContextParallel, EarlySparseStyle):
    """DSAIndexerLossContextParallel whose keys are sent as soon as they have been projected.

    Example:
        >>> style = AsyncDSAIndexerLossContextParallel(core="loss", projections={"key_index": "index_norm"})
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention": style})

    Args:
        core, projections: see `AsyncDSASparseAttentionContextParallel`.
        query, keys, reduction: see `DSAIndexerLossContextParallel`.
        positions, seq_dim, load_balance, use_local_output: see `DSASparseAttentionContextParallel`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `DSAIndexerLossContextParallel` and
            `AsyncDSASparseAttentionContextParallel`.

    Source: as there.
    """
