"""Collectives on mccl, which lacks some of them, and some dtypes in those that it has.

Note [Bytes on the host]: what mccl moves are bytes, so that every dtype moves; the pieces are sharded, put together and
(where mccl can't) reduced with NumPy in the tensors' own memory. `Tensor.data_ptr` waits for the operators that still
write to a tensor, and points into the base's memory for a view, which no operator of MindSpore's CPU can write to. Each
collective has done its work, or raised what failed in it, when it returns.

Note [One queue for two ranks]: mccl has a queue of bytes from a rank to another, for all groups, tags and collectives.
A receive takes what is next, whatever it was sent for and however long it is; a send copies its bytes and does not wait
for its receiver. A receive that is under way stops every operator behind it. So a message is led by a header (group,
tag, bytes), what is for another receive is put by, and a receive reads from the queue no sooner than its handle is
waited for. Messages must have been received before the same two ranks meet in a collective: it takes from the same
queue.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor
from mindspore.ops.auto_generate.gen_ops_prim import (
    dist_comm_all_gather_op,
    dist_comm_all_reduce_op,
    dist_comm_barrier_op,
    dist_comm_broadcast_op,
    dist_comm_irecv_op,
    dist_comm_isend_op,
)

from hp_platform.mindspore import groups

_NAMES = {"sum": "sum", "min": "min", "max": "max", "product": "prod"}
_REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
_REDUCED_BY_MCCL = frozenset({"float32", "float16", "bfloat16", "int8", "int16", "int32", "int64"})
_TAG = 0


def host_array(tensor: Any) -> np.ndarray:
    """Get a CPU tensor's memory as an array of its shape and dtype; what is written to it is in the tensor.

    Args:
        tensor: contiguous; may be a view of a part of another. It must outlive the array.
    """
    dtype = _numpy_dtype(tensor.dtype)
    if tensor.numel() == 0:
        return np.empty(tensor.shape, dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(tensor.shape)


@functools.cache
def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return mindspore.mint.empty((0,), dtype=dtype).asnumpy().dtype


def _wire(array: np.ndarray) -> Any:
    """Make a tensor of an array's bytes, in its memory."""
    return Tensor.from_numpy(array.reshape(-1).view(np.uint8))


def _finish() -> None:
    _pynative_executor.sync()


def all_reduce(tensor: Any, op: str, group: str, async_op: bool) -> None:
    """Reduce in place."""
    _all_reduce(host_array(tensor), op, group)


def _all_reduce(array: np.ndarray, op: str, group: str) -> None:
    size = groups.size(group)
    if array.size == 0 or size == 1:
        return
    reduction = "sum" if op == "avg" else op
    if array.dtype.name in _REDUCED_BY_MCCL:
        dist_comm_all_reduce_op(Tensor.from_numpy(array.reshape(-1)), _NAMES[reduction], group, False)
        _finish()
    else:
        pieces = np.empty((size, *array.shape), array.dtype)
        _all_gather(pieces, array, group)
        _REDUCE[reduction].reduce(pieces, axis=0, dtype=array.dtype, out=array)
    if op == "avg":
        np.divide(array, size, out=array, casting="unsafe")


def all_gather(output: Any, tensor: Any, group: str, async_op: bool) -> None:
    """Concatenate each rank's tensor."""
    _all_gather(host_array(output), host_array(tensor), group)


def _all_gather(output: np.ndarray, array: np.ndarray, group: str) -> None:
    size = groups.size(group)
    if array.size == 0:
        return
    rows = output.reshape(size, -1)
    if size == 1:
        rows[0] = array.reshape(-1)
        return
    dist_comm_all_gather_op([_wire(row) for row in rows], _wire(array), size, group, False)
    _finish()


def reduce_scatter(output: Any, tensor: Any, op: str, group: str, async_op: bool) -> None:
    """Reduce a copy and keep this rank's piece."""
    whole = host_array(tensor).copy()
    _all_reduce(whole, op, group)
    piece = host_array(output)
    piece[...] = whole.reshape(groups.size(group), *piece.shape)[groups.rank(group)]


