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
    """Tell whether a value is a tensor of three dims."""
    return isinstance(value, T) and value.dim() == 3


def distribute(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]], src_data_rank: int | None
) -> None:
    """Lay out parameters of a module."""
    for name, placement in placements.items():
        distribute_parameter(getattr(module, name), mesh, placement, src_data_rank=src_data_rank)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module's calls run ``forward``; a method, as a copy of the module binds it to itself."""
    module.forward = types.MethodType(forward, module)


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """List modules and their names."""
    return model.named_modules()


# ---- inputs ----
def traits(value: T) -> Traits:
    """Return what a tensor is."""
    return Traits(*_named(value.dtype), str(value.device), value.requires_grad and torch.is_grad_enabled())


@functools.cache
def _named(dtype: torch.dtype) -> tuple[str, str]:
    if dtype.is_floating_point:
        return str(dtype), "floating"
    return str(dtype), "other" if dtype.is_complex or dtype is torch.bool else "integer"


def listed(value: T) -> list[Any]:
    """Return a tensor's numbers."""
    return value.tolist()


def pinned(out: T, chosen: T, name: str) -> T:
    """Return an output; backward compares choices."""
    return Pinned.apply(out, chosen, name)


# ---- numbers ----
def slots(chosen: T, table: tuple[int, ...]) -> tuple[T, T]:
    """Look numbers up in a table; count those that are none of its places."""
    unknown = (chosen < 0) | (chosen >= len(table))
    return _table(table, chosen.device)[chosen.masked_fill(unknown, 0).flatten()], unknown.sum()


def not_finite(values: T) -> T:
    """Count values that are not finite."""
    return values.detach().isfinite().logical_not().sum()  # `isfinite` saves its input for backward


def count(slots: T, size: int) -> T:
    """Count how often each number occurs."""
    return torch.bincount(slots, minlength=size)


def order(slots: T) -> tuple[T, T]:
    """Return the stable order of numbers, and its inverse."""
    places = torch.argsort(slots, stable=True)
    return places, torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=places.device))


def copies(slots: T, token: T, tokens: int, widths: Sequence[int]) -> tuple[T, T, T]:
    """List what goes to each rank once."""
    owners = _table(tuple(rank for rank, width in enumerate(widths) for _ in range(width)), slots.device)
    there = token * len(widths) + owners[slots]
    goes = torch.zeros(tokens * len(widths), dtype=torch.bool, device=slots.device).scatter_(0, there, True)
    goes = goes.view(tokens, len(widths))
    places = (goes.cumsum(0) - 1).view(-1)[there]
    return goes.t().nonzero()[:, 1], places, goes.sum(0)


def message(parts: Sequence[T | tuple[int, ...]], like: T) -> T:
    """Join integers."""
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
    """Cut a tensor into parts."""
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


def summed_numbers(numbers: Sequence[int], group: Any) -> list[int]:
    """Add integers up over ranks."""
    total = torch.tensor(list(numbers), device=get_platform().devices.current_device())
    get_platform().collectives.all_reduce(total, group=group)
    return total.tolist()


def positions(blocks: Sequence[tuple[int, int]], like: T) -> T:
    """List the numbers of blocks."""
    first, rows = torch.tensor(blocks, dtype=torch.int64).view(-1, 2).unbind(1)
    begin = torch.repeat_interleave(first - (rows.cumsum(0) - rows), rows)
    return (begin + torch.arange(len(begin))).to(like.device, non_blocking=True)


def seats(slots: T, size: int, capacity: int) -> tuple[T, T, T]:
    """Give each number so many seats."""
    order = torch.argsort(slots, stable=True)
    counts = slots.new_zeros(size).scatter_add_(0, slots, torch.ones_like(slots))
    number, all_seats = slots[order], size * capacity
    place = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[number]
    seat = torch.where(place < capacity, number * capacity + place, all_seats)
    taken = slots.new_full((all_seats + 1,), len(slots)).scatter_(0, seat, order)[:-1]
    return torch.empty_like(slots).scatter_(0, order, seat), taken, (counts - capacity).clamp(min=0)


def spoiled(values: T, wrong: T) -> T:
    """Return values as they are where ``wrong`` is 0."""
    return values / (wrong == 0)


