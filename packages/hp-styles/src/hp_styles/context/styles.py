"""Context parallelism: attention over a sequence that is sharded over the ranks of a mesh axis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor import DeviceMesh
from hp_styles import port
from hp_styles.checks import check_mesh
from hp_styles.context.plan import Settings
from hp_styles.rounds import Rounds
from hp_styles.styles import ParallelStyle

__all__ = [
    "AsyncContextParallel",
    "ContextParallel",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
]


class ContextParallel(ParallelStyle):
    """Attends over the whole of a sequence of which each rank of the mesh axis holds a part.

    Everything else in a transformer works on each token alone, so the model runs on its part as it is. Attention is
    found in one of two ways:

    - By default, as the calls of ``torch.nn.functional.scaled_dot_product_attention`` inside the module's forward (a
      transformers model with ``attn_implementation="sdpa"``, or a block of one's own). A forward without such a call is
      an error. Where it takes an ``attention_mask``, as transformers' attention modules do, causal masks, sliding
      windows, packed documents and padding are those of one device, from what all ranks say of their parts.
    - With ``qkv_indices`` or ``qkv_kwarg_names``, the module's inputs q, k and v. It runs on plain tensors with the
      full sequence and a part of the heads, and may compute what it likes with them (masks of the full sequence,
      biases), and its output, of the queries' dims or with the heads flattened into ``head_dim``, is brought back.
      Where the degree leaves a ring, the call of scaled_dot_product_attention inside is the ring's.

    Groups of ``ulysses_degree`` neighbours exchange their parts of the sequence for parts of the heads (one all-to-all
    for q, k and v, one for the output); keys and values go around the ``n / ulysses_degree`` groups in a ring, beside
    the computation. Nothing gathers the sequence. Gradients are those of one device.

    Example:
        >>> parallelize_module(model, mesh["cp"], {"layers.*.self_attn": ContextParallel(load_balance=True)})
        >>> batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "targets": targets}
        >>> part = context_parallel_shard(batch, mesh["cp"], load_balance=True)
        >>> logits = model(part["input_ids"], position_ids=part["position_ids"], use_cache=False)

    **What the caller sees to.** Whatever belongs to a token is sharded with ``context_parallel_shard`` with the same
    ``load_balance``, positions too; labels are shifted before they are sharded, since the next token may be on another
    rank. A loss that is a mean is over a rank's tokens. Parameters are replicated over the axis, and each rank's
    gradients are of its own tokens, so they have to be summed (averaged, where the loss is a mean): let ``fully_shard``
    do that over the flattened ``mesh["dp", "cp"]``; or distribute the parameters as ``Replicate()`` on the axis (the
    style ``"replicate"``) and pass DTensors placed ``Shard(1)``, which gives whole gradients in one collective, and the
    loss of all tokens; or all-reduce the gradients.

    Args:
        seq_dim: the sequence's dim in q, k, v where they are inputs; default 1. (scaled_dot_product_attention's is 2.)
        head_dim: the heads' dim there; default 2, the head size follows. (scaled_dot_product_attention's is 1.)
        ulysses_degree: ranks of a Ulysses group, a divisor of the axis's and of the query heads; default None, all; 1
            is a ring alone. Key/value heads are a multiple or a divisor of it: of fewer heads each rank gets the one
            that it needs.
        qkv_indices: positions of q, k and v among the module's inputs; default none.
        qkv_kwarg_names: their names, where they are passed by name; default none.
        load_balance: rank i holds chunks i and 2n - 1 - i of 2n, so that under a causal mask all work as long; default
            False, the i-th piece.
        use_local_output: return DTensors' local parts as plain tensors; default False: the output is of the kind that
            the input is.

    Raises:
        ValueError: arguments that do not fit the mesh, (in forward) the heads, the layouts, the lengths or the position
            ids. Parts are equally long. The ranks compare theirs once in a call of the module that
            ``parallelize_module`` was given, at its first attention; what one of them refuses there, all refuse.
        NotImplementedError: (in forward) another attention mask, a key/value cache that holds tokens, dropout,
            attention weights as output, nn.MultiheadAttention; on MindSpore.
        RuntimeError: a second such style on a module; (in forward) no call of scaled_dot_product_attention; (in
            backward) second derivatives of a ring.

    Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509; Liu et al., "Ring Attention", arXiv:2310.01889; the
    two combined: Fang and Zhao, "USP", arXiv:2405.07719; head and tail: Llama Team, "The Llama 3 Herd of Models",
    arXiv:2407.21783, section 3.3.2.
    """

    def __init__(
        self,
        *,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (),
        qkv_kwarg_names: Sequence[str] = (),
        load_balance: bool = False,
        use_local_output: bool = False,
    ) -> None:
        what = type(self).__name__
        if ulysses_degree is not None and ulysses_degree < 1:
            raise ValueError(f"{what}: ulysses_degree must be at least 1 or None, got {ulysses_degree}")
        for name, names in (("qkv_indices", qkv_indices), ("qkv_kwarg_names", qkv_kwarg_names)):
            if isinstance(names, str) or len(names) not in (0, 3):
                raise ValueError(f"{what}: {name} must have three entries, for q, k and v, or none; got {names!r}")
        if seq_dim == head_dim:
            raise ValueError(f"{what}: seq_dim and head_dim are both {seq_dim}")
        self.settings = Settings(
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            seq_dim=seq_dim,
            head_dim=head_dim,
            qkv_indices=tuple(qkv_indices),
            qkv_kwarg_names=tuple(qkv_kwarg_names),
            use_local_output=use_local_output,
        )
        self._rounds = Rounds()

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        check_mesh(device_mesh, type(self).__name__)
        port.context().attach(module, device_mesh, self.settings, self._rounds)
        return module

    def enclose(self, root: Any, device_mesh: DeviceMesh) -> None:
        """Let the ranks compare what they compute once per call of ``root``."""
        port.context().enclose(root, self._rounds, device_mesh, self.settings.load_balance)

    def __repr__(self) -> str:
        s = self.settings
        return (
            f"ContextParallel(seq_dim={s.seq_dim}, head_dim={s.head_dim}, ulysses_degree={s.ulysses_degree},"
            f" qkv_indices={s.qkv_indices}, qkv_kwarg_names={s.qkv_kwarg_names}, load_balance={s.load_balance},"
            f" use_local_output={s.use_local_output})"
        )


class AsyncContextParallel(ContextParallel):
    """ContextParallel whose Ulysses exchanges run beside the projections.

    For a module that holds the projections of q, k and v and calls scaled_dot_product_attention on what they give: the
    output of each is sent when it is there, beside the next projection, and awaited at attention; backward, the
    gradients of q, k and v are sent when attention has them, and awaited one by one, each before its projection's
    backward. Four all-to-alls forward, four backward; the results are those of ContextParallel.

    What attention reads has to be the very output of the module named, with its heads apart by ``view`` and
    ``transpose``; else it is an error. Where a projection's output is rotated or normed first, name the module that
    does that, or leave it out (None), and it is sent at attention: of a transformers Llama, ``v_proj`` alone can be
    named.

    Example:
        >>> style = AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=64)
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention": style})

    Args:
        q_proj: name of the submodule whose output is q; default None, q is sent at attention.
        k_proj, v_proj: likewise.
        head_size: elements of a head; needed for outputs of shape [batch, sequence, heads * head_size].
        seq_dim, head_dim: dims of outputs with 4 dims; defaults 1 and 2.
        ulysses_degree, load_balance, use_local_output: see ``ContextParallel``; a degree of 1 has nothing to send early
            and is refused.

    Raises:
        ValueError: no projection is named, or one that the module does not have; and as ``ContextParallel``.
        RuntimeError: (in forward) attention reads something else than the projections' outputs, or is called twice;
            (in backward) second derivatives are asked for.

    Source: as ``ContextParallel``; overlapped projections: LoongTrain, arXiv:2406.18485, section 5.
    """

    def __init__(
        self,
        *,
        q_proj: str | None = None,
        k_proj: str | None = None,
        v_proj: str | None = None,
        head_size: int | None = None,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        load_balance: bool = False,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(
            seq_dim=seq_dim,
            head_dim=head_dim,
            ulysses_degree=ulysses_degree,
            load_balance=load_balance,
            use_local_output=use_local_output,
        )
        named = {"q": q_proj, "k": k_proj, "v": v_proj}
        projections = {name: path for name, path in named.items() if path is not None}
        if not projections:
            raise ValueError(
                "AsyncContextParallel: name at least one of q_proj, k_proj, v_proj, or use ContextParallel"
            )
        self.settings = replace(self.settings, projections=projections, head_size=head_size)

    def __repr__(self) -> str:
        s = self.settings
        named = ", ".join(f"{name}_proj={path!r}" for name, path in s.projections.items())
        return (
            f"AsyncContextParallel({named}, head_size={s.head_size}, seq_dim={s.seq_dim}, head_dim={s.head_dim},"
            f" ulysses_degree={s.ulysses_degree}, load_balance={s.load_balance},"
            f" use_local_output={s.use_local_output})"
        )


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Any] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Any] | None = None,
) -> Iterator[None]:
    """Attend over a sharded sequence wherever attention is called inside the block, with torch's arguments.

    Every ``torch.nn.functional.scaled_dot_product_attention`` inside goes around the ring of the mesh, and the buffers
    are sharded, in place, as ``context_parallel_shard(load_balance=True)`` cuts. Backward belongs inside too, where
    layers are recomputed. A style on the modules, ``ContextParallel``, also computes windows, packed documents and
    padding.

    Example:
        >>> with context_parallel(mesh["cp"], buffers=[ids, labels, places], buffer_seq_dims=[1, 1, 1]):
        ...     F.cross_entropy(model(ids, places).flatten(0, 1), labels.flatten()).backward()

    Args:
        mesh: of one axis.
        buffers: full tensors, the same on every rank, that have the sequence; no parameters.
        buffer_seq_dims: the sequence's dim in each of them.
        no_restore_buffers: those of them that are not made whole again at the end.

    Raises:
        ValueError: not one dim a buffer, buffers that are not to be restored and are none, a length that does not
            divide into two chunks a rank, a mesh of several axes.
        NotImplementedError: on MindSpore.
    """
    check_mesh(mesh, "context_parallel")
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(given) != len(dims):
        raise ValueError(
            f"context_parallel: {len(given)} buffers, {len(dims)} buffer_seq_dims; pass one dim per buffer"
        )
    unrestored = {id(x) for x in no_restore_buffers or ()}
    if not unrestored <= {id(x) for x in given}:
        raise ValueError("context_parallel: no_restore_buffers has a tensor that is not in buffers")
    parts = [
        context_parallel_shard(x, mesh, seq_dim=dim, load_balance=True) for x, dim in zip(given, dims, strict=True)
    ]
    restored = [x for x in given if id(x) not in unrestored]
    with port.context().cut_in_place(given, parts, restored), port.context().attention_over(mesh):
        yield


def context_parallel_shard(
    tensors: Any, device_mesh: DeviceMesh, *, seq_dim: int = 1, load_balance: bool = False
) -> Any:
    """Return this rank's part of tensors that every rank holds in full.

    Example:
        >>> x = torch.arange(8)[None]                                             # on 2 ranks
        >>> context_parallel_shard(x, mesh["cp"], load_balance=True)              # on the first
        tensor([[0, 1, 6, 7]])

    Args:
        tensors: a tensor, or a dict, list or tuple of tensors.
        device_mesh: of one axis.
        seq_dim: the sequence's dim in each of them; default 1.
        load_balance: as the style's; default False.

    Returns:
        What was given, with this rank's parts.

    Raises:
        ValueError: the length does not divide over the ranks (with ``load_balance``: into two chunks a rank), or a mesh
            of several axes.
    """
    return _each(tensors, device_mesh, lambda x: port.context().shard(x, device_mesh, seq_dim, load_balance))


def context_parallel_unshard(
    tensors: Any, device_mesh: DeviceMesh, *, seq_dim: int = 1, load_balance: bool = False
) -> Any:
    """Gather the full tensors of which each rank holds the part that ``context_parallel_shard`` returned.

    Differentiable; all ranks have to use the result in the same way.

    Args:
        tensors: a tensor, or a dict, list or tuple of tensors: this rank's parts, such as logits.
        device_mesh: of one axis.
        seq_dim: the sequence's dim in each of them; default 1.
        load_balance: as the style's; default False.

    Returns:
        What was given, with full tensors in the sequence's own order.

    Raises:
        ValueError: a mesh of several axes.
    """
    return _each(tensors, device_mesh, lambda x: port.context().unshard(x, device_mesh, seq_dim, load_balance))


def _each(tensors: Any, mesh: DeviceMesh, do: Any) -> Any:
    check_mesh(mesh, "context parallelism")
    if mesh.ndim != 1:
        raise ValueError(
            f"context parallelism: a mesh of one axis is required, got axes {mesh.mesh_dim_names or mesh.shape};"
            " slice it, as in mesh['cp']"
        )
    if isinstance(tensors, Mapping):
        return {name: do(x) for name, x in tensors.items()}
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(do(x) for x in tensors)
    return do(tensors)
