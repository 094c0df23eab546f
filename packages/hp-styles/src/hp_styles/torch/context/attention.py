"""Attention over a context group, in the place of `torch.nn.functional.scaled_dot_product_attention`.

What a rank refuses it tells the others before anything is sent, with what it alone knows (the length of its plain
tensors, its position ids, its padding): `hp_styles.torch.context.agreement`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from hp_dtensor import DeviceMesh, DTensor
from hp_dtensor.torch.extend import backward
from hp_platform.torch.internals import without_all_torch_functions
from hp_styles.context.plan import kv_copies, split_degrees
from hp_styles.context.rounds import Rounds
from hp_styles.torch.context.agreement import AttentionAgreement, end_round, zeros_like_queries
from hp_styles.torch.context.call import Call, Seen
from hp_styles.torch.context.exchange import Exchange, SequenceGroup, Transfer, exchange, like
from hp_styles.torch.context.ring import Logits, Ring, no_autocast, ring_attention, whole_attention

T = torch.Tensor
_numbers = itertools.count()
_HEADS, _SEQUENCE = 1, 2  # of scaled_dot_product_attention's tensors


class ContextGroup(SequenceGroup):
    """The ranks that a sequence is sharded over, and how they compute attention.

    Args:
        mesh: of one axis.
        degrees: ranks of a Ulysses group, and of an inner ring; None is all.
        load_balance: each rank holds a chunk of the head and one of the tail.
        rounds: when the ranks compare what they compute; modules of one style share it.

    Raises:
        ValueError: a degree that does not divide the ranks, or these do not ascend along the axis.
    """

    def __init__(
        self, mesh: DeviceMesh, degrees: tuple[int | None, int | None], load_balance: bool, rounds: Rounds
    ) -> None:
        super().__init__(mesh, load_balance, "ContextParallel")
        self.rounds = rounds
        self.number = next(_numbers)
        self.degrees = split_degrees(self.size, *degrees)
        self.compared_degrees = self.degrees.ulysses, self.degrees.inner
        self._ulysses = self.subgroup(self.degrees.ulysses_ranks(self.place))
        self.ring = Ring(self.links(self.degrees, torch.empty_like), load_balance)

    def plan(self, head_dim: int, seq_dim: int) -> Exchange:
        """Plan the Ulysses exchange of tensors with these dims."""
        return Exchange(self._ulysses, self.degrees.ulysses, head_dim, seq_dim, self.load_balance)

    # ---- what is checked ----
    def local(self, x: T, name: str, head_dim: int, seq_dim: int) -> T:
        """Return this rank's part as a plain tensor; differentiable.

        Raises:
            ValueError: a DTensor of a layout that attention here is not for.
        """
        if not isinstance(x, DTensor):
            return x
        others = set(range(x.dim() - 1)) - {seq_dim}
        self.check_layout(x, name, seq_dim, others, f", or Shard of the batch or head dim ({head_dim})")
        return x.to_local()

    def locals(self, q: T, k: T, v: T, head_dim: int, seq_dim: int) -> tuple[T, T, T]:
        """Return this rank's parts as plain tensors.

        Raises:
            ValueError: DTensors in unequal layouts, unequal dtypes, or an odd length with ``load_balance``.
        """
        layouts = [x._spec.placements if isinstance(x, DTensor) else None for x in (q, k, v)]
        if any(layout != layouts[0] for layout in layouts):
            raise ValueError(
                f"ContextParallel: q, k and v are placed {', '.join(map(str, layouts))} (None is a plain tensor); "
                "they must have the same layout"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"ContextParallel: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have the same dtype")
        named = zip((q, k, v), "qkv", strict=True)
        q, k, v = (self.local(x, name, head_dim, seq_dim) for x, name in named)
        for x, name in ((q, "q"), (k, "k")):
            self.check_halves(x, name, seq_dim)
        return q, k, v

    def copies(self, heads: int | None, kv_heads: int | None) -> int:
        """Return how often each key and value head is sent; see `kv_copies`."""
        return kv_copies(heads, kv_heads, self.degrees.ulysses, self.size)

    # ---- what is computed ----
    def to_heads(
        self, tensors: tuple[T, T, T], arriving: Mapping[str, Transfer], head_dim: int, seq_dim: int
    ) -> list[T]:
        """Exchange q, k and v to longer sequences of fewer heads; those not yet on their way go in one exchange."""
        if self.degrees.ulysses == 1:
            return list(tensors)
        copies = self.copies(tensors[0].shape[head_dim], tensors[1].shape[head_dim])
        rest = {
            name: x if name == "q" or copies == 1 else x.repeat_interleave(copies, head_dim)
            for name, x in zip("qkv", tensors, strict=True)
            if name not in arriving
        }
        if rest:
            sent = exchange(self.plan(head_dim, seq_dim), *rest.values(), to_heads=True)
            rest = dict(zip(rest, sent, strict=True))
        return [rest[name] if name in rest else arriving[name].finish() for name in "qkv"]

    def to_sequence(self, out: T, head_dim: int, seq_dim: int) -> T:
        """Exchange back to all heads of this rank's part of the sequence."""
        if self.degrees.ulysses == 1:
            return out
        return exchange(self.plan(head_dim, seq_dim), out, to_heads=False)[0]

    def over_ring(self, q: T, k: T, v: T, seen: Seen, scale: float | None, cap: float | None = None) -> T:
        """Attention over the ring; over this rank's own keys where it has no other."""
        logits = Logits(q.shape[-1] ** -0.5 if scale is None else scale, cap)
        if self.degrees.ring > 1:
            return ring_attention(q, k, v, ring=self.ring, seen=seen, logits=logits)
        if cap is not None:
            return whole_attention(q, k, v, seen=seen, logits=logits)
        grouped, mask = q.shape[1] != k.shape[1], None if seen.is_plain else seen.whole(q.device)
        if grouped and (q.device.type != "cuda" or mask is not None):  # torch's own would hold the weights in memory
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            grouped = False
        causal = seen.causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def refuse(q: T, k: T, v: T, dropout_p: float, is_causal: bool, enable_gqa: bool) -> None:
    """Refuse arguments that attention over a sharded sequence does not support.

    Raises:
        NotImplementedError: dropout.
        ValueError: shapes that do not fit each other.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if dropout_p:
        raise NotImplementedError(
            f"ContextParallel: dropout_p={dropout_p}: a rank cannot draw the dropout mask of its part of the sequence"
            " as one device would; set attention's dropout to 0"
        )
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"ContextParallel: q, k and v must be [batch, heads, sequence, head size], v as long as k, got {shapes}"
        )
    broadcast = enable_gqa or k.shape[1] == 1  # one head of keys goes with all of queries anyway
    if q.shape[1] != k.shape[1] and (not broadcast or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"ContextParallel: fewer key than query heads need enable_gqa=True and a divisor of the query heads, got"
            f" {shapes}, enable_gqa={enable_gqa}"
        )
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"ContextParallel: is_causal=True needs as many keys as queries, got {shapes}; a key/value cache can't be"
            " used here"
        )


def refuse_mask(mask: T) -> None:
    """Refuse a mask.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"ContextParallel: an attn_mask of shape {tuple(mask.shape)}: with a sharded sequence no rank has all the keys"
        " that it covers. A module whose forward takes attention_mask and position_ids, as transformers' do, "
        "supports causal masks, sliding windows, packed documents and padding; elsewhere pass is_causal=True and"
        " no mask. A mask of the full sequence works if q, k and v are a module's inputs (qkv_indices=) and"
        " ulysses_degree is None"
    )