def ordered_range(slots: T, first: int, width: int, count: int) -> T:
    """List the places of numbers of a range, as they ascend."""
    own = (slots - first).masked_fill((slots < first) | (slots >= first + width), width)
    return torch.argsort(own, stable=True)[:count]


def counted(count: int, times: int, like: T) -> T:
    """List the numbers below a count, each so many times."""
    return torch.arange(count, device=like.device).repeat_interleave(times)


def repeated_table(table: tuple[int, ...], sizes: Sequence[int], like: T) -> T:
    """List the numbers of a table, each as often as its size says."""
    each = torch.repeat_interleave(torch.tensor(table), torch.tensor(sizes), output_size=sum(sizes))
    return each.to(like.device, non_blocking=True)


def repeated_numbers(counts: T | Sequence[int], like: T) -> T:
    """List each place as often as its count says."""
    numbers = torch.as_tensor(counts, device=like.device)
    return torch.repeat_interleave(torch.arange(len(numbers), device=like.device), numbers)


# ---- rows ----
def take(rows: T, places: T) -> T:
    """Return the rows at some places."""
    return rows.index_select(0, places)


def spread(rows: T, order: T, inverse: T, times: int) -> T:
    """Repeat rows and put them in an order."""
    return Spread.apply(rows, order, inverse, times)


def transfer(group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> Transfer:
    """Plan to exchange tensors."""
    return NoExchange() if group is None else AsyncExchange(group, sent, received)


def exchange(rows: T, sent: Sequence[int], received: Sequence[int], group: Any) -> T:
    """Send rows to ranks and receive theirs."""
    way = transfer(group, [sent], [received])
    (out,) = way.end(*way.begin(*way.ahead(rows)))
    return out


def padded(rows: T, size: int) -> T:
    """Append rows of zeros."""
    missing = size - len(rows)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def gathered(rows: T, group: Any) -> T:
    """Return the rows of all ranks."""
    return Gathered.apply(rows, group)


def scattered(rows: T, group: Any) -> T:
    """Sum rows over ranks and return this rank's part."""
    return Scattered.apply(rows, group)


def combined(rows: T, weights: T, order: T, inverse: T) -> T:
    """Sum the rows of each token with weights."""
    return Combined.apply(rows, weights, order, inverse)


def summed(rows: T, places: T, count: int) -> T:
    """Add rows at places."""
    return Summed.apply(rows, places, count)


def joined(parts: Sequence[T]) -> T:
    """Return rows one part after the other."""
    return torch.cat(list(parts))


def ones(rows: T) -> T:
    """Return a weight of one for each row."""
    return rows.new_ones(len(rows))


# ---- experts ----
piece_sums, in_pieces = pieces.PieceSums, pieces.in_pieces


def grouped(rows: T, weight: T, sizes: Sequence[int], transposed: bool, kernel: bool) -> T:
    """Multiply groups by matrices."""
    return products.grouped_linear(rows, weight, sizes, transposed=transposed, kernel=kernel)


def held(weight: T) -> T:
    """Hold the gradient of a weight back."""
    return products.held(weight) if weight.dim() == 3 else weight


def repeated(rows: T, sizes: Sequence[int]) -> T:
    """Repeat each row so many times."""
    return Repeated.apply(rows, tuple(sizes))


def recomputed(function: Callable[..., T], *values: T) -> T:
    """Apply a function of which backward saves the inputs alone."""
    return Recomputed.apply(function, *values)


def is_swiglu(module: nn.Module) -> bool:
    """Tell whether experts of transformers have the gate that most have: ``silu(gate) * up``."""
    gate, act = getattr(type(module), "_apply_gate", None), type(getattr(module, "act_fn", None))
    silu = act is nn.SiLU or (act.__module__, act.__name__) == ("transformers.activations", "SiLUActivation")
    return silu and getattr(gate, "__module__", None) == "transformers.integrations.moe"


def swiglu(inner: Sequence[T], weights: T | None) -> T:
    """Return ``silu(gate) * up * weights``."""
    return SwiGlu.apply(weights, *inner)


def cast(value: T, like: T) -> T:
    """Return a value in the dtype of another."""
    return value.to(like.dtype)


def varying(value: Any) -> T:
    """Return the local part of a replicated DTensor, whose gradient is a part of a sum."""
    assert isinstance(value, DTensor)
    if not value.is_floating_point():
        return value.to_local()
    return value.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)
