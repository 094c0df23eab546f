"""Attention that gives a query the same bits in a whole text, after a cache, and beside other texts.

Note [Keys by their place in the text]
    Keys are cut into blocks by their place in the text, not in the tensor: padding on the left, and what a sliding
    window has dropped, move the latter. A query's sums over a block are products of a fixed shape, and are added up in
    the order of the blocks. A key that a query does not see has the weight 0, and a block of such keys adds exact
    zeros: so neither the keys after it, nor padding, nor the number of blocks change the bits. All is in float32, or
    in float64 for a model in float64.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_plan.torch.generation.exact.rows import by_rows, cancelling, elementwise
from hp_platform.torch.internals import without_all_torch_functions

T = torch.Tensor
NAME = "hp_exact"
_KEYS = 64  # of a block
_QUERIES = 256  # of a text at once
_SMALLEST = -80.0  # of a logarithm: kernels of exp take 20 times as long where the result is no normal number
_here = threading.local()


def register() -> None:
    """Let transformers know this attention by its name."""
    library: Any = importlib.import_module("transformers")
    library.AttentionInterface.register(NAME, exact_attention)
    library.AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **options: Any) -> T:
    """Make the mask of 'sdpa', always: it tells padding from tokens."""
    masks = importlib.import_module("transformers.masking_utils")
    return masks.sdpa_mask(*args, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def exact_attention(
    module: nn.Module,
    query: T,
    key: T,
    value: T,
    attention_mask: T | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_ids: T | None = None,
    **others: Any,
) -> tuple[T, None]:
    """Compute attention as transformers' registry has it: (batch, heads, length, size) to (batch, length, heads, size).

    Raises:
        NotImplementedError: what is not exact here.
    """
    wrong = None
    if dropout:
        wrong = f"dropout = {dropout:g} in attention"
    elif position_ids is None or attention_mask is None or attention_mask.dtype != torch.bool:
        wrong = f"{type(module).__name__} without the places of tokens or a mask"
    elif others.get("s_aux") is not None or others.get("output_attentions"):
        wrong = "attention with sinks, or whose weights are an output"
    if wrong is not None:
        raise NotImplementedError(f"generation = 'exact': {wrong} is not supported; leave run.generation out")
    assert position_ids is not None and attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with without_all_torch_functions():  # what is below is exact by itself
        cut = _blocks(attention_mask, position_ids)
        result: Any = _Attention.apply(query, key, value, attention_mask, cut, scale, softcap)
        return result.transpose(1, 2), None


@contextlib.contextmanager
def known_blocks() -> Iterator[None]:
    """Inside, layers with one mask share what `_blocks` finds."""
    _here.known = []
    try:
        yield
    finally:
        del _here.known


@dataclass(frozen=True)
class _Blocks:
    """How a mask's keys are cut into blocks.

    Attributes:
        before: places that each text's keys move, so that blocks begin at multiples of their size.
        width: keys in all blocks.
        hidden: for each chunk of queries, (batch, 1, blocks, 1, queries, keys of a block), True where a key is not
            seen; of the blocks that some query of the chunk may see.
    """

    before: list[int]
    width: int
    hidden: list[T]


def _blocks(mask: T, position_ids: T) -> _Blocks:
    known = getattr(_here, "known", [])
    for other, places, found in known:
        if other is mask and places is position_ids:
            return found
    queries, keys = mask.shape[-2:]
    before = _front(mask, position_ids).tolist()
    most = max(before)
    width = -(-(keys + most) // _KEYS) * _KEYS
    seen, hidden = _aligned(mask.transpose(2, 3), before, width), []
    for start in range(0, queries, _QUERIES):
        end = min(start + _QUERIES, queries)
        blocks = -(-(keys - queries + end + most) // _KEYS)  # the next are after all of these queries
        part = seen[:, :, : blocks * _KEYS, start:end].unflatten(2, (blocks, _KEYS))
        hidden.append(~part.transpose(-1, -2).unsqueeze(3))
    found = _Blocks(before, width, hidden)
    known.append((mask, position_ids, found))
    return found


def _front(mask: T, position_ids: T) -> T:
    """Return how many places each text's keys move, so that blocks begin at multiples of their size, (batch,).

    Args:
        mask: (batch, 1, queries, keys), True where a query sees a key.
        position_ids: (batch or 1, queries), of the queries.

    Raises:
        NotImplementedError: a text does not go on from token to token, as packed documents do not.
    """
    queries, keys = mask.shape[-2:]
    counts = mask[:, 0].diagonal(keys - queries, -2, -1)  # a token sees itself, and padding is seen by none
    moved = position_ids.expand(len(mask), -1) - torch.arange(queries, device=mask.device)
    first = counts.long().argmax(-1, keepdim=True)
    start = moved.gather(1, first)
    begins = start + first if queries == keys else torch.zeros_like(start)
    if bool(((moved != start) & counts).any()) or bool(begins[counts.any(-1)].any()):
        raise NotImplementedError(
            "generation = 'exact': position_ids do not count 0, 1, 2, ... over the tokens of each text, which packed"
            " documents do not; give each document a row, and padding by attention_mask"
        )
    return ((start - (keys - queries)) % _KEYS)[:, 0]


def _aligned(values: T, before: list[int], width: int) -> T:
    """Move what is along dim 2 of 4 by so many places for each text, into `width`; what is empty is zero."""
    length = values.shape[2]
    if before.count(before[0]) == len(before):
        sizes = before[0], width - before[0] - length
        front, back = (values.new_zeros(()).expand(*values.shape[:2], size, values.shape[3]) for size in sizes)
        return torch.cat([front, values, back], 2) if length < width else values
    moved = values.new_zeros((*values.shape[:2], width, values.shape[3]))
    for text, start in enumerate(before):
        moved[text, :, start : start + length] = values[text]
    return moved


def _product(left: T, right: T, name: str) -> T:
    """Multiply (matrices, rows, columns) by (matrices, columns, others): rows have the same bits however many."""
    columns, others = right.shape[-2:]
    transposed = right.stride(-2) < right.stride(-1)

    def probe(rows: T) -> T:
        other = cancelling((len(rows), others, columns), rows.dtype, rows.device, signed=False).transpose(1, 2)
        return torch.bmm(rows, other if transposed else other.contiguous())

    return by_rows(left, lambda rows: torch.bmm(rows, right), name, others, transposed, probe=probe)


class _Attention(torch.autograd.Function):
    """See Note [Keys by their place in the text]; the backward is the usual one, of a chunk of queries at a time."""

    @staticmethod
    def forward(ctx: Any, query: T, key: T, value: T, mask: T, cut: _Blocks, scale: float, softcap: float | None) -> T:
        batch, heads, _, size = query.shape
        shared, wide = key.shape[1], value.shape[-1] + 1
        dtype = torch.promote_types(query.dtype, torch.float32)
        ones = value.new_ones(()).expand(*value.shape[:-1], 1)  # sums of weights are a column of the product
        value_and_one = torch.cat([value, ones], -1)
        keys, values = (_aligned(each.to(dtype), cut.before, cut.width) for each in (key, value_and_one))
        scaled = query.to(dtype) * scale
        outputs, sums = [], []
        for rows, hidden in zip(scaled.split(_QUERIES, 2), cut.hidden, strict=True):
            blocks, count = hidden.shape[2], rows.shape[2]
            of_keys, of_values = (
                each[:, :, : blocks * _KEYS].reshape(-1, _KEYS, each.shape[-1]) for each in (keys, values)
            )
            rows = rows.reshape(batch * shared, 1, -1, size).expand(-1, blocks, -1, -1).reshape(len(of_keys), -1, size)
            logits = _product(rows, of_keys.transpose(1, 2), "attention's product of queries and keys")
            if softcap is not None:
                logits = elementwise(logits / softcap, torch.tanh) * softcap
            logits = logits.reshape(batch, shared, blocks, heads // shared, count, _KEYS)
            logits.masked_fill_(hidden, torch.finfo(dtype).min)
            most = logits.amax((2, 5), keepdim=True)
            logits.sub_(most).clamp_min_(_SMALLEST)
            weights = elementwise(logits, torch.exp_).masked_fill_(hidden, 0.0).view(len(of_keys), -1, _KEYS)
            terms = _product(weights, of_values, "attention's product of weights and values")
            terms = terms.reshape(batch * shared, blocks, -1, wide)
            total = terms[:, 0]
            for number in range(1, blocks):
                total = total + terms[:, number]
            total = total.reshape(batch, heads, count, wide)
            weight = total[..., -1:].clamp_min(0.5)  # it is at least 1, and 0 for padding, which sees no key
            outputs.append((total[..., :-1] / weight).to(query.dtype))
            if any(ctx.needs_input_grad):
                sums.append(most.view(batch, heads, count) + weight[..., 0].log())
        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        if not sums:
            return output
        sums = torch.cat(sums, 2)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        ctx.scale, ctx.softcap = scale, softcap
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: T) -> tuple[T | None, ...]:
        query, key, value, mask, output, sums = ctx.saved_tensors
        batch, heads, queries, size = query.shape
        shared = key.shape[1]
        groups = (batch, shared, heads // shared)
        keys, values = key.to(sums.dtype).unsqueeze(2), value.to(sums.dtype).unsqueeze(2)
        of_query = torch.empty_like(query)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        for start in range(0, queries, _QUERIES):
            chunk = slice(start, start + _QUERIES)
            q, outer, out = (
                each[:, :, chunk].to(sums.dtype).reshape(*groups, -1, each.shape[-1])
                for each in (query, gradient, output)
            )
            logits = q @ keys.transpose(-1, -2) * ctx.scale
            bent = 1.0
            if ctx.softcap is not None:
                curve = torch.tanh(logits / ctx.softcap)
                logits, bent = curve * ctx.softcap, 1 - curve * curve
            weights = (logits - sums[:, :, chunk].view(*groups, -1, 1)).exp()
            weights = weights.masked_fill(~mask[:, :, None, chunk], 0.0)
            of_values += (weights.transpose(-1, -2) @ outer).sum(2, keepdim=True)
            of_weights = outer @ values.transpose(-1, -2) - (outer * out).sum(-1, keepdim=True)
            of_logits = weights * of_weights * bent * ctx.scale
            of_query[:, :, chunk] = (of_logits @ keys).view(batch, heads, -1, size)
            of_keys += (of_logits.transpose(-1, -2) @ q).sum(2, keepdim=True)
        return of_query, of_keys.squeeze(2).to(key.dtype), of_values.squeeze(2).to(value.dtype), *(None,) * 4
