"""Context parallelism on MindSpore: a Cell whose q, k and v are parts of a sequence, Ulysses, and the ring.

MindSpore has no one attention whose calls could be intercepted. Ulysses runs the Cell as it is, on the whole sequence
and a part of the heads. Around a ring no rank has all keys, so attention is computed in the Cell's place: a Cell says
that it is attention by ``parallel_kind = "attention"``, as other Cells say what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import mindspore
import numpy as np
from mindspore import Tensor, _Function, mint, nn, ops

from hp_dtensor import DeviceMesh, Replicate, Shard
from hp_dtensor.mindspore.extend import DTensor
from hp_platform import get_platform
from hp_platform.extend import share_numbers
from hp_styles.context.plan import (
    Block,
    ContextRanks,
    Links,
    Settings,
    UlyssesAxes,
    chunk_order,
    chunks_of,
    come_around,
    divided,
    kv_copies,
    return_gradients,
    ring_blocks,
    split_degrees,
)
from hp_styles.context.rounds import ERRORS, Header, Part, Rounds, check_alike, error_number
from hp_styles.inputs import check_output, find_input, with_inputs


def shard(whole: Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> Tensor:
    """Return this rank's part of a tensor that every rank holds in full."""
    size, dim = mesh.size(), seq_dim % whole.ndim
    width = divided(whole.shape[dim], size, load_balance, whole.shape, dim)
    order = chunks_of(mesh.get_local_rank(), size, load_balance)
    return mint.cat([mint.narrow(whole, dim, chunk * width, width) for chunk in order], dim)


def unshard(local: Tensor, mesh: DeviceMesh, seq_dim: int, load_balance: bool) -> Tensor:
    """Gather the full tensor, in the sequence's own order."""
    size, dim = mesh.size(), seq_dim % local.ndim
    gathered = DTensor.from_local(local, mesh, [Shard(dim)]).redistribute(placements=[Replicate()]).to_local()
    if not load_balance:
        return gathered
    order, width = chunk_order(size, load_balance), gathered.shape[dim] // (2 * size)
    chunks = [mint.narrow(gathered, dim, order.index(chunk) * width, width) for chunk in range(2 * size)]
    return mint.cat(chunks, dim)


def repeated(x: Tensor, times: int, dim: int) -> Tensor:
    """Return each head so many times, one after the other; MindSpore's own has no kernel on the CPU."""
    if times == 1:
        return x
    shape = (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :])
    return ops.stack([x] * times, dim + 1).reshape(shape)


