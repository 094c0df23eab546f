"""Ring attention: keys and values pass around, each rank adds what its queries see of them.

Note [A ring without send and receive]
    A step is an all-to-all in which each rank has a piece for its successor alone. Backends run that as the one send
    and the one receive that it is, beside the computation, in an order that cannot deadlock, and a ring of two needs no
    case of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_platform import get_platform
from hp_styles.context_plan import Block, ring_blocks
from hp_styles.torch.context.kernels import Kernel, kernel_for

__all__ = ["Ring", "no_autocast", "ring_attention"]

T = torch.Tensor


def no_autocast(kind: str) -> Any:
    """A context in which nothing is cast on a kind of device."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


@dataclass(frozen=True)
class Ring:
    """The ranks that keys and values go around.

    Attributes:
        group: the process group.
        size: its ranks.
        rank: this one.
        load_balance: each rank holds a chunk of the head and one of the tail.
    """

    group: Any
    size: int
    rank: int
    load_balance: bool

    def blocks(self, causal: bool) -> tuple[Block | None, ...]:
        """What this rank computes, a step each."""
        return ring_blocks(self.size, self.rank, causal=causal, load_balance=self.load_balance)

    def pass_on(self, flat: T) -> _Passing:
        """Sends a one-dimensional tensor to the next rank, and receives as much from the previous one."""
        received = torch.empty_like(flat)
        sizes = [0] * self.size
        there, here = list(sizes), list(sizes)
        there[(self.rank + 1) % self.size] = here[(self.rank - 1) % self.size] = flat.numel()
        all_to_all = get_platform().collectives.all_to_all
        return _Passing(flat, received, all_to_all(received, flat, here, there, group=self.group, async_op=True))


@dataclass(frozen=True)
class _Passing:
    sent: T
    received: T
    handle: Any

    def wait(self) -> T:
        self.handle.wait()
        return self.received


@dataclass(frozen=True)
class _Pair:
    """Keys and values (or their gradients) in one buffer."""

    shapes: tuple[torch.Size, torch.Size]

    def join(self, k: T, v: T, dtype: torch.dtype) -> T:
        return torch.cat([k.reshape(-1).to(dtype), v.reshape(-1).to(dtype)])

    def split(self, flat: T) -> tuple[T, T]:
        k, v = flat.split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0]), v.view(self.shapes[1])


def _part(x: T, which: str) -> T:
    """All of a sequence, its head or its tail."""
    if which == "all":
        return x
    half = x.shape[2] // 2
    return x.narrow(2, 0 if which == "head" else half, half)


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
        share = torch.sigmoid(lse - sofar).unsqueeze(-1)
        have.lerp_(out.to(have.dtype), share.to(have.dtype))
        sofar.copy_(torch.logaddexp(sofar, lse))


def _see(kernel: Kernel, block: Block, q: T, k: T, v: T, scale: float) -> tuple[T, T]:
    queries, heads = _part(q, block.queries), q.shape[1]
    keys, values = (_shared(_part(x, block.keys), heads) for x in (k, v))
    return kernel.forward(queries, keys, values, block.causal, scale)


def _gradients(ctx: Any, grad: T) -> tuple[T, T, T]:
    """Of q, k and v; gradients of keys and values travel with them, and come home with a last step."""
    q, k, v, out, lse = ctx.saved_tensors
    ring, pair = ctx.ring, _Pair((k.shape, v.shape))
    kernel, heads = kernel_for(q, k, v), (q.shape[1], k.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, flat = torch.zeros_like(q, dtype=wide), pair.join(k, v, k.dtype)
    gradients, coming = torch.zeros_like(flat, dtype=wide), None
    blocks = ring.blocks(ctx.causal)
    for step, block in enumerate(blocks):
        passing = ring.pass_on(flat) if step + 1 < len(blocks) else None
        found: tuple[T, T, T] | None = None
        if block is not None:
            queries = [_part(x, block.queries) for x in (grad, q, out, lse)]
            keys = [_shared(_part(x, block.keys), heads[0]) for x in pair.split(flat)]
            found = kernel.backward(queries[0], queries[1], *keys, queries[2], queries[3], block.causal, ctx.scale)
        if coming is not None:  # what the ranks before saw of these keys
            gradients = coming.wait()
        if found is not None and block is not None:
            _part(dq, block.queries).add_(found[0])
            for into, part in zip(pair.split(gradients), found[1:], strict=True):
                _part(into, block.keys).add_(_summed(part, heads[1]))
        coming = ring.pass_on(gradients)
        if passing is not None:
            flat = passing.wait()
    assert coming is not None  # a ring has steps
    dk, dv = pair.split(coming.wait())
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, ring: Ring, causal: bool, scale: float) -> T:  # type: ignore[override]
        pair = _Pair((k.shape, v.shape))
        kernel = kernel_for(q, k, v)
        flat, total = pair.join(k, v, k.dtype), _Sum()
        blocks = ring.blocks(causal)
        for step, block in enumerate(blocks):
            passing = ring.pass_on(flat) if step + 1 < len(blocks) else None
            if block is not None:
                total.add(*_see(kernel, block, q, *pair.split(flat), scale), block.queries)
            if passing is not None:
                flat = passing.wait()
        assert total.out is not None and total.lse is not None  # a rank sees its own keys
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.ring, ctx.causal, ctx.scale = ring, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> Any:  # type: ignore[override]
        with no_autocast(grad.device.type):
            return *_gradients(ctx, grad), None, None, None


def ring_attention(q: T, k: T, v: T, *, ring: Ring, causal: bool, scale: float | None) -> T:
    """Attention of this rank's queries over the keys of all ranks of a ring.

    ``n - 1`` exchanges of keys and values forward; backward as many, and ``n`` of their gradients, which travel with
    them and are summed in float32.

    Args:
        q: [batch, heads, this rank's part of the sequence, head size].
        k: keys, of heads that divide the queries'.
        v: values, as the keys; their head size may be another.
        ring: the ranks.
        causal: a query sees the keys up to its own place in the whole sequence.
        scale: of the logits; None is 1 / sqrt(head size).
    """
    return _RingAttention.apply(q, k, v, ring, causal, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[return-value]
