"""Tensors between ranks: rows, begun in one place and waited for in another, and experts' parameters on the move.

Note [Where gradients travel]
    Autograd runs the nodes that are ready from the latest to the earliest, by when forward made them. A gradient's
    exchange begins in the node of ``end`` and is waited for in that of ``ahead``. So all nodes that forward made
    between the two run meanwhile: another exchange's, or those of weights (``hp_platform.torch.grouped.held``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hp_dtensor import DTensor, Placement
from hp_dtensor.torch.extend import local_view, wrap
from hp_platform import get_platform
from hp_platform.torch.heavy import exchanged

T = torch.Tensor


class NoExchange:
    """No exchange: this rank alone."""

    early = False

    def ahead(self, *tensors: T) -> Sequence[T]:
        return tensors

    begin = end = ahead


class AsyncExchange:
    """One exchange of tensors.

    Args:
        group: of the ranks.
        sent: for each tensor the rows to each rank.
        received: for each tensor the rows from each rank.

    Attributes:
        early: backward begins in the node of ``begin``, which comes after that of ``end``: who calls ``begin`` has
            nodes of its own around it.
        returning: gradients under way between the two nodes.
    """

    def __init__(self, group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> None:
        self.group, self.sent, self.received = group, [list(each) for each in sent], [list(each) for each in received]
        self.early = False
        self.returning: list[T | None] | None = None
        self._handles: list[Any] = []
        self._needed: list[bool] = []

    def ahead(self, *tensors: T) -> Sequence[T]:
        return _Ahead.apply(self, *tensors)

    def begin(self, *tensors: T) -> Sequence[T]:
        self._needed = [each.requires_grad and torch.is_grad_enabled() for each in tensors]
        return _Begin.apply(self, *tensors)

    def end(self, *tensors: T) -> Sequence[T]:
        return _End.apply(self, *tensors)

    def send(self, tensors: Sequence[T]) -> list[T]:
        """Begin to exchange."""
        ways = zip(tensors, self.sent, self.received, strict=True)
        return [exchanged(functools.partial(self._launch, *way)) for way in ways]

    def send_back(self, gradients: Sequence[T]) -> list[T | None]:
        """Begin to exchange the gradients that are needed, the other way."""
        ways = zip(gradients, self.received, self.sent, self._needed, strict=True)
        return [self._launch(each, sent, received) if needed else None for each, sent, received, needed in ways]

    def wait(self) -> None:
        """Wait for what has begun."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()

    def _launch(self, rows: T, sent: list[int], received: list[int]) -> T:
        rows = rows.contiguous()
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        all_to_all = get_platform().collectives.all_to_all
        self._handles.append(_Kept(all_to_all(out, rows, received, sent, group=self.group, async_op=True), rows))
        return out


class _Kept:
    """A handle, and the tensor that must live until it has been waited for."""

    def __init__(self, handle: Any, rows: T) -> None:
        self.handle, self.rows = handle, rows

    def wait(self) -> None:
        self.handle.wait()


def _unchanged(ctx: Any, exchange: AsyncExchange, tensors: Sequence[T]) -> tuple[T, ...]:
    out = tuple(each.view_as(each) for each in tensors)
    _prepare(ctx, exchange, out)
    return out


def _prepare(ctx: Any, exchange: AsyncExchange, out: Sequence[T]) -> None:
    ctx.exchange = exchange
    ctx.mark_non_differentiable(*(each for each in out if not each.is_floating_point()))


