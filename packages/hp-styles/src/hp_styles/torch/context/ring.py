"""Ring attention: keys and values pass around, each rank adds what its queries see of them, by a table of kernels.

Shapes are [batch, heads, sequence, head size]; queries, keys and values have the same heads. The normaliser is
[batch, heads, queries], float32, or float64 for float64. A kernel's backward takes the output and the normaliser of the
whole row, and so gives the part of the gradient that goes through the keys at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_platform import get_platform
from hp_styles.context.plan import Block, Links, chunks_of, come_around, return_gradients, ring_blocks
from hp_styles.torch.context.call import Seen, places

T = torch.Tensor
_aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_QUERIES = 1024  # whose weights are in memory at once, under a mask
_ALIGNED = 32  # rows of the normaliser that the efficient kernel writes and reads


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    Attributes:
        name: for reading.
        takes: ``(q, k, v)``: whether it computes these.
        forward: ``(q, k, v, causal, scale)``: output, in the queries' dtype, and normaliser.
        backward: ``(grad, q, k, v, out, lse, causal, scale)``: gradients of q, k and v.
    """

    name: str
    takes: Callable[[T, T, T], bool]
    forward: Callable[[T, T, T, bool, float], tuple[T, T]]
    backward: Callable[[T, T, T, T, T, T, bool, float], tuple[T, T, T]]


def kernel_for(q: T, k: T, v: T) -> Kernel:
    """Return the first kernel of the table that takes the input; the last takes all."""
    return next(kernel for kernel in KERNELS if kernel.takes(q, k, v))


def _one_head_size(q: T, v: T) -> bool:
    return q.shape[-1] == v.shape[-1] and q.numel() > 0


def _cpu_takes(q: T, k: T, v: T) -> bool:
    on_cpu = get_platform().devices.kind_of(q.device) == "cpu"
    return on_cpu and q.dtype in (torch.float64, torch.float32, *_HALF) and _one_head_size(q, v)


def _cpu_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as its forward lays it
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_takes(q: T, k: T, v: T) -> bool:
    if q.device.type != "cuda" or q.dtype not in _HALF or not _one_head_size(q, v) or torch.version.hip:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    results = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return results[0], results[1]


def _flash_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    lengths = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, seed[0], scale=scale
    )


def _efficient_takes(q: T, k: T, v: T) -> bool:
    if q.device.type != "cuda" or q.dtype not in (torch.float32, *_HALF) or not q.numel() or torch.version.hip:
        return False
    unit = 16 // q.element_size()
    return q.shape[-1] % unit == 0 and v.shape[-1] % unit == 0


def _efficient_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _ALIGNED), value=float("inf"))
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    needed = [True, True, True, False]
    gradients = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse.contiguous(), seed, seed, 0.0, needed, causal, scale=scale
    )
    return gradients[:3]


def _wide(*tensors: T) -> tuple[T, ...]:
    return tuple(x.float() if x.dtype in _HALF else x for x in tensors)


def _scores(q: T, k: T, causal: bool, scale: float) -> T:
    scores = (q @ k.mT).mul_(scale)
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _plain_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores.sub_(lse.unsqueeze(-1)).exp_() @ v).to(dtype), lse


def _plain_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    dtype = q.dtype
    grad, q, k, v, out = _wide(grad, q, k, v, out)
    weights = _scores(q, k, causal, scale).sub_(lse.unsqueeze(-1)).exp_()
    inner = (grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return (inner @ k).to(dtype), (inner.mT @ q).to(dtype), (weights.mT @ grad).to(dtype)


# ---- under a mask: by matrix products, a slice of the queries at a time ----
def _masked_weights(q: T, k: T, lse: T | None, mask: T, scale: float, cap: float | None) -> tuple[T, T, T | None]:
    """Return the weights of a slice of queries, and their normaliser, which is -inf where nothing is seen.

    With a cap, return the hyperbolic tangents of the logits over it, too.
    """
    scores, bent = (q @ k.mT).mul_(scale), None
    if cap is not None:
        bent = scores.div_(cap).tanh_()
        scores = bent * cap
    scores = scores.masked_fill_(~mask, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_(), lse, bent


def masked_forward(q: T, k: T, v: T, mask: T, scale: float, cap: float | None = None) -> tuple[T, T]:
    """Output, in the queries' dtype, and normaliser.

    Args:
        q: [batch, heads, queries, head size].
        k: keys, of as many heads.
        v: values.
        mask: True where a query sees a key, [batch or 1, 1, queries, keys].
        scale: of the logits.
        cap: what the scaled logits are capped at, softly: ``cap * tanh(logits / cap)``; None is nothing.
    """
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    outs, norms = [], []
    for part, seen in zip(q.split(_QUERIES, 2), mask.split(_QUERIES, 2), strict=True):
        weights, lse, _ = _masked_weights(part, k, None, seen, scale, cap)
        outs.append((weights @ v).to(dtype))
        norms.append(lse)
    return torch.cat(outs, 2), torch.cat(norms, 2)


def masked_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, mask: T, scale: float, cap: float | None = None
) -> tuple[T, T, T]:
    """Compute the gradients of q, k and v; see ``masked_forward``."""
    dtype = q.dtype
    grad, q, k, v, out = _wide(grad, q, k, v, out)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], _QUERIES):
        at = slice(start, start + _QUERIES)
        weights, _, bent = _masked_weights(q[:, :, at], k, lse[:, :, at], mask[:, :, at], scale, cap)
        dv += weights.mT @ grad[:, :, at]
        inner = (grad[:, :, at] @ v.mT).sub_((grad[:, :, at] * out[:, :, at]).sum(-1, keepdim=True))
        inner.mul_(weights).mul_(scale)
        if bent is not None:
            inner.mul_(bent.square_().neg_().add_(1))
        dq[:, :, at] = inner @ k
        dk += inner.mT @ q[:, :, at]
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


