"""Wires: sums over ranks whose tensors are sent in one or two bytes an element, between hosts.

Note [Once, at the source]
    Each rank encodes its tensor once. What is sent is decoded where it is summed, in float32 and in the order of the
    ranks, and what is sent on after that are the sums themselves, in the dtype of the tensor. So the error of a sum is
    that of its summands and does not grow with the hops; all ranks have the same bits.

Note [What is not finite]
    A block's scale is that of its finite values. A scale with a minus sign says that the block has others: its largest
    code is an infinity, its finite values keep one code less, and NaN has a code of its own. So NaN and infinities
    arrive, and do not take the values beside them along.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from hp_onesided.port import Group, Tensor
from hp_platform import collectives, get_platform
from hp_platform.extend import level_of, load_port, platform_name

WireDtype = Literal["bf16", "e4m3", "int8"]
Rounding = Literal["nearest", "stochastic"]
_TAKEN = ("float32", "bfloat16", "float16")
_LEAST = 2.0**-126
"""The smallest scale, float32's smallest normal number."""


@dataclass(frozen=True)
class Wire:
    """How summands travel: the dtype in which a rank sends its tensor to others.

    bf16 halves the bytes of float32. int8 and e4m3 (float8_e4m3fn) take a quarter, and 4 bytes for the scale of each
    block, by which its largest value becomes the dtype's largest. int8 has equal steps, so it suits blocks of alike
    values; e4m3 has steps in proportion to a value, so small values beside a large one keep 4 bits.

    Example:
        >>> Wire("int8").nbytes(1000), Wire("bf16").nbytes(1000)
        (1032, 2000)

    Args:
        dtype: "bf16", "e4m3" or "int8".
        block: consecutive elements that share a scale; bf16 has none. Default 128.
        rounding: "nearest", or "stochastic": up or down by chance so that the mean is the value, with twice the
            largest error. The same chance for the same element of a tensor on every rank and for any number of ranks.
        seed: of the chance. Pass another one for each step (`dataclasses.replace`): the same value of the same element
            is rounded alike under the same seed.

    Raises:
        ValueError: an unknown dtype or rounding, or a block of no element.
    """

    dtype: WireDtype
    block: int = 128
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("dtype", get_args(WireDtype)), ("rounding", get_args(Rounding))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Wire: {name} is {getattr(self, name)!r}; choose one of: {', '.join(choices)}.")
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"Wire: block is {self.block!r}; pass a number of elements, 1 or more.")
        if type(self.seed) is not int:
            raise ValueError(f"Wire: seed is {self.seed!r}; pass an integer.")

    def nbytes(self, count: int) -> int:
        """Count the bytes that so many elements take: their codes and scales, up to a multiple of 4."""
        if self.dtype == "bf16":
            return 2 * count
        return 4 * -(-count // self.block) + 4 * -(-count // 4)


def bound(wire: Wire, blocks: Sequence[Any]) -> Any:
    """Bound the error of each element of a sum over ranks; exact but for the sum's own rounding, which it includes.

    For x of a rank, in a block whose largest absolute value is m, to nearest: bf16 2^-8 sum|x|, int8 sum m / 254, e4m3
    2^-4 sum|x| + 2^-10 sum m / 448. Twice that for stochastic rounding.

    Example:
        >>> import numpy as np
        >>> bound(Wire("int8"), [np.array([127.0, 1.0]), np.array([0.0, -127.0])]).round(3)  # two ranks, steps of 1
        array([1., 1.])

    Args:
        wire: the wire.
        blocks: each rank's values of one block (bf16: of any elements), as arrays or tensors of finite floats.

    Returns:
        The bound of each element, in an array like those.
    """
    magnitudes = [abs(block) for block in blocks]
    total = functools.reduce(lambda sum_, each: sum_ + each, magnitudes)
    largest = sum(each.max() for each in magnitudes)
    if wire.dtype == "bf16":
        rounded = total * 2.0**-8
    elif wire.dtype == "int8":
        rounded = total * 0 + largest / 254
    else:
        rounded = total * 2.0**-4 + largest * (2.0**-10 / 448)
    steps = 2 if wire.rounding == "stochastic" else 1
    own = largest * (len(blocks) + 2) * 2.0**-22 + len(blocks) * _LEAST  # of float32: scales, sums, smallest numbers
    return rounded * steps + own


def gathers(wire: Wire, size: int, itemsize: int) -> bool:
    """Tell whether an all-reduce of so many ranks gathers all summands, because that sends less than sums after them.

    Gathered, a rank sends its codes to `size - 1` others. Else it sends each its piece, and then its sums to all.
    The bits are the same.
    """
    code = wire.nbytes(wire.block * 4) / (wire.block * 4)
    return code * size <= code + itemsize


class Codec(Protocol):
    """Tensors to what a wire sends and back; `<framework>/wire.py`."""

    def dtype(self, tensor: Tensor) -> str:
        """Name a tensor's dtype."""
        ...

    def cut(self, tensor: Tensor, rows: int, columns: int) -> Tensor:
        """Get the elements in their order as a matrix in float32; zeros follow where it has more."""
        ...

    def encode(self, values: Tensor, wire: Wire) -> Tensor:
        """Encode each row of a matrix of float32 by itself, blocks from its begin; get as many rows of bytes."""
        ...

    def decode(self, sent: Tensor, wire: Wire, columns: int) -> Tensor:
        """Decode what `encode` made of rows with so many elements."""
        ...

    def like(self, tensor: Tensor, rows: int, columns: int) -> Tensor:
        """Make a matrix of that dtype on that device, with anything in it."""
        ...

    def fill(self, output: Tensor, sent: Tensor, wire: Wire, columns: int, op: str) -> None:
        """Fill a tensor with the sum of rows that `encode` made, in their order, or with their mean.

        What is too much is left out.
        """
        ...

    def move(self, output: Tensor, values: Tensor) -> None:
        """Fill a tensor with the first of these elements."""
        ...


@functools.cache
def _codec() -> Codec:
    if platform_name() != "torch":
        raise NotImplementedError("hp_onesided: a wire encodes tensors of PyTorch; on MindSpore send them as they are.")
    return load_port(Codec, "wire")


def reduce_scatter(
    output: Tensor, tensor: Tensor, wire: Wire, op: str = "sum", *, group: Group, async_op: bool = False
) -> Pending | None:
    """Reduce a tensor over the ranks, whose summands travel encoded, and keep this rank's piece of dim 0.

    `hp_platform.collectives.reduce_scatter` with `wire.nbytes` of a piece in place of its bytes to each other rank.
    Blocks begin with each piece, so the bits are alike for any number of ranks where a piece is whole blocks.

    Args:
        output: contiguous, this rank's piece, of float32, bfloat16 or float16.
        tensor: contiguous, of that dtype, as many elements as all pieces together; it is left as it is.
        wire: how summands travel.
        op: "sum" or "avg". Summed, and divided, in float32.
        group: the ranks, some on other hosts than others.
        async_op: return at once, with a handle; all ranks wait for their handles in the same order.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        TypeError: another dtype.
        ValueError: tensors that aren't contiguous or whose sizes don't fit, another op, or a group on one host, where
            encoding takes longer than sending.
        NotImplementedError: on MindSpore.
    """
    size = _checked("reduce_scatter", output, tensor, op, wire, group)
    if tensor.numel() != output.numel() * size:
        raise ValueError(
            f"hp_onesided.reduce_scatter: {size} ranks with a piece of {output.numel()} elements have"
            f" {output.numel() * size}, but the tensor has {tensor.numel()} (shape {tuple(tensor.shape)})."
        )
    codec, piece = _codec(), output.numel()
    if not piece:
        return _finished(Pending(None, None), async_op)
    sent = codec.encode(codec.cut(tensor, size, piece), wire)
    received = codec.like(sent, size, wire.nbytes(piece))
    handle = collectives.all_to_all(received, sent, group=group, async_op=async_op)
    return _finished(Pending(handle, lambda: codec.fill(output, received, wire, piece, op)), async_op)


def all_reduce(tensor: Tensor, wire: Wire, op: str = "sum", *, group: Group, async_op: bool = False) -> Pending | None:
    """Reduce a tensor in place over the ranks, whose summands travel encoded; the bits are alike on all ranks.

    Few ranks gather all summands (of float32 up to 3 by bf16, up to 4 by int8 and e4m3). More exchange pieces, and
    gather the pieces' sums in the tensor's dtype: see Note [Once, at the source]. The bits do not depend on which. With
    `async_op` the sums of pieces are gathered in the handle's `wait`.

    Args:
        tensor: contiguous, of float32, bfloat16 or float16, the same shape and dtype on every rank.
        wire: how summands travel.
        op: "sum" or "avg". Summed, and divided, in float32.
        group: the ranks, some on other hosts than others.
        async_op: return at once, with a handle; all ranks wait for their handles in the same order.

    Returns:
        With `async_op` the handle to wait for, else None.

    Raises:
        TypeError: another dtype.
        ValueError: the tensor isn't contiguous, another op, or a group on one host, where encoding takes longer than
            sending.
        NotImplementedError: on MindSpore.
    """
    size, count = _checked("all_reduce", tensor, tensor, op, wire, group), tensor.numel()
    if size == 1 or not count:
        return _finished(Pending(None, None), async_op)
    codec = _codec()
    if gathers(wire, size, tensor.nbytes // count):
        sent = codec.encode(codec.cut(tensor, 1, count), wire)
        received = codec.like(sent, size, wire.nbytes(count))
        handle = collectives.all_gather(received, sent, group=group, async_op=async_op)
        return _finished(Pending(handle, lambda: codec.fill(tensor, received, wire, count, op)), async_op)
    piece = -(-count // (size * wire.block)) * wire.block
    sent = codec.encode(codec.cut(tensor, size, piece), wire)
    received = codec.like(sent, size, wire.nbytes(piece))
    handle = collectives.all_to_all(received, sent, group=group, async_op=async_op)

    def gather() -> None:
        own, whole = codec.like(tensor, 1, piece), codec.like(tensor, size, piece)
        codec.fill(own, received, wire, piece, op)
        collectives.all_gather(whole, own, group=group)
        codec.move(tensor, whole)

    return _finished(Pending(handle, gather), async_op)


class Pending:
    """A collective under way.

    Args:
        handle: of what is sent; None where that is done.
        land: called once that has come.
    """

    __slots__ = ("_handle", "_land")

    def __init__(self, handle: Any, land: Any) -> None:
        self._handle, self._land = handle, land

    def wait(self) -> None:
        """Wait for what is sent, and reduce it, once."""
        handle, land = self._handle, self._land
        self._handle = self._land = None
        if handle is not None:
            handle.wait()
        if land is not None:
            land()


def _finished(pending: Pending, async_op: bool) -> Pending | None:
    if async_op:
        return pending
    pending.wait()
    return None


def _checked(kind: str, output: Tensor, tensor: Tensor, op: str, wire: Wire, group: Group) -> int:
    """Refuse what no wire carries; get the number of ranks."""
    codec, what = _codec(), f"hp_onesided.{kind}"
    for each in (output, tensor):
        dtype = codec.dtype(each)
        if dtype not in _TAKEN:
            raise TypeError(
                f"{what}: a wire carries {', '.join(_TAKEN)}, got {dtype}, whose values it would round:"
                f" call hp_platform.collectives.{kind}, which sends them as they are."
            )
        if not each.is_contiguous():
            raise ValueError(f"{what}: tensors must be contiguous, got strides {tuple(each.stride())}.")
    if wire.rounding == "stochastic" and tensor.numel() >= 2**31:
        raise ValueError(f"{what}: {tensor.numel()} elements; stochastic rounding tells less than 2^31 apart.")
    if output.dtype is not tensor.dtype:
        raise TypeError(f"{what}: output and tensor must have the same dtype, got {output.dtype} and {tensor.dtype}.")
    if op not in ("sum", "avg"):
        raise ValueError(f"{what}: op is {op!r}; a wire reduces by sum or avg.")
    ranks = get_platform().groups.ranks(group)
    if len(ranks) > 1 and level_of(ranks) == "host":
        raise ValueError(
            f"{what}: ranks {list(ranks)} are on one host, where encoding takes longer than sending: call"
            f" hp_platform.collectives.{kind}."
        )
    return len(ranks)
