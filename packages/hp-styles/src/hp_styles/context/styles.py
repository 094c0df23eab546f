"""Context parallelism: attention over a sequence that is sharded over the ranks of a mesh axis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor import DeviceMesh
from hp_styles import port
from hp_styles.base import ParallelStyle, check_mesh
from hp_styles.context.plan import Settings
from hp_styles.context.rounds import Rounds


class ContextParallel(ParallelStyle):
    """Attention over a full sequence of which each rank of the mesh axis holds a part.

    Everything else in a transformer works on each token alone, so the model runs on its part unchanged. There are two
    ways to find attention:

    - By default, the style intercepts calls of ``torch.nn.functional.scaled_dot_product_attention`` inside the module's
      forward (of a transformers model with ``attn_implementation="sdpa"``, or a block of your own). A forward without
      such a call is an error. If it takes an ``attention_mask``, as transformers' attention modules do, causal masks,
      sliding windows, packed documents and padding give the results of one device; the ranks exchange what they need
      to know about each other's parts.
    - With ``qkv_indices`` or ``qkv_kwarg_names``, q, k and v are the module's inputs. The module runs on plain tensors
      with the full sequence and a part of the heads, and may use masks of the full sequence or biases. Its output has
      the queries' dims, or the heads flattened into ``head_dim``, and is redistributed to the input's layout. If the
      degree leaves a ring, the call of scaled_dot_product_attention inside is computed over the ring. This is the way
      on MindSpore, where around a ring attention is computed in the Cell's place.

    Groups of ``ulysses_degree`` neighbours exchange their parts of the sequence for parts of the heads (one all-to-all
    for q, k and v, one for the output). Keys and values travel around the ``n / ulysses_degree`` groups in a ring, and
    the transfers overlap with the computation. The sequence is never gathered. Gradients are those of one device.

    Example:
        >>> parallelize_module(model, mesh["cp"], {"layers.*.self_attn": ContextParallel(load_balance=True)})
        >>> batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "targets": targets}
        >>> part = context_parallel_shard(batch, mesh["cp"], load_balance=True)
        >>> logits = model(part["input_ids"], position_ids=part["position_ids"], use_cache=False)

    **The caller's part.** Shard everything that belongs to a token, including positions, with
    ``context_parallel_shard`` and the same ``load_balance``. Shift labels before you shard them, since the next token
    may be on another rank. A mean loss is over this rank's tokens. Parameters are replicated over the axis and each
    rank's gradients are those of its own tokens, so they must be summed (averaged, if the loss is a mean). Either let
    ``fully_shard`` do that over the flattened ``mesh["dp", "cp"]``; or distribute the parameters as ``Replicate()`` on
    the axis (the style ``"replicate"``) and pass DTensors placed ``Shard(1)``, which gives full gradients in one
    collective and the loss of all tokens; or all-reduce the gradients.

    Args:
        seq_dim: the sequence's dim in q, k, v if they are inputs; default 1. (scaled_dot_product_attention's is 2.)
        head_dim: the heads' dim there; default 2, the head size follows. (scaled_dot_product_attention's is 1.)
        ulysses_degree: ranks of a Ulysses group, a divisor of the axis's size and of the query heads; default None,
            all; 1 is a pure ring. Key/value heads must be a multiple or a divisor of it; if there are fewer heads, each
            rank gets the one that it needs.
        inner_ring_degree: ranks of an inner ring, a divisor of ``n / ulysses_degree``, as many as Ulysses groups of a
            host: keys come around it before they go on to the next, so that each rank sends to the next host once per
            inner ring, in the background; default None, one ring.
        qkv_indices: positions of q, k and v among the module's inputs; default none.
        qkv_kwarg_names: their names, if they are passed by name; default none.
        load_balance: rank i holds chunks i and 2n - 1 - i of 2n, so that under a causal mask all ranks have the same
            work; default False, the i-th of n pieces.
        use_local_output: return DTensors' local parts as plain tensors; default False, outputs are DTensors if the
            inputs are.

    Raises:
        ValueError: arguments that do not fit the mesh, (in forward) the heads, the layouts, the lengths or the position
            ids. Parts must have equal lengths. The ranks compare them once per call of the module given to
            ``parallelize_module``, at its first attention; an error on one of them is an error on all.
        NotImplementedError: (in forward) another attention mask, a key/value cache that holds tokens, dropout,
            attention weights as output, nn.MultiheadAttention. On MindSpore: q, k and v that are no inputs, and a ring
            around a Cell that does not say ``parallel_kind = "attention"``.
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
        inner_ring_degree: int | None = None,
        qkv_indices: Sequence[int] = (),
        qkv_kwarg_names: Sequence[str] = (),
        load_balance: bool = False,
        use_local_output: bool = False,
    ) -> None:
        what = type(self).__name__
        if ulysses_degree is not None and ulysses_degree < 1:
            raise ValueError(f"{what}: ulysses_degree must be at least 1 or None, got {ulysses_degree}")
        if inner_ring_degree is not None and inner_ring_degree < 1:
            raise ValueError(f"{what}: inner_ring_degree must be at least 1 or None, got {inner_ring_degree}")
        for name, names in (("qkv_indices", qkv_indices), ("qkv_kwarg_names", qkv_kwarg_names)):
            if isinstance(names, str) or len(names) not in (0, 3):
                raise ValueError(f"{what}: {name} must have three entries, for q, k and v, or none; got {names!r}")
        if seq_dim == head_dim:
            raise ValueError(f"{what}: seq_dim and head_dim are both {seq_dim}")
        self.settings = Settings(
            ulysses_degree=ulysses_degree,
            inner_ring_degree=inner_ring_degree,
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
            f" inner_ring_degree={s.inner_ring_degree}, qkv_indices={s.qkv_indices},"
            f" qkv_kwarg_names={s.qkv_kwarg_names}, load_balance={s.load_balance},"
            f" use_local_output={s.use_local_output})"
        )