KERNELS = (
    Kernel("flash, CPU", _cpu_takes, _cpu_forward, _cpu_backward),
    Kernel("flash, CUDA", _flash_takes, _flash_forward, _flash_backward),
    Kernel("memory efficient, CUDA", _efficient_takes, _efficient_forward, _efficient_backward),
    Kernel("matrix products", lambda q, k, v: True, _plain_forward, _plain_backward),
)
"""In the order of preference. The last holds the weights of one block of keys in memory."""


def no_autocast(kind: str) -> Any:
    """Return a context without autocast on a kind of device."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


@dataclass(frozen=True)
class Logits:
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by.
        cap: what they are then capped at, softly; None is nothing.
    """

    scale: float
    cap: float | None = None


@dataclass(frozen=True)
class Ring:
    """The ranks that keys and values go around.

    Attributes:
        links: between them.
        load_balance: each rank holds a chunk of the head and one of the tail.
    """

    links: Links
    load_balance: bool

    @property
    def size(self) -> int:
        """Number of ranks of the whole ring."""
        return self.links.degrees.ring

    @property
    def rank(self) -> int:
        """The place of this rank."""
        return self.links.rank

    def blocks(self, seen: Seen) -> tuple[Block | None, ...]:
        """List the blocks that this rank computes, one per step."""
        inner = self.links.degrees.inner
        blocks = ring_blocks(self.size, self.rank, causal=seen.causal, load_balance=self.load_balance, inner=inner)
        return tuple(None if block is None or self._too_far(block, seen) else block for block in blocks)

    def _too_far(self, block: Block, seen: Seen) -> bool:
        """Return True if all keys of a block are outside the queries' window."""
        if seen.window is None:
            return False
        width = seen.length // (2 * self.size if self.load_balance else self.size)
        chunks = [chunks_of(rank, self.size, self.load_balance) for rank in (self.rank, block.source)]
        queries, keys = _part_of(chunks[0], block.queries), _part_of(chunks[1], block.keys)
        return all(q * width - (k * width + width - 1) >= seen.window or k > q for q in queries for k in keys)

    def mask(self, block: Block, seen: Seen, device: torch.device, cap: float | None) -> T | None:
        """Return the mask of a block, where it is neither full nor plain causal, or logits are capped."""
        if seen.is_plain and cap is None:
            return None
        width = seen.length // self.size
        mine, theirs = (places(rank, self.size, width, self.load_balance, device) for rank in (self.rank, block.source))
        return seen.mask(_part(mine, block.queries, 0), _part(theirs, block.keys, 0))


@dataclass(frozen=True)
class _Pair:
    """Keys and values (or their gradients) in one buffer."""

    shapes: tuple[torch.Size, torch.Size]

    def join(self, k: T, v: T, dtype: torch.dtype) -> T:
        return torch.cat([k.reshape(-1).to(dtype), v.reshape(-1).to(dtype)])

    def split(self, flat: T) -> tuple[T, T]:
        k, v = flat.split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])


def _part(x: T, which: str, dim: int = 2) -> T:
    """Return all of a sequence, its head or its tail."""
    if which == "all":
        return x
    half = x.shape[dim] // 2
    return x.narrow(dim, 0 if which == "head" else half, half)


def _part_of(chunks: list[int], which: str) -> list[int]:
    return chunks if which == "all" else chunks[:1] if which == "head" else chunks[1:]


