"""Tensors of PyTorch to what a wire sends, and back: see Note [What is not finite] in `hp_onesided.wire`."""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch.nn.functional import pad

from hp_onesided.cores.library import library
from hp_onesided.wire import Wire

_LARGEST = {"int8": (127.0, 126.0), "e4m3": (448.0, 416.0)}
"""A dtype's largest code, and the one below, which is the largest beside infinities."""
_CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
_SLACK = 1 + 2.0**-22  # so that float32's rounding of a scale takes no value past the largest code
_LEAST = torch.finfo(torch.float32).tiny


def dtype(tensor: torch.Tensor) -> str:
    """Name a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def cut(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Get the elements as a matrix of float32."""
    flat = tensor.detach().view(-1)
    spare = rows * columns - flat.numel()
    return (pad(flat, (0, spare)) if spare else flat).view(rows, columns).float()


def like(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Make a matrix like a tensor."""
    return tensor.new_empty(rows, columns)


def fill(output: torch.Tensor, sent: torch.Tensor, wire: Wire, columns: int, op: str) -> None:
    """Fill a tensor with the sum or mean of rows that were sent, one decoded after the other."""
    total = decode(sent[:1], wire, columns)
    for row in sent[1:].split(1):
        total += decode(row, wire, columns)
    if op == "avg":
        total /= len(sent)
    move(output, total)


def move(output: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a tensor with the first of these elements."""
    with torch.no_grad():
        output.copy_(values.reshape(-1)[: output.numel()].view(output.shape))


def encode(values: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Encode each row of a matrix."""
    rows, count = values.shape
    core = _core(values, wire)
    if core is not None:
        sent = values.new_empty(rows, wire.nbytes(count), dtype=torch.uint8)
        keys = (ctypes.c_uint32 * 2)(*_keys(wire.seed)) if wire.rounding == "stochastic" else None
        places = values.data_ptr(), sent.data_ptr(), rows, count, wire.block, sent.shape[1]
        core.hp_encode(wire.dtype == "e4m3", *places, keys)
        return sent
    chance = None
    if wire.rounding == "stochastic":
        chance = _chance(rows * count, wire.seed, values.device).view(rows, count)
    if wire.dtype == "bf16":
        return _to_bfloat16(values, chance).view(torch.uint8)
    blocks = -(-count // wire.block)
    spare = blocks * wire.block - count
    shape = rows, blocks, wire.block
    values = pad(values, (0, spare)).view(shape)
    finite = values.isfinite()
    special = ~finite.all(-1, keepdim=True)
    tame = values.where(finite, 0.0) if _some(special) else values
    top, below = _LARGEST[wire.dtype]
    limit = torch.where(special, below, top)
    scale = (tame.abs().amax(-1, keepdim=True) / (limit * _SLACK)).clamp_(min=_LEAST)
    scaled = tame / scale
    if chance is not None:
        chance = pad(chance, (0, spare)).view(shape)
    codes = (_to_int8 if wire.dtype == "int8" else _to_e4m3)(scaled, limit, chance)
    if wire.dtype == "int8":  # the code that no other value has
        codes.masked_fill_((scaled == 0) & scaled.signbit() & ~special, -128.0)
    if _some(special):
        codes = torch.where(values.isinf(), values.sign() * top, codes)
        codes = torch.where(values.isnan(), -128.0 if wire.dtype == "int8" else torch.nan, codes)
    sent = values.new_zeros(rows, wire.nbytes(count), dtype=torch.uint8)
    sent[:, : 4 * blocks].view(torch.float32).copy_(torch.where(special, -scale, scale).view(rows, blocks))
    exact = codes.view(rows, -1)[:, :count].to(_CODES[wire.dtype])
    sent[:, 4 * blocks : 4 * blocks + count].copy_(exact.view(torch.uint8))
    return sent


def decode(sent: torch.Tensor, wire: Wire, columns: int) -> torch.Tensor:
    """Decode rows of so many elements."""
    rows = len(sent)
    if wire.dtype == "bf16":
        return sent.view(torch.bfloat16).float()
    core = _core(sent, wire)
    if core is not None:
        values = sent.new_empty(rows, columns, dtype=torch.float32)
        places = sent.data_ptr(), values.data_ptr(), rows, columns, wire.block, sent.shape[1]
        core.hp_decode(wire.dtype == "e4m3", *places)
        return values
    blocks = -(-columns // wire.block)
    scale = sent[:, : 4 * blocks].view(torch.float32).unsqueeze(-1)
    codes = sent[:, 4 * blocks : 4 * blocks + columns].view(_CODES[wire.dtype]).float()
    codes = pad(codes, (0, blocks * wire.block - columns)).view(rows, blocks, wire.block)
    values = codes * scale.abs()
    if wire.dtype == "int8":
        values.masked_fill_(codes == -128, -0.0)
    special = scale.signbit()
    if _some(special):
        infinite = special & (codes.abs() == _LARGEST[wire.dtype][0])
        values = torch.where(infinite, codes * torch.inf, values)
        if wire.dtype == "int8":
            values.masked_fill_(special & (codes == -128), torch.nan)
    return values.view(rows, -1)[:, :columns]


def _core(tensor: torch.Tensor, wire: Wire) -> ctypes.CDLL | None:
    """Get the compiled core where it encodes and decodes, which is many times faster; the bits are the same."""
    return library() if wire.dtype != "bf16" and tensor.is_cpu and tensor.is_contiguous() else None


def _some(special: torch.Tensor) -> bool:
    """Tell whether to look for values that are not finite; on a device always, as to ask it is to wait for it."""
    return not special.is_cpu or bool(special.any())


def _to_bfloat16(values: torch.Tensor, chance: torch.Tensor | None) -> torch.Tensor:
    if chance is None:
        return values.bfloat16()
    bits = values.view(torch.int32) + (chance >> 8)
    rounded = (bits & -(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _to_int8(scaled: torch.Tensor, limit: torch.Tensor, chance: torch.Tensor | None) -> torch.Tensor:
    if chance is None:
        return scaled.round()
    return torch.minimum(torch.maximum((scaled + chance * 2.0**-24).floor_(), -limit), limit)


def _to_e4m3(scaled: torch.Tensor, limit: torch.Tensor, chance: torch.Tensor | None) -> torch.Tensor:
    if chance is None:
        return scaled
    size = scaled.abs()
    step = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp(min=-5) - 4)  # 8 steps a power of two
    return torch.minimum((size / step + chance * 2.0**-24).floor_() * step, limit).copysign(scaled)


def _chance(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Draw whole numbers below 2^24 for elements 0, 1, ..., each by its index and the seed alone.

    A hash of 32 bits in the manner of MurmurHash3's finalizer, with keys of the seed before and between its products.
    """
    before, between = _keys(seed)
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.mul_(-0x61C88647).add_(before)
    for shift, factor, key in ((16, 0x21F0AAAD, between), (15, -0x2CA5D269, 0)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor).bitwise_xor_(key)
    return (bits >> 8).bitwise_and_(2**24 - 1)


def _keys(seed: int) -> tuple[int, int]:
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    before, between = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
    return before, between
