"""PyTorch's part of hp-moe: see `hp_moe.port`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Partial, Placement
from hp_dtensor.torch.extend import distribute_parameter
from hp_moe.port import Traits, Transfer
from hp_moe.routes.forced import forced_counts
from hp_moe.torch import pieces
from hp_moe.torch.balance import recomputes as recomputes
from hp_moe.torch.exchange import Combined, Pinned, Recomputed, Repeated, Spread, Summed, SwiGlu
from hp_moe.torch.transfer import AsyncExchange, Gathered, NoExchange, Scattered
from hp_moe.torch.transfer import belongings as belongings
from hp_moe.torch.transfer import move as move
from hp_platform import get_platform
from hp_platform.torch import grouped as products

T = torch.Tensor


# ---- modules ----
def is_weight(value: Any) -> bool:
    return isinstance(value, T) and value.dim() == 3


def distribute(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]], src_data_rank: int | None
) -> None:
    for name, placement in placements.items():
        distribute_parameter(getattr(module, name), mesh, placement, src_data_rank=src_data_rank)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module's calls run ``forward``; a method, as a copy of the module binds it to itself."""
    module.forward = types.MethodType(forward, module)


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return model.named_modules()


# ---- inputs ----
def traits(value: T) -> Traits:
    return Traits(*_named(value.dtype), str(value.device), value.requires_grad and torch.is_grad_enabled())


@functools.cache
def _named(dtype: torch.dtype) -> tuple[str, str]:
    if dtype.is_floating_point:
        return str(dtype), "floating"
    return str(dtype), "other" if dtype.is_complex or dtype is torch.bool else "integer"


def listed(value: T) -> list[Any]:
    return value.tolist()


def pinned(out: T, chosen: T, name: str) -> T:
    """Return an output; backward compares choices."""
    return Pinned.apply(out, chosen, name)


# ---- numbers ----
def slots(chosen: T, table: tuple[int, ...]) -> tuple[T, T]:
    counts = forced_counts(chosen.shape[0], chosen.shape[-1], len(table))
    if counts is not None:
        flat = torch.repeat_interleave(torch.arange(len(table)), torch.tensor(counts), output_size=chosen.numel())
        routes = flat.view(chosen.shape[1], chosen.shape[0]).t()  # an expert's tokens are different ones
        chosen = routes.contiguous() if chosen.is_meta else routes.to(chosen.device)  # without memory on the host
    unknown = (chosen < 0) | (chosen >= len(table))
    return _table(table, chosen.device)[chosen.masked_fill(unknown, 0).flatten()], unknown.sum()


def not_finite(values: T) -> T:
    if values.is_meta:  # a tensor without values has none that is not finite
        return torch.zeros((), dtype=torch.int64)
    return values.detach().isfinite().logical_not().sum()  # `isfinite` saves its input for backward


def count(slots: T, size: int) -> T:
    return torch.bincount(slots, minlength=size)


def order(slots: T) -> tuple[T, T]:
    places = torch.argsort(slots, stable=True)
    return places, torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=places.device))


def copies(slots: T, token: T, tokens: int, widths: Sequence[int]) -> tuple[T, T, T]:
    owners = _table(tuple(rank for rank, width in enumerate(widths) for _ in range(width)), slots.device)
    there = token * len(widths) + owners[slots]
    goes = torch.zeros(tokens * len(widths), dtype=torch.bool, device=slots.device).scatter_(0, there, True)
    goes = goes.view(tokens, len(widths))
    places = (goes.cumsum(0) - 1).view(-1)[there]
    return goes.t().nonzero()[:, 1], places, goes.sum(0)


def message(parts: Sequence[T | tuple[int, ...]], like: T) -> T:
    return torch.cat([part.view(-1) if isinstance(part, T) else _table(part, like.device) for part in parts])


def _table(numbers: tuple[int, ...], device: torch.device) -> T:
    """Return numbers on a device, sent there once."""
    table = _tables.get((numbers, device))
    if table is None:
        with torch.inference_mode(False):
            table = torch.tensor(numbers, dtype=torch.int64, device=device)
        if type(table) is T:  # not one of a mode that only plans
            _tables[numbers, device] = table
            if len(_tables) > 256:
                del _tables[next(iter(_tables))]
    return table


_tables: dict[tuple[tuple[int, ...], torch.device], T] = {}


def split(numbers: T, sizes: Sequence[int]) -> Sequence[T]:
    return numbers.split(list(sizes))


def exchange_numbers(
    message: T, sent: Sequence[int], received: Sequence[int], group: Any
) -> Callable[[], tuple[list[int], list[int]]]:
    """Exchange integers; one copy to the host."""
    if group is None:
        return lambda: (message.tolist(), message.tolist())
    arrived = message.new_empty(sum(received))
    handle = get_platform().collectives.all_to_all(
        arrived, message, list(received), list(sent), group=group, async_op=True
    )

    def wait() -> tuple[list[int], list[int]]:
        if handle is not None:
            handle.wait()
        numbers = torch.cat([message, arrived]).tolist()
        return numbers[: len(message)], numbers[len(message) :]

    return wait