def _cast(*tensors: T) -> tuple[T, ...]:
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def attend(
    group: ContextGroup,
    agreement: AttentionAgreement,
    arriving: Mapping[str, Transfer],
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    cap: float | None = None,
) -> T:
    """Attention of this rank's queries over the keys of all ranks, of the kind and the layout of the queries.

    Args:
        group: the ranks.
        agreement: the comparison that comes first.
        arriving: of q, k and v those on their way to a part of the heads.
        query: this and what follows as `torch.nn.functional.scaled_dot_product_attention` takes it.
        key: keys.
        value: values.
        attn_mask: has to be None.
        dropout_p: has to be 0.
        is_causal: a query sees the keys up to its own place in the full sequence.
        scale: of the logits; None is 1 / sqrt(head size).
        enable_gqa: there may be fewer key than query heads.
        cap: what the scaled logits are capped at, softly.
    """
    tensors = _cast(query, key, value)

    def checked() -> tuple[T, ...]:
        refuse(query, key, value, dropout_p, is_causal, enable_gqa)
        if attn_mask is not None:
            refuse_mask(attn_mask)
        parts = group.locals(*tensors, _HEADS, _SEQUENCE)  # type: ignore[call-arg]
        agreement.call.refuse_other_keys(parts[0].shape[_SEQUENCE], parts[1].shape[_SEQUENCE])
        group.copies(parts[0].shape[_HEADS], parts[1].shape[_HEADS])
        return parts

    parts, seen = agreement.of(checked, tensors, is_causal)
    with without_all_torch_functions(), no_autocast(query.device.type):
        q, k, v = group.to_heads(parts, arriving, _HEADS, _SEQUENCE)
        out = group.to_sequence(group.over_ring(q, k, v, seen, scale, cap), _HEADS, _SEQUENCE)
    return like(out, query) if agreement.round.late is None else zeros_like_queries(query, value)