class Exchange(UlyssesAxes):
    """An exchange of heads for parts of the sequence, on this framework's tensors."""

    def run(self, x: Tensor, *, to_heads: bool) -> Tensor:
        """Exchange a tensor, outside of differentiation."""
        front = mint.permute(x, self._front(x.ndim))  # [heads, sequence, ...]
        if to_heads:
            sent = front.reshape(self.size, front.shape[0] // self.size, *front.shape[1:])
            pieces = self._sent(sent)  # [rank, heads, its part of the sequence, ...]
            result = self._in_order(mint.cat([pieces[rank] for rank in range(self.size)], 1), back=False)
        else:
            ordered = self._in_order(front, back=True)
            width = ordered.shape[1] // self.size
            parts = [mint.narrow(ordered, 1, rank * width, width) for rank in range(self.size)]
            pieces = self._sent(ops.stack(parts, 0))
            result = pieces.reshape(pieces.shape[0] * pieces.shape[1], *pieces.shape[2:])
        return mint.permute(result, self._back(x.ndim))

    def _sent(self, pieces: Tensor) -> Tensor:
        flat = pieces.contiguous().reshape(-1)
        received: Any = ops.zeros_like(flat)
        counts = [flat.shape[0] // self.size] * self.size
        get_platform().collectives.all_to_all(received, flat, counts, counts, group=self.group)
        return received.reshape(pieces.shape)

    def _in_order(self, x: Tensor, *, back: bool) -> Tensor:
        """Put chunks of the sequence, dim 1, in its own order; ``back`` into the order of the ranks that hold them."""
        if not self.load_balance:
            return x
        order, width = chunk_order(self.size, True), x.shape[1] // (2 * self.size)
        places = order if back else [order.index(chunk) for chunk in range(2 * self.size)]
        return mint.cat([mint.narrow(x, 1, place * width, width) for place in places], 1)

    def _front(self, ndim: int) -> tuple[int, ...]:
        moved = (self.head_dim, self.seq_dim)
        return (*moved, *(dim for dim in range(ndim) if dim not in moved))

    def _back(self, ndim: int) -> tuple[int, ...]:
        front = self._front(ndim)
        return tuple(front.index(dim) for dim in range(ndim))


class _Exchange(_Function):
    """An all-to-all forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Exchange, to_heads: bool) -> Tensor:
        ctx.plan, ctx.to_heads = plan, to_heads
        return plan.run(x, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.plan.run(grad, to_heads=not ctx.to_heads), None, None


def exchange(plan: Exchange, x: Tensor, *, to_heads: bool) -> Tensor:
    """Exchange a tensor; differentiable.

    Args:
        plan: between which ranks, on which dims.
        x: its heads (``to_heads``) or its sequence divide over the ranks.
        to_heads: from a piece of the sequence to a part of the heads; else back.
    """
    return x if plan.size == 1 else _Exchange.apply(x, plan, to_heads)


_HALF = (mindspore.float16, mindspore.bfloat16)


def _wide(x: Tensor) -> Tensor:
    return x.astype(mindspore.float32) if x.dtype in _HALF else x


def _part(x: Tensor, which: str) -> Tensor:
    """Return all of a sequence, dim 2, its head or its tail."""
    if which == "all":
        return x
    half = x.shape[2] // 2
    return mint.narrow(x, 2, 0 if which == "head" else half, half)


def _whole(part: Tensor, which: str) -> Tensor:
    """Return a part with zeros in place of the rest of the sequence."""
    if which == "all":
        return part
    zeros = ops.zeros_like(part)
    return mint.cat([part, zeros] if which == "head" else [zeros, part], 2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = mint.matmul(q, mint.transpose(k, 2, 3)) * scale
    if not causal:
        return scores
    hidden = Tensor(np.triu(np.ones(scores.shape[2:], dtype=np.bool_), 1))
    return mint.where(hidden, Tensor(float("-inf"), scores.dtype), scores)


def _normaliser(scores: Tensor) -> Tensor:
    largest = mint.max(scores, -1, True)[0]
    return largest + mint.log(mint.sum(mint.exp(scores - largest), -1, True))


class _Pair:
    """Keys and values, or their gradients, in one buffer."""

    def __init__(self, k: Tensor, v: Tensor, heads: int) -> None:
        self.flat = mint.cat([k.reshape(-1), v.reshape(-1)])
        self._shapes, self._copies = (k.shape, v.shape), heads // k.shape[1]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return keys and values."""
        first = int(np.prod(self._shapes[0]))
        parts = flat[:first], flat[first:]
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def shared(self, flat: Tensor, which: str) -> list[Tensor]:
        """Return a part of keys and values, each head once for every query head that shares it."""
        parts = [_part(x, which) for x in self.split(flat)]
        return [repeated(x, self._copies, 1) for x in parts]

    def joined(self, gradients: Sequence[Tensor], which: str) -> Tensor:
        """Return the buffer of a part's gradients, summed over the query heads that share one."""
        flat = []
        for part, shape in zip(gradients, self._shapes, strict=True):
            own = _whole(part, which)
            if self._copies > 1:
                own = mint.sum(own.reshape(shape[0], shape[1], self._copies, *shape[2:]), 2)
            flat.append(own.reshape(-1))
        return mint.cat(flat)


class _Sum:
    """Attention over the keys seen so far: parts are merged by their normalisers."""

    def __init__(self) -> None:
        self.out: Any = None
        self.lse: Any = None

    def add(self, out: Tensor, lse: Tensor, queries: str) -> None:
        """Merge the attention of some queries."""
        if self.out is None:
            self.out, self.lse = out, lse
            return
        sofar = _part(self.lse, queries)
        both = mint.maximum(sofar, lse) + mint.log1p(mint.exp(-mint.abs(sofar - lse)))
        merged = _part(self.out, queries) * mint.exp(sofar - both) + out * mint.exp(lse - both)
        if queries == "all":
            self.out, self.lse = merged, both
        else:
            self.out = mint.cat([_part(self.out, "head"), merged], 2)
            self.lse = mint.cat([_part(self.lse, "head"), both], 2)


class _RingAttention(_Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, links: Links, blocks: Sequence[Block | None], scale: float
    ) -> Tensor:
        pair, total, wide = _Pair(k, v, q.shape[1]), _Sum(), _wide(q)

        def see(block: Block, flat: Tensor) -> None:
            keys, values = map(_wide, pair.shared(flat, block.keys))
            scores = _scores(_part(wide, block.queries), keys, block.causal, scale)
            lse = _normaliser(scores)
            total.add(mint.matmul(mint.exp(scores - lse), values), lse, block.queries)

        come_around(links, blocks, pair.flat, see)
        ctx.save_for_backward(q, k, v, total.out, total.lse)
        ctx.links, ctx.blocks, ctx.scale = links, blocks, scale
        return total.out.astype(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        pair, scale, wide = _Pair(k, v, q.shape[1]), ctx.scale, _wide(q)
        grad = _wide(grad)
        inner = mint.sum(grad * out, -1, True)
        to_queries: list[Any] = [ops.zeros_like(wide)]

        def compute(block: Block, flat: Tensor) -> tuple[Tensor, Tensor]:
            queries, own, normaliser, mean = (_part(x, block.queries) for x in (wide, grad, lse, inner))
            keys, values = map(_wide, pair.shared(flat, block.keys))
            weights = mint.exp(_scores(queries, keys, block.causal, scale) - normaliser)
            slopes = weights * (mint.matmul(own, mint.transpose(values, 2, 3)) - mean) * scale
            to_queries[0] = to_queries[0] + _whole(mint.matmul(slopes, keys), block.queries)
            return mint.matmul(mint.transpose(slopes, 2, 3), queries), mint.matmul(mint.transpose(weights, 2, 3), own)

        def add(gradients: Tensor, block: Block, own: tuple[Tensor, Tensor]) -> Tensor:
            return gradients + pair.joined(own, block.keys)

        zeros = ops.zeros_like(_wide(pair.flat))
        dk, dv = pair.split(return_gradients(ctx.links, ctx.blocks, pair.flat, zeros, compute, add))
        return to_queries[0].astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, links: Links, blocks: Sequence[Block | None], scale: float
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of a ring.

    Args:
        q: [batch, heads, this rank's part of the sequence, head size].
        k: keys, of heads that divide the queries'.
        v: values, as the keys; their head size may be another.
        links: of the ring.
        blocks: what this rank computes, one per step.
        scale: of the logits.
    """
    return _RingAttention.apply(q, k, v, links, blocks, scale)


def attach(module: nn.Cell, mesh: DeviceMesh, settings: Settings, rounds: Rounds) -> None:
    """Let a Cell's attention see the keys of all ranks.

    Raises:
        NotImplementedError: q, k and v are no inputs, projections are to be sent early, or a ring around a Cell that
            does not say that it is attention.
        RuntimeError: the Cell has such a style already.
        ValueError: a degree or an order of ranks that does not fit.
    """
    name = type(module).__name__
    if settings.projections or not settings.takes_qkv:
        raise NotImplementedError(
            f"ContextParallel on the Cell {name}: MindSpore's attention is not intercepted; apply the style to a Cell"
            " that is passed q, k and v, and name them (qkv_indices= or qkv_kwarg_names=)"
        )
    if getattr(module, "_context_parallel", False):
        raise RuntimeError(f"ContextParallel: {name} already has a context parallel style; apply only one")
    attention = _Attention(module, mesh, settings)
    if attention.degrees.ring > 1 and getattr(module, "parallel_kind", None) != "attention":
        raise NotImplementedError(
            f"ContextParallel on the Cell {name}: around a ring of {attention.degrees.ring} ranks attention is computed"
            " in the Cell's place. Set parallel_kind = 'attention' on a Cell that computes softmax(q k^T scale) v (with"
            " attributes is_causal and, if it is not 1 / sqrt(head size), scale), or take ulysses_degree=None"
        )
    module._context_parallel = True
    module.construct = attention.construct  # around what may be put on the Cell already


def enclose(root: nn.Cell, rounds: Rounds, mesh: DeviceMesh, load_balance: bool) -> None:
    """Do nothing: each Cell's call compares what the ranks compute."""


class _Attention:
    """The construct of a Cell over a context group."""

    def __init__(self, module: nn.Cell, mesh: DeviceMesh, settings: Settings) -> None:
        self._module, self._settings = module, settings
        self._original = vars(module).get("construct") or type(module).construct.__get__(module)
        self._ranks = ContextRanks(mesh, settings.load_balance, "ContextParallel")
        self.degrees = split_degrees(self._ranks.size, settings.ulysses_degree, settings.inner_ring_degree)
        self._ulysses = self._ranks.subgroup(self.degrees.ulysses_ranks(self._ranks.place))
        self._links = self._ranks.links(self.degrees, ops.zeros_like)
        self._causal = bool(getattr(module, "is_causal", False))

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Cell on q, k and v of the whole sequence, or attention around the ring."""
        inputs = [find_input(self._module, args, kwargs, self._settings, which) for which in range(3)]
        places, qkv = [place for place, _ in inputs], [x for _, x in inputs]
        head, seq = (dim % qkv[0].ndim for dim in (self._settings.head_dim, self._settings.seq_dim))
        self._compare(qkv, places, args, kwargs, head, seq)
        q, k, v = qkv
        copies = kv_copies(q.shape[head], k.shape[head], self.degrees.ulysses, self._ranks.size)
        k, v = (repeated(x, copies, head) for x in (k, v))
        plan = Exchange(self._ulysses, self.degrees.ulysses, head, seq, self._settings.load_balance)
        q, k, v = (exchange(plan, x, to_heads=True) for x in (q, k, v))
        if self.degrees.ring > 1:
            out = self._around(q, k, v, head, seq)
        else:
            args, kwargs = with_inputs(args, kwargs, places, (q, k, v))
            out = self._original(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise NotImplementedError(
                f"ContextParallel on the Cell {type(self._module).__name__}: the output must be a tensor, got"
                f" {type(out).__name__}; attention weights are not redistributed"
            )
        check_output(self._module, tuple(out.shape), q.shape[head], q.shape[seq], head, seq)
        return exchange(plan, out, to_heads=False)

    def _around(self, q: Tensor, k: Tensor, v: Tensor, head: int, seq: int) -> Tensor:
        links, balance = self._links, self._settings.load_balance
        sizes = {"causal": self._causal, "load_balance": balance, "inner": self.degrees.inner}
        blocks = ring_blocks(self.degrees.ring, links.rank, **sizes)
        (batch,) = set(range(4)) - {head, seq, 3}
        order = batch, head, seq, 3
        q, k, v = (mint.permute(x, order) for x in (q, k, v))
        scale = getattr(self._module, "scale", None)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        out = ring_attention(q, k, v, links=links, blocks=blocks, scale=scale)
        return mint.permute(out, tuple(order.index(dim) for dim in range(4)))

    def _compare(
        self, qkv: list[Tensor], places: list[int | str], args: Any, kwargs: dict[str, Any], head: int, seq: int
    ) -> None:
        """Refuse what any rank refuses, and ranks whose parts differ, before anything is sent."""
        fault = None
        try:
            self._check(qkv, head, seq)
            if self.degrees.ring > 1:
                self._refuse_others(places, args, kwargs)
        except ERRORS as error:
            fault = error
        if self._ranks.size == 1:
            if fault is not None:
                raise fault
            return
        shapes = tuple(tuple(x.shape) for x in qkv)
        degrees = self.degrees.ulysses, self.degrees.inner
        balance, part = self._settings.load_balance, Part(positioned=False)
        header = Header(shapes, self._causal, None, balance, degrees, part, error_number(fault)).numbers()
        messages = share_numbers(header, self._ranks.mesh.get_group())
        check_alike([Header.read(each) for each in messages], self._ranks.ranks, fault)

    def _refuse_others(self, places: list[int | str], args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse what attention in the Cell's place would leave out: a mask, a dropout."""
        inputs = {**dict(enumerate(args)), **kwargs}
        others = [place for place, value in inputs.items() if place not in places and value is not None]
        drops = [name for name, cell in self._module.cells_and_names() if _drops(cell)]
        if others or drops:
            what = f"the inputs {others}" if others else f"the dropout of {', '.join(drops)}"
            raise NotImplementedError(
                f"ContextParallel on the Cell {type(self._module).__name__}: around a ring of {self.degrees.ring} ranks"
                f" attention is computed in the Cell's place, without {what}: leave that out, or take"
                " ulysses_degree=None"
            )

    def _check(self, qkv: list[Tensor], head: int, seq: int) -> None:
        q, k, v = qkv
        if any(isinstance(x, DTensor) for x in qkv):
            raise NotImplementedError(
                "ContextParallel: q, k and v are DTensors; on MindSpore pass this rank's parts as plain tensors"
                " (to_local())"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"ContextParallel: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have the same dtype")
        if self.degrees.ring > 1 and (q.ndim != 4 or 3 in (head, seq) or k.shape[:3] != v.shape[:3]):
            shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
            raise ValueError(f"ContextParallel: around a ring q, k and v have 4 dims, the head size last; got {shapes}")
        for x, name in ((q, "q"), (k, "k")):
            self._ranks.check_halves(x, name, seq)
        kv_copies(q.shape[head], k.shape[head], self.degrees.ulysses, self._ranks.size)


def _drops(cell: nn.Cell) -> bool:
    """Tell whether a Cell is a dropout that is on."""
    kinds = (nn.Dropout, mint.nn.Dropout)
    return isinstance(cell, kinds) and cell.training and cell.p != 0 and getattr(cell, "keep_prob", 0) != 1


def attach_sparse(*args: Any) -> NoReturn:
    """Refuse: this is for PyTorch only.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "context parallelism of sparse attention, and as a block, is for PyTorch only, as MindSpore's attention is not"
        " intercepted; use ContextParallel on a Cell that is passed q, k and v (qkv_indices= or qkv_kwarg_names=)"
    )


attention_over = cut_in_place = attach_sparse