def all_to_all(
    output: Any, tensor: Any, received: Sequence[int], sent: Sequence[int], group: str, async_op: bool
) -> None:
    """Send to each rank in turn, starting with the next; no sizes are equal ones."""
    size, rank = groups.size(group), groups.rank(group)
    into, out = _cut(host_array(output), received, size), _cut(host_array(tensor), sent, size)
    into[rank][...] = out[rank]
    wires = []  # their memory is in use until all is done
    for shift in range(1, size):
        to, source = (rank + shift) % size, (rank - shift) % size
        if out[to].size:
            wires.append(_wire(out[to]))
            dist_comm_isend_op(wires[-1], to, group, _TAG)
        if into[source].size:
            wires.append(_wire(into[source]))
            dist_comm_irecv_op(wires[-1], _TAG, source, group)
    _finish()


def _cut(array: np.ndarray, sizes: Sequence[int], parts: int) -> list[np.ndarray]:
    ends = np.cumsum(sizes) if sizes else np.arange(1, parts + 1) * (array.shape[0] // parts)
    return np.split(array, ends[:-1])


def broadcast(tensor: Any, group_src: int, group: str, async_op: bool) -> None:
    """Copy from one rank."""
    array = host_array(tensor)
    if array.size and groups.size(group) > 1:
        dist_comm_broadcast_op(_wire(array), group_src, groups.rank(group), group, False)
        _finish()


def send(tensor: Any, dst: int, group: str, tag: int, async_op: bool) -> None:
    """Send to one rank, with a header: Note [One queue for two ranks]."""
    array = host_array(tensor)
    for part in (np.array([*_key(group, tag), array.nbytes], np.int64), array):
        if part.size:
            dist_comm_isend_op(_wire(part), dst, group, _TAG)
            _finish()


def recv(tensor: Any, src: int, group: str, tag: int, async_op: bool) -> Receive:
    """Receive from one rank when the handle is waited for."""
    return Receive(tensor, src, group, tag)


Key = tuple[int, int, int]
"""What messages are in order among: the sender's global rank, the group's digest, the tag."""

_expected: defaultdict[Key, deque[Receive]] = defaultdict(deque)
_put_by: defaultdict[Key, deque[np.ndarray]] = defaultdict(deque)


class Receive:
    """A receive that is filled when it is waited for, after those before it of its sender, group and tag."""

    def __init__(self, tensor: Any, src: int, group: str, tag: int) -> None:
        self.tensor, self.src, self.group, self.tag = tensor, src, group, tag
        self.key = groups.members(group)[src], *_key(group, tag)
        _expected[self.key].append(self)

    def wait(self) -> None:
        """Wait for the message.

        Raises:
            ValueError: the message has another size.
        """
        expected = _expected[self.key]
        while self in expected:
            expected.popleft()._fill()

    def _fill(self) -> None:
        array, put_by = host_array(self.tensor), _put_by[self.key]
        while not put_by:
            data = self._next()
            if data is not None:
                put_by.append(data)
        data = put_by[0]
        if data.nbytes != array.nbytes:  # the message stays, for a receive that fits
            raise ValueError(
                f"recv: rank {self.src} of {self.group!r} sent {data.nbytes} bytes with tag {self.tag}; the tensor of"
                f" shape {tuple(array.shape)} and {array.dtype} has {array.nbytes}. Receive with the shape and dtype"
                " that were sent."
            )
        array[...] = put_by.popleft().view(array.dtype).reshape(array.shape)

    def _next(self) -> np.ndarray | None:
        """Read a message from the queue; put it by and return None where it is for another receive."""
        header = self._read(np.empty(3, np.int64))
        data = self._read(np.empty(int(header[2]), np.uint8))
        key = self.key[0], int(header[0]), int(header[1])
        if key == self.key:
            return data
        _put_by[key].append(data)
        return None

    def _read(self, array: np.ndarray) -> np.ndarray:
        if array.size:
            dist_comm_irecv_op(_wire(array), _TAG, self.src, self.group)
            _finish()
        return array


def _key(group: str, tag: int) -> tuple[int, int]:
    return zlib.crc32(group.encode()), tag


def barrier(group: str) -> None:
    """Wait for all ranks."""
    dist_comm_barrier_op(group, False)
    _finish()