def _shared(x: T, heads: int) -> T:
    """Each key head once for every query head that shares it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(grad: T, heads: int) -> T:
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


class _Sum:
    """Attention over the keys seen so far: parts are merged by their normalisers."""

    def __init__(self) -> None:
        self.out: T | None = None
        self.lse: T | None = None

    def add(self, out: T, lse: T, queries: str) -> None:
        if self.out is None or self.lse is None:
            self.out = out.to(torch.promote_types(out.dtype, torch.float32))
            self.lse = lse.clone()
            return
        have, sofar = _part(self.out, queries), _part(self.lse, queries)
        share = torch.sigmoid(lse - sofar).nan_to_num_(0.0).unsqueeze(-1)  # of a row that has seen nothing
        have.lerp_(out.to(have.dtype), share.to(have.dtype))
        sofar.copy_(torch.logaddexp(sofar, lse))


def _see(ring: Ring, seen: Seen, block: Block, q: T, k: T, v: T, logits: Logits) -> tuple[T, T]:
    queries, heads = _part(q, block.queries), q.shape[1]
    keys, values = (_shared(_part(x, block.keys), heads) for x in (k, v))
    mask = ring.mask(block, seen, q.device, logits.cap)
    if mask is not None:
        return masked_forward(queries, keys, values, mask, logits.scale, logits.cap)
    return kernel_for(q, k, v).forward(queries, keys, values, block.causal, logits.scale)


def _see_back(ctx: Any, block: Block, queries: list[T], keys: list[T]) -> tuple[T, T, T]:
    (grad, q, out, lse), (k, v) = queries, keys
    logits = ctx.logits
    mask = ctx.ring.mask(block, ctx.seen, q.device, logits.cap)
    if mask is not None:
        return masked_backward(grad, q, k, v, out, lse, mask, logits.scale, logits.cap)
    return kernel_for(q, k, v).backward(grad, q, k, v, out, lse, block.causal, logits.scale)


def _gradients(ctx: Any, grad: T) -> tuple[T, T, T]:
    """Compute the gradients of q, k and v; those of keys and values travel along and return in a last step."""
    q, k, v, out, lse = ctx.saved_tensors
    ring, pair = ctx.ring, _Pair((k.shape, v.shape))
    heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, flat = torch.zeros_like(q, dtype=wide), pair.join(k, v, k.dtype)

    def compute(block: Block, flat: T) -> tuple[T, T]:
        queries = [_part(x, block.queries) for x in (grad, q, out, lse)]
        keys = [_shared(_part(x, block.keys), heads[0]) for x in pair.split(flat)]
        to_queries, to_keys, to_values = _see_back(ctx, block, queries, keys)
        _part(dq, block.queries).add_(to_queries)
        return to_keys, to_values

    def add(gradients: T, block: Block, own: tuple[T, T]) -> T:
        for into, part in zip(pair.split(gradients), own, strict=True):
            _part(into, block.keys).add_(_summed(part, heads[1]))
        return gradients

    zeros = torch.zeros_like(flat, dtype=wide)
    dk, dv = pair.split(return_gradients(ring.links, ring.blocks(ctx.seen), flat, zeros, compute, add))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, ring: Ring, seen: Seen, logits: Logits) -> T:
        pair = _Pair((k.shape, v.shape))
        total = _Sum()

        def see(block: Block, flat: T) -> None:
            total.add(*_see(ring, seen, block, q, *pair.split(flat), logits), block.queries)

        come_around(ring.links, ring.blocks(seen), pair.join(k, v, k.dtype), see)
        assert total.out is not None and total.lse is not None  # a rank sees its own keys
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.ring, ctx.seen, ctx.logits = ring, seen, logits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> Any:
        with no_autocast(grad.device.type):
            return *_gradients(ctx, grad), None, None, None


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, seen: Seen, logits: Logits) -> T:
        keys, values = (_shared(x, q.shape[1]) for x in (k, v))
        out, lse = masked_forward(q, keys, values, seen.whole(q.device), logits.scale, logits.cap)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.seen, ctx.logits = seen, logits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = (_shared(x, q.shape[1]) for x in (k, v))
        mask, logits = ctx.seen.whole(q.device), ctx.logits
        dq, *others = masked_backward(grad, q, keys, values, out, lse, mask, logits.scale, logits.cap)
        return dq, *(_summed(each, k.shape[1]) for each in others), None, None


def whole_attention(q: T, k: T, v: T, *, seen: Seen, logits: Logits) -> T:
    """Attention of a whole sequence with capped logits; see ``ring_attention``."""
    return _WholeAttention.apply(q, k, v, seen, logits)


def ring_attention(q: T, k: T, v: T, *, ring: Ring, seen: Seen, logits: Logits) -> T:
    """Attention of this rank's queries over the keys of all ranks of a ring.

    ``n - 1`` exchanges of keys and values forward; backward as many, and ``n`` of their gradients, which travel with
    them and are summed in float32.

    Args:
        q: [batch, heads, this rank's part of the sequence, head size].
        k: keys, of heads that divide the queries'.
        v: values, as the keys; their head size may be another.
        ring: the ranks.
        seen: the keys that a query sees.
        logits: what becomes of the products of queries and keys.
    """
    return _RingAttention.apply(q, k, v, ring, seen, logits)
