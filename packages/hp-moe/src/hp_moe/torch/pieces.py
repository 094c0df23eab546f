"""Gradients of experts' weights from pieces: a product of its own for each expert and source of tokens.

Note [Bits that do not depend on where experts are]
    A sum over an expert's rows depends on which rows are in one product, and that on which ranks compute the expert. So
    with ``deterministic`` each source's rows for an expert are a piece, computed by itself wherever it is, forward and
    backward: the same products of the same shapes on the same numbers, in memory of the same alignment. A source is a
    micro-batch, one pass of one rank, and goes to one holder. The gradients of pieces come home and are added in the
    tree over the step's micro-batches in which hp-fsdp's ``deterministic=True`` adds: rank ``r`` has micro-batches
    ``r * count`` to ``(r + 1) * count``, so the bits do not depend on the number of ranks either.

Note [Passes of a step]
    The tree depends on the number of passes, known after the last one. So pieces are kept, and each pass puts the sum
    of all so far in place of the gradient that the one before left. A step begins where there is no such gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hp_dtensor.torch.extend import local_view
from hp_moe.routes.dispatch import Sources
from hp_platform import get_platform
from hp_platform.extend import TreeSum
from hp_platform.torch.internals import backward_id

T = torch.Tensor
_ALIGNMENT = 64


@dataclass
class PieceSums:
    """The gradients of pieces of a step: Note [Passes of a step].

    Attributes:
        passes: for each backward pass the gradients of pieces, all parameters' in one row, by expert and source.
        left: what the last pass left in the parameters' gradients, as written sums: nan equals itself.
        versions: of the parameters in the last pass.
        task: the backward pass that has been last.
    """

    passes: list[dict[tuple[int, int], T]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    task: int = -1

    def begin(self, parameters: Sequence[T]) -> None:
        """Begin a pass; if the step has had some, drop their sum, which that of all will contain.

        Raises:
            RuntimeError: the module ran twice in a pass; something else has changed the gradients.
        """
        task = backward_id()
        if task == self.task:
            raise RuntimeError(
                "ExpertParallel(deterministic=True): experts ran more than once in one backward pass, which is one"
                " micro-batch; run backward for each call, or leave deterministic out"
            )
        self.task = task
        gradients = [local_view(each.grad).detach() for each in parameters if each.grad is not None]
        versions = [local_view(each)._version for each in parameters]
        if not self.passes or list(map(_checksum, gradients)) != self.left or versions != self.versions:
            if any(bool(each.any()) for each in gradients):
                raise RuntimeError(
                    "ExpertParallel(deterministic=True): experts have gradients that no backward pass of this step has"
                    " left, and a sum with them would depend on the number of ranks. Call optimizer.zero_grad() after"
                    " each step; change gradients, or place experts, after the last backward pass of a step alone"
                )
            self.passes = []
        self.versions = versions
        for each in gradients:
            each.zero_()

    def total(self, expert: int, ranks: int) -> T | None:
        """Add an expert's pieces up in the tree over micro-batches; None if there are none."""
        tree: TreeSum[T | None] = TreeSum(_add)
        for rank in range(ranks):
            for number, pieces in enumerate(self.passes):
                tree.push(rank * len(self.passes) + number, 1, pieces.get((expert, rank)))
        return tree.total()


def _add(left: T | None, right: T | None) -> T | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _checksum(values: T) -> str:
    return repr(values.double().sum().item())


class _Pieces(torch.autograd.Function):
    """The weights of each piece; backward adds their gradients up at home."""

    @staticmethod
    def forward(
        ctx: Any, sums: PieceSums, sources: Sources, group: Any, leaves: Sequence[T], guests: Sequence[T], *weights: T
    ) -> tuple[T, ...]:
        ctx.sums, ctx.sources, ctx.group, ctx.leaves = sums, sources, group, leaves
        ctx.shapes, ctx.like = [each.shape for each in weights], weights[0].new_empty(0)
        own = len(weights[0])
        every = [(weight, guests[at] if guests else weight) for at, weight in enumerate(weights)]
        slices = [
            weight[slot : slot + 1] if slot < own else guest[slot - own : slot - own + 1]
            for slot, _, _ in sources.pieces
            for weight, guest in every
        ]
        # An output that always is in the graph: ranks without pieces take part in backward.
        return (ctx.like.clone(), *(each if each.data_ptr() % _ALIGNMENT == 0 else each.clone() for each in slices))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: T, *grads: T) -> tuple[T | None, ...]:
        sources, sums, shapes = ctx.sources, ctx.sums, ctx.shapes
        sums.begin(ctx.leaves)
        count, sizes = len(shapes), [prod(shape[1:]) for shape in shapes]
        # Zeros get a plus, as if they had been added to other pieces.
        rows = [
            torch.cat([each.reshape(-1) for each in grads[at : at + count]]) + 0.0 for at in range(0, len(grads), count)
        ]
        pieces = {sources.pieces[at][1:]: rows[at] for at in sources.own}
        if ctx.group is not None:
            sent = torch.cat([ctx.like, *(rows[at] for at in sources.sent)]).view(-1, sum(sizes))
            arrived = sent.new_empty(len(sources.received), sum(sizes))
            get_platform().collectives.all_to_all(
                arrived, sent, list(sources.received_sizes), list(sources.sent_sizes), group=ctx.group
            )
            pieces |= dict(zip(sources.received, arrived.unbind(0), strict=True))
        sums.passes.append(pieces)
        totals = [sums.total(expert, sources.ranks) for expert in sources.experts]
        zeros = ctx.like.new_zeros(sum(sizes))
        whole = torch.stack([zeros if total is None else total for total in totals])
        result = [part.reshape(shape).clone() for part, shape in zip(whole.split(sizes, 1), shapes, strict=True)]
        sums.left = list(map(_checksum, result))
        return None, None, None, None, None, *result


class _Copied(torch.autograd.Function):
    """A copy, forward and backward, at the start of memory."""

    @staticmethod
    def forward(ctx: Any, rows: T) -> T:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        return grad.clone(memory_format=torch.contiguous_format)


def in_pieces(
    sums: PieceSums,
    sources: Sources,
    group: Any,
    leaves: Sequence[T],
    weights: Mapping[str, T],
    guests: Mapping[str, T],
    rows: T,
    run: Callable[[T, list[int], Callable[[str], T]], T],
) -> T:
    """Compute rows piece by piece: Note [Bits that do not depend on where experts are]."""
    anchor, *parts = _Pieces.apply(
        sums, sources, group, leaves, [guests[name] for name in weights if guests], *weights.values()
    )
    out = [anchor.view(0, rows.shape[1]), rows[:0].to(anchor.dtype)]
    for at, piece in enumerate(rows.split(list(sources.sizes)) if sources.sizes else ()):
        own = dict(zip(weights, parts[at * len(weights) : (at + 1) * len(weights)], strict=True))
        out.append(_Copied.apply(run(_Copied.apply(piece), [len(piece)], own.__getitem__)))
    return torch.cat(out)