class _Ahead(torch.autograd.Function):
    """Where gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: T) -> tuple[T, ...]:
        return _unchanged(ctx, exchange, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T) -> tuple[T | None, ...]:
        ctx.exchange.wait()
        return None, *gradients


class _Begin(torch.autograd.Function):
    """Where tensors leave."""

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: T) -> tuple[T, ...]:
        out = tuple(exchange.send(tensors))
        _prepare(ctx, exchange, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T) -> tuple[T | None, ...]:
        returning, ctx.exchange.returning = ctx.exchange.returning, None
        return None, *(ctx.exchange.send_back(gradients) if returning is None else returning)


class _End(torch.autograd.Function):
    """Where tensors have arrived."""

    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: T) -> tuple[T, ...]:
        exchange.wait()
        return _unchanged(ctx, exchange, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T) -> tuple[T | None, ...]:
        if not ctx.exchange.early:
            ctx.exchange.returning = ctx.exchange.send_back(gradients)
        return None, *gradients  # of the shapes of what arrived: those that travel are handed out by `_Begin`


class Gathered(torch.autograd.Function):
    """The rows of all ranks; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, rows: T, group: Any) -> T:
        ctx.group = group
        return exchanged(lambda: _gather(rows, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        return _scatter(grad, ctx.group), None


class Scattered(torch.autograd.Function):
    """A part of a sum over ranks; the transpose of ``Gathered``."""

    @staticmethod
    def forward(ctx: Any, rows: T, group: Any) -> T:
        ctx.group = group
        return exchanged(lambda: _scatter(rows, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        return _gather(grad, ctx.group), None


def _gather(rows: T, group: Any) -> T:
    out = rows.new_empty((len(rows) * get_platform().groups.size(group), *rows.shape[1:]))
    get_platform().collectives.all_gather(out, rows.contiguous(), group=group)
    return out


def _scatter(rows: T, group: Any) -> T:
    out = rows.new_empty((len(rows) // get_platform().groups.size(group), *rows.shape[1:]))
    get_platform().collectives.reduce_scatter(out, rows.contiguous(), group=group)
    return out


def belongings(
    module: nn.Module, names: Sequence[str], cut: Placement, axes: int, optimizers: Sequence[Any]
) -> list[str]:
    """List what moves with parameters, the same on all ranks.

    Raises:
        NotImplementedError: something keeps them from moving.
    """
    moving = []
    for name in names:
        parameter, where = getattr(module, name), f"{type(module).__name__}.{name}"
        # fully_shard registers parameters of its own; it gives the module the method, and the parameter an axis more.
        if hasattr(module, "unshard") or parameter.device_mesh.ndim != axes or parameter.placements[0] != cut:
            raise NotImplementedError(
                f"{where} is placed {parameter.placements} on {parameter.device_mesh}. Experts move where their style"
                " alone has placed them: place them before fully_shard(..., shard_placement_fn=lambda each: Shard(1))"
            )
        if optimizers and parameter.requires_grad and not any(parameter is each for each in _parameters(optimizers)):
            raise NotImplementedError(
                f"{where} is a parameter of none of the optimizers that were passed, whose states have to move with it"
            )
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, T) and value.numel() > 1 and not _as(value, parameter):
                    raise NotImplementedError(
                        f"{type(optimizer).__name__}'s state {key!r} of {where} is not laid out as the parameter, so it"
                        " is not known which part is whose: experts cannot move under this optimizer"
                    )
        moving += [name] + ["grad"] * (parameter.grad is not None) + [key for key, _ in _states(parameter, optimizers)]
    return moving


def _parameters(optimizers: Sequence[Any]) -> Iterator[T]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _as(value: T, parameter: DTensor) -> bool:
    """Tell whether a state is on the device, in the layout of its parameter."""
    if not isinstance(value, DTensor) or value._spec is not parameter._spec:
        return False
    return local_view(value).untyped_storage().size() > 0 or local_view(value).numel() == 0


def _states(parameter: DTensor, optimizers: Sequence[Any]) -> Iterator[tuple[str, DTensor]]:
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor) and value.numel() > 1:
                yield key, value


@torch.no_grad()
def move(module: nn.Module, names: Sequence[str], cut: Placement, optimizers: Sequence[Any]) -> None:
    """Lay parameters out by ``cut`` on their first mesh axis, in the memory that they have."""
    for name in names:
        parameter = getattr(module, name)
        placements = (cut, *parameter.placements[1:])
        states, gradient = [value for _, value in _states(parameter, optimizers)], parameter.grad
        parameter.grad = None
        for tensor in (parameter, *states):
            _relaid(tensor, placements)
        if gradient is not None:
            _relaid(gradient, placements)
            parameter.grad = gradient


def _relaid(tensor: DTensor, placements: Sequence[Placement]) -> None:
    """Change a tensor's layout, not its memory: what else refers to that sees the new values."""
    source: Any = tensor.detach()
    moved = source.redistribute(placements=placements)
    local = local_view(tensor).detach()
    local.copy_(local_view(moved))
    tensor.data = wrap(local, moved._spec)