def positions(blocks: Sequence[tuple[int, int]], like: T) -> T:
    first, rows = torch.tensor(blocks, dtype=torch.int64).view(-1, 2).unbind(1)
    begin = torch.repeat_interleave(first - (rows.cumsum(0) - rows), rows)
    return (begin + torch.arange(len(begin))).to(like.device, non_blocking=True)


def seats(slots: T, size: int, capacity: int) -> tuple[T, T, T]:
    order = torch.argsort(slots, stable=True)
    counts = slots.new_zeros(size).scatter_add_(0, slots, torch.ones_like(slots))
    number, all_seats = slots[order], size * capacity
    place = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[number]
    seat = torch.where(place < capacity, number * capacity + place, all_seats)
    taken = slots.new_full((all_seats + 1,), len(slots)).scatter_(0, seat, order)[:-1]
    return torch.empty_like(slots).scatter_(0, order, seat), taken, (counts - capacity).clamp(min=0)


def spoiled(values: T, wrong: T) -> T:
    return values / (wrong == 0)


def ordered_range(slots: T, first: int, width: int, count: int) -> T:
    own = (slots - first).masked_fill((slots < first) | (slots >= first + width), width)
    return torch.argsort(own, stable=True)[:count]


def counted(count: int, times: int, like: T) -> T:
    return torch.arange(count, device=like.device).repeat_interleave(times)


def repeated_table(table: tuple[int, ...], sizes: Sequence[int], like: T) -> T:
    each = torch.repeat_interleave(torch.tensor(table), torch.tensor(sizes), output_size=sum(sizes))
    return each.to(like.device, non_blocking=True)


def repeated_numbers(counts: T | Sequence[int], like: T) -> T:
    numbers = torch.as_tensor(counts, device=like.device)
    return torch.repeat_interleave(torch.arange(len(numbers), device=like.device), numbers)


# ---- rows ----
def take(rows: T, places: T) -> T:
    return rows.index_select(0, places)


def spread(rows: T, order: T, inverse: T, times: int) -> T:
    return Spread.apply(rows, order, inverse, times)


def transfer(group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> Transfer:
    return NoExchange() if group is None else AsyncExchange(group, sent, received)


def exchange(rows: T, sent: Sequence[int], received: Sequence[int], group: Any) -> T:
    way = transfer(group, [sent], [received])
    (out,) = way.end(*way.begin(*way.ahead(rows)))
    return out


def padded(rows: T, size: int) -> T:
    missing = size - len(rows)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def gathered(rows: T, group: Any) -> T:
    return Gathered.apply(rows, group)


def scattered(rows: T, group: Any) -> T:
    return Scattered.apply(rows, group)


def combined(rows: T, weights: T, order: T, inverse: T) -> T:
    return Combined.apply(rows, weights, order, inverse)


def summed(rows: T, places: T, count: int) -> T:
    return Summed.apply(rows, places, count)


def joined(parts: Sequence[T]) -> T:
    return torch.cat(list(parts))


def ones(rows: T) -> T:
    return rows.new_ones(len(rows))


# ---- experts ----
piece_sums, in_pieces = pieces.PieceSums, pieces.in_pieces


def grouped(rows: T, weight: T, sizes: Sequence[int], transposed: bool, kernel: bool) -> T:
    return products.grouped_linear(rows, weight, sizes, transposed=transposed, kernel=kernel)


def held(weight: T) -> T:
    return products.held(weight) if weight.dim() == 3 else weight


def repeated(rows: T, sizes: Sequence[int]) -> T:
    return Repeated.apply(rows, tuple(sizes))


def recomputed(function: Callable[..., T], *values: T) -> T:
    return Recomputed.apply(function, *values)


def is_swiglu(module: nn.Module) -> bool:
    """Tell whether experts of transformers have the gate that most have: ``silu(gate) * up``."""
    gate, act = getattr(type(module), "_apply_gate", None), type(getattr(module, "act_fn", None))
    silu = act is nn.SiLU or (act.__module__, act.__name__) == ("transformers.activations", "SiLUActivation")
    return silu and getattr(gate, "__module__", None) == "transformers.integrations.moe"


def swiglu(inner: Sequence[T], weights: T | None) -> T:
    return SwiGlu.apply(weights, *inner)


def cast(value: T, like: T) -> T:
    return value.to(like.dtype)


def varying(value: Any) -> T:
    assert isinstance(value, DTensor)
    if not value.is_floating_point():
        return value.to_local()
    return value.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)
