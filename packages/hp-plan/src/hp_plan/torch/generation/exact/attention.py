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
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_plan.torch.generation.exact.rows import by_rows, cancelling, elementwise
from hp_platform.torch.internals import without_all_torch_functions

T = torch.Tensor
NAME = "hp_exact"
_KEYS = 64  # of a block
_QUERIES = 256  # of a text at once
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
        before, seen = _blocks(attention_mask, position_ids)
        result: Any = _Attention.apply(query, key, value, attention_mask, before, seen, scale, softcap)
        return result.transpose(1, 2), None


@contextlib.contextmanager
def known_blocks() -> Iterator[None]:
    """Inside, layers with one mask share what `_blocks` finds."""
    _here.known = []
    try:
        yield
    finally:
        del _here.known


def _blocks(mask: T, position_ids: T) -> tuple[list[int], T]:
    """Return how far each text's keys move, and the mask of the blocks, (batch, 1, keys in blocks, queries)."""
    known = getattr(_here, "known", [])
    for other, places, found in known:
        if other is mask and places is position_ids:
            return found
    before = _front(mask, position_ids).tolist()
    width = -(-(mask.shape[-1] + max(before)) // _KEYS) * _KEYS
    found = before, _aligned(mask.transpose(2, 3), before, width)
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
        return F.pad(values, (0, 0, before[0], width - before[0] - length))
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
    def forward(
        ctx: Any, query: T, key: T, value: T, mask: T, before: list[int], seen: T, scale: float, softcap: float | None
    ) -> T:
        batch, heads, queries, size = query.shape
        shared, keys = key.shape[1], key.shape[2]
        wide, width, most_before = value.shape[-1] + 1, seen.shape[2], max(before)
        dtype = torch.promote_types(query.dtype, torch.float32)
        ones = value.new_ones((*value.shape[:-1], 1))  # sums of weights are a column of the product
        moved = [_aligned(each.to(dtype), before, width) for each in (key, torch.cat([value, ones], -1))]
        output = query.new_empty((*query.shape[:-1], wide - 1))
        sums = query.new_empty(query.shape[:-1], dtype=dtype)
        for start in range(0, queries, _QUERIES):
            end = min(start + _QUERIES, queries)
            blocks = -(-(keys - queries + end + most_before) // _KEYS)  # those after it are seen by none
            parts = [each[:, :, : blocks * _KEYS].reshape(-1, _KEYS, each.shape[-1]) for each in moved]
            rows = query[:, :, start:end].to(dtype).reshape(batch * shared, 1, -1, size)
            rows = rows.expand(-1, blocks, -1, -1).reshape(batch * shared * blocks, -1, size)
            logits = _product(rows, parts[0].transpose(1, 2), "attention's product of queries and keys")
            logits = logits * scale
            if softcap is not None:
                logits = elementwise(logits / softcap, torch.tanh) * softcap
            logits = logits.view(batch, shared, blocks, heads // shared, end - start, _KEYS)
            visible = seen[:, :, : blocks * _KEYS, start:end].transpose(2, 3)
            visible = visible.reshape(batch, 1, end - start, blocks, _KEYS).transpose(2, 3).unsqueeze(3)
            logits = logits.masked_fill(~visible, -math.inf)
            most = logits.amax((2, 5), keepdim=True).clamp_min(torch.finfo(dtype).min)
            weights = elementwise(logits - most, torch.exp).view(batch * shared * blocks, -1, _KEYS)
            terms = _product(weights, parts[1], "attention's product of weights and values")
            terms = terms.view(batch * shared, blocks, -1, wide)
            total = terms[:, 0]
            for number in range(1, blocks):
                total = total + terms[:, number]
            total = total.view(batch, heads, end - start, wide)
            sum_of = total[..., -1:].masked_fill(total[..., -1:] == 0, 1.0)  # padding sees no key
            output[:, :, start:end] = total[..., :-1] / sum_of
            most = most.view(batch, heads, end - start)
            sums[:, :, start:end] = most + sum_of[..., 0].log()
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
        return of_query, of_keys.squeeze(2).to(key.dtype), of_values.squeeze(2).to(value.dtype), *(None,) * 5