class AsyncContextParallel(ContextParallel):
    """ContextParallel whose Ulysses exchanges overlap with the projections.

    For a module that holds the projections of q, k and v and calls scaled_dot_product_attention on their outputs. Each
    output is sent as soon as it is computed, while the next projection runs, and awaited at attention. In backward, the
    gradients of q, k and v are sent when attention has computed them, and awaited one by one, each before its
    projection's backward. There are four all-to-alls forward and four backward; results are those of ContextParallel.

    Attention must read exactly the output of the named module, with its heads split off by ``view`` and ``transpose``;
    anything else is an error. If a projection's output is rotated or normalised first, name the module that does so, or
    leave it out (None): it is then sent at attention. In a transformers Llama, only ``v_proj`` can be named.

    Example:
        >>> style = AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=64)
        >>> parallelize_module(model, mesh["cp"], {"layers.*.attention": style})

    Args:
        q_proj: name of the submodule whose output is q; default None, q is sent at attention.
        k_proj, v_proj: likewise.
        head_size: elements of a head; needed for outputs of shape [batch, sequence, heads * head_size].
        seq_dim, head_dim: dims of outputs with 4 dims; defaults 1 and 2.
        ulysses_degree, inner_ring_degree, load_balance, use_local_output: see ``ContextParallel``; a
            ``ulysses_degree`` of 1 is refused, since nothing can be sent early.

    Raises:
        ValueError: no projection is named, or the module lacks one; and as ``ContextParallel``.
        RuntimeError: (in forward) attention reads something other than the projections' outputs, or is called
            twice; (in backward) second derivatives.

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
        inner_ring_degree: int | None = None,
        load_balance: bool = False,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(
            seq_dim=seq_dim,
            head_dim=head_dim,
            ulysses_degree=ulysses_degree,
            inner_ring_degree=inner_ring_degree,
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
            f" ulysses_degree={s.ulysses_degree}, inner_ring_degree={s.inner_ring_degree},"
            f" load_balance={s.load_balance},"
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

    Every ``torch.nn.functional.scaled_dot_product_attention`` inside is computed over the ring of the mesh, and the
    buffers are sharded in place as by ``context_parallel_shard(load_balance=True)``. If layers are recomputed, run
    backward inside as well. The style ``ContextParallel`` also supports windows, packed documents and padding.

    Example:
        >>> with context_parallel(mesh["cp"], buffers=[ids, labels, places], buffer_seq_dims=[1, 1, 1]):
        ...     F.cross_entropy(model(ids, places).flatten(0, 1), labels.flatten()).backward()

    Args:
        mesh: of one axis.
        buffers: full tensors with a sequence dim, the same on every rank; not parameters.
        buffer_seq_dims: the sequence's dim in each of them.
        no_restore_buffers: those of them that stay sharded at the end.

    Raises:
        ValueError: the dims and buffers differ in number, a buffer not to restore is not among them, a length does not
            divide into two chunks per rank, or the mesh has several axes.
        NotImplementedError: on MindSpore.
    """
    check_mesh(mesh, "context_parallel")
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(tensors) != len(dims):
        raise ValueError(
            f"context_parallel: {len(tensors)} buffers, {len(dims)} buffer_seq_dims; pass one dim per buffer"
        )
    unrestored = {id(x) for x in no_restore_buffers or ()}
    if not unrestored <= {id(x) for x in tensors}:
        raise ValueError("context_parallel: no_restore_buffers has a tensor that is not in buffers")
    parts = [
        context_parallel_shard(x, mesh, seq_dim=dim, load_balance=True) for x, dim in zip(tensors, dims, strict=True)
    ]
    restored = [x for x in tensors if id(x) not in unrestored]
    lengths = [part.shape[dim] for part, dim in zip(parts, dims, strict=True)]
    with port.context().cut_in_place(tensors, parts, restored), port.context().attention_over(mesh, lengths):
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
        The same structure, with this rank's parts.

    Raises:
        ValueError: the length does not divide over the ranks (with ``load_balance``: into two chunks per rank), or the
            mesh has several axes.
    """
    return _each(tensors, device_mesh, lambda x: port.context().shard(x, device_mesh, seq_dim, load_balance))


def context_parallel_unshard(
    tensors: Any, device_mesh: DeviceMesh, *, seq_dim: int = 1, load_balance: bool = False
) -> Any:
    """Gather the full tensors of which each rank holds the part that ``context_parallel_shard`` returned.

    Differentiable; all ranks must use the result in the same way.

    Args:
        tensors: a tensor, or a dict, list or tuple of tensors: this rank's parts, such as logits.
        device_mesh: of one axis.
        seq_dim: the sequence's dim in each of them; default 1.
        load_balance: as the style's; default False.

    Returns:
        The same structure, with full tensors in the sequence's own order.

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
