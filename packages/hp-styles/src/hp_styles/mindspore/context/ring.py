"""Ring attention on MindSpore, of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, _Function, mint, ops

from hp_styles.context.plan import Block
from hp_styles.context.ring import Links, come_around, return_gradients
from hp_styles.mindspore.context.sequence import repeated

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
    def forward(  # type: ignore[override]
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
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
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