def attend_inside(
    group: ContextGroup, agreement: AttentionAgreement, query: T, key: T, value: T, *args: Any, **options: Any
) -> T:
    """Attention over the ring alone, of q, k and v that have been exchanged for a part of the heads already.

    Args:
        group: the ranks.
        agreement: the comparison.
        query: this and what follows as `attend` takes it.
        key: keys.
        value: values.
        args: the rest by position.
        options: the rest by name.
    """
    bound = inspect.signature(attend).bind(group, agreement, {}, query, key, value, *args, **options)
    bound.apply_defaults()
    arguments = bound.arguments
    agreement.round.followed.setdefault(group.mesh, group)
    try:
        refuse(query, key, value, arguments["dropout_p"], arguments["is_causal"], arguments["enable_gqa"])
        if arguments["attn_mask"] is not None:
            refuse_mask(arguments["attn_mask"])
    except NotImplementedError as error:  # of one rank, perhaps
        agreement.keep(error)
    q, k, v = _cast(query, key, value)
    q, k, v = group.locals(q, k, v, _HEADS, _SEQUENCE)
    with without_all_torch_functions(), no_autocast(query.device.type):
        seen = Seen(k.shape[_SEQUENCE] * group.degrees.ring, arguments["is_causal"], None, ())
        out = group.over_ring(q, k, v, seen, arguments["scale"])
    return like(out, query)


def capped_attention(
    query: T, key: T, value: T, *, cap: float | None, is_causal: bool, scale: float, dropout_p: float = 0.0
) -> T:
    """Attention with softly capped logits, for the modules with a context parallel style.

    Args:
        query: this and what follows as `torch.nn.functional.scaled_dot_product_attention` takes it.
        key: keys, of heads that divide the queries'.
        value: values.
        cap: of the scaled logits, ``cap * tanh(logits / cap)``; None caps nothing.
        is_causal: a query sees the keys up to its own place.
        scale: of the logits.
        dropout_p: has to be 0.

    Raises:
        RuntimeError: outside of such a module.
    """
    if has_torch_function((query, key, value)):
        options = {"cap": cap, "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p}
        return handle_torch_function(capped_attention, (query, key, value), query, key, value, **options)
    raise RuntimeError(
        "capped_attention: called outside of a module with the style ContextParallel, over several ranks"
    )


class _Ring(TorchFunctionMode):
    """A mode in which torch's attention is computed over a ring."""

    def __init__(self, group: ContextGroup, lengths: frozenset[int]) -> None:
        super().__init__()
        self.group, self.lengths = group, lengths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            rounds = self.group.rounds
            call = Call("context_parallel", lengths=self.lengths)
            agreement = AttentionAgreement(self.group, 0, rounds, self.group.compared_degrees, call, rounds.current)
            return attend(self.group, agreement, {}, *args, **(kwargs or {}))
        if func in (torch.Tensor.backward, torch.autograd.backward):  # layers that are recomputed need the mode as well
            end_round(self.group.rounds.current, self.group.rounds)
            with self:
                return backward(func, args, _renamed(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options of ``Tensor.backward`` to those of ``torch.autograd.backward``."""
    return {"grad_tensors" if name == "gradient" else name: value for name, value in options.items()}


@functools.lru_cache(maxsize=64)
def _rounds_over(mesh: DeviceMesh) -> Rounds:
    """Return the rounds of all blocks over a mesh; each after the first compares less."""
    return Rounds()


@contextlib.contextmanager
def attention_over(mesh: DeviceMesh, lengths: Iterable[int]) -> Iterator[None]:
    """Compute attention inside the block over the ring of a mesh, on parts of a head and a tail chunk.

    Args:
        mesh: of one axis.
        lengths: of this rank's parts of the buffers.
    """
    rounds = _rounds_over(mesh)
    group = ContextGroup(mesh, (1, None), True, rounds)
    rounds.enter(mesh)
    try:
        with _Ring(group, frozenset(lengths)):
            yield
        end_round(rounds.current, rounds)
    finally:
        rounds.leave(mesh)


@contextlib.contextmanager
def cut_in_place(
    buffers: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], restored: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let buffers hold their parts inside the block; at the end, restore those of ``restored``."""
    before = [(x, x.detach().clone()) for x in restored]
    _write(zip(buffers, parts, strict=True))
    try:
        yield
    finally:
        _write(before)


def _write(pairs: Any) -> None:
    with torch.no_grad():
        for x, value in pairs:
            x.resize_(value.shape)
            x.copy_(value)
