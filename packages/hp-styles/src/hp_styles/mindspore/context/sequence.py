"""Sharding a sequence over the ranks of a context axis, and the all-to-all of Ulysses, on MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, _Function, mint, ops

from hp_dtensor import DeviceMesh, Replicate, Shard
from hp_dtensor.mindspore.extend import DTensor
from hp_platform import get_platform
from hp_styles.context.group import UlyssesAxes
from hp_styles.context.plan import chunk_order, chunks_of, divided


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
    def forward(ctx: Any, x: Tensor, plan: Exchange, to_heads: bool) -> Tensor:  # type: ignore[override]
        ctx.plan, ctx.to_heads = plan, to_heads
        return plan.run(x, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.plan.run(grad, to_heads=not ctx.to_heads), None, None


def exchange(plan: Exchange, x: Tensor, *, to_heads: bool) -> Tensor:
    """Exchange a tensor; differentiable.

    Args:
        plan: between which ranks, on which dims.
        x: its heads (``to_heads``) or its sequence divide over the ranks.
        to_heads: from a piece of the sequence to a part of the heads; else back.
    """
    return x if plan.size == 1 else _Exchange.apply(x, plan, to_heads)
