"""Memory of the same size on each rank of a group, which all of them read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hp_onesided.memory import collectives
from hp_onesided.memory.host import HostMemory
from hp_onesided.memory.stores import DeviceMemory, Store
from hp_onesided.port import Dtype, Group, Tensor, port
from hp_platform.extend import load_port, platform_name

SLOTS = 16


class SymmetricMemory:
    """Shared memory of the same size on each rank; a rank reads and writes that of the others without their help.

    All ranks of the group make it together, and close it together, in the same order where there are several. The
    memory has no name, so nothing is left of it however the ranks end. It starts as zeros. A tensor that views it keeps
    it mapped, also after `close`. Reads and writes of several ranks have no order but what `Signal` and `barrier`
    give them.

    Example:
        >>> with SymmetricMemory(group, 1024) as memory:  # on each of two ranks
        ...     memory.local((4,), torch.float32).fill_(rank)
        ...     memory.barrier()
        ...     print(memory.peer(1 - rank, (4,), torch.float32))
        ...     memory.barrier()

    Args:
        group: of ranks on one host, with gloo for tensors of the host.
        nbytes: of each rank, at least 1; taken at once, so that no write can fail later.
        slots: signals that the memory has room for.
        device: "cpu"; or a CUDA device, by PyTorch's own symmetric memory, on which no collective goes over it, a group
            has one allocation at a time, signals count up by one, and all is in the order of the current stream: what
            waits is the stream, and at a limit it ends in a CUDA error. It was written against PyTorch 2.13, and has
            not run on GPUs.

    Attributes:
        rank: this one, in the group.
        size: ranks of the group.
        nbytes: of each rank.
        slots: as given.

    Raises:
        ValueError: ``nbytes`` or ``slots`` is no such number, or differs between ranks.
        RuntimeError: the ranks are on several hosts, or one of them can't share memory; the text says which and why.
            Each is raised on all ranks alike, before anything is mapped. Or there is none on the device, as on NPUs.
    """

    def __init__(self, group: Group, nbytes: int, *, slots: int = SLOTS, device: Any = "cpu") -> None:
        kind = str(device).partition(":")[0]
        if platform_name() != "torch":
            raise RuntimeError(f"SymmetricMemory: tensors of {platform_name()} can't view shared memory; use PyTorch.")
        if kind not in ("cpu", "cuda"):
            raise RuntimeError(f"SymmetricMemory: there is none on {device}; it is made on cpu and cuda.")
        self._store: Store
        if kind == "cpu":
            self._store = HostMemory(group, nbytes, slots)
        else:
            self._store = load_port(DeviceMemory, f"symmetric_{kind}").open_memory(group, nbytes, slots, device)
        self.rank, self.size, self.nbytes, self.slots = self._store.rank, self._store.size, nbytes, slots
        self._claimed: set[int] = set()

    def __repr__(self) -> str:
        return f"<SymmetricMemory of {self._store.ranks()}, {self.nbytes} bytes each>"

    def local(self, shape: Sequence[int], dtype: Dtype, offset: int = 0) -> Tensor:
        """View this rank's memory as a tensor.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            offset: bytes from the start, a multiple of an element's.

        Raises:
            ValueError: it doesn't fit, or is misaligned.
            RuntimeError: the memory is closed.
        """
        return self.peer(self.rank, shape, dtype, offset)

    def peer(self, rank: int, shape: Sequence[int], dtype: Dtype, offset: int = 0) -> Tensor:
        """View a rank's memory as a tensor.

        Args:
            rank: in the group.
            shape: of the tensor.
            dtype: of the tensor.
            offset: bytes from the start, a multiple of an element's.

        Raises:
            ValueError: there is no such rank, or it doesn't fit, or is misaligned.
            RuntimeError: the memory is closed.
        """
        store, width = self.store(rank), port().width(dtype)
        if any(type(each) is not int or each < 0 for each in shape):
            raise ValueError(f"a shape has numbers from 0, got {tuple(shape)}.")
        wanted = math.prod(shape) * width
        if type(offset) is not int or offset < 0 or offset + wanted > self.nbytes:
            raise ValueError(
                f"{tuple(shape)} of {dtype} takes {wanted} bytes, from offset {offset!r} on; the memory has"
                f" {self.nbytes} bytes."
            )
        if offset % width:
            raise ValueError(f"offset {offset} is no multiple of the {width} bytes of an element of {dtype}.")
        return store.view(rank, offset, shape, dtype)

    def put(self, rank: int, tensor: Tensor, offset: int = 0) -> None:
        """Write a tensor's values, one after the other, to a rank's memory.

        Args:
            rank: in the group.
            tensor: of any device and any strides.
            offset: bytes from the start, a multiple of an element's.

        Raises:
            ValueError: there is no such rank, or it doesn't fit, or is misaligned.
            RuntimeError: the memory is closed.
        """
        port().copy(self.peer(rank, tuple(tensor.shape), tensor.dtype, offset), tensor)

    def get(self, rank: int, output: Tensor, offset: int = 0) -> Tensor:
        """Read a tensor's values from a rank's memory.

        Args:
            rank: in the group.
            output: where they land, of any device and any strides.
            offset: bytes from the start, a multiple of an element's.

        Returns:
            The output.

        Raises:
            ValueError: there is no such rank, or it doesn't fit, or is misaligned.
            RuntimeError: the memory is closed.
        """
        port().copy(output, self.peer(rank, tuple(output.shape), output.dtype, offset))
        return output

    def barrier(self) -> None:
        """Wait until all ranks have come here; what they wrote before is seen afterwards.

        Raises:
            LostRankError: the process of a rank has ended.
            TimeoutError: one did not come within the group's limit.
            RuntimeError: ranks call differently, or one has closed the memory.
        """
        self.store().barrier()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Concatenate each rank's tensor: Note [Two meetings].

        Like the three that follow it is a call of all ranks, returns when the output is there and all ranks have read
        this rank's input, and raises what `barrier` does. Inputs may be at another offset on each rank.

        Args:
            output: of any memory of the host, of ``size`` times the tensor's values; the tensor may be its own part.
            tensor: contiguous, in this rank's memory: a view from `local`.

        Raises:
            ValueError: the tensor is elsewhere, or the output does not fit it or overlaps it.
        """
        collectives.all_gather(self._host(), output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> None:
        """Reduce, in the order of the ranks, and keep a piece.

        Args:
            output: of any memory of the host, of the tensor's values divided by ``size``; it may be the own part of the
                tensor.
            tensor: contiguous, in this rank's memory.
            op: "sum", "avg", "min", "max" or "product"; bfloat16 and float16 are reduced in float32 and rounded once.

        Raises:
            ValueError: as of `all_gather`; or the reduction is unknown.
            TypeError: the dtype has no such reduction.
        """
        collectives.reduce_scatter(self._host(), output, tensor, op)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce in place, in the order of the ranks: each rank a share, which the others read then.

        Args:
            tensor: contiguous, in this rank's memory.
            op: as of `reduce_scatter`.

        Raises:
            ValueError: as of `all_gather`; or the reduction is unknown.
            TypeError: the dtype has no such reduction.
        """
        collectives.all_reduce(self._host(), tensor, op)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> None:
        """Send each rank a piece, and receive one from each.

        Args:
            output: of any memory of the host.
            tensor: contiguous, in this rank's memory.
            received: rows from each rank; empty are equal numbers.
            sent: rows to each rank; empty are equal numbers.

        Raises:
            ValueError: as of `all_gather`; or the rows don't add up.
        """
        collectives.all_to_all(self._host(), output, tensor, received, sent)

    def close(self) -> None:
        """Wait until all ranks close the memory, and let go of it; once closed, nothing.

        Raises:
            LostRankError: the process of a rank has ended. As after the other two, the memory is closed here.
            TimeoutError: one did not come within the group's limit.
            RuntimeError: ranks call differently, or one has left in an error.
        """
        if not self._store.is_open():
            return
        try:
            self._store.finish()
        finally:
            self._store.leave()

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the memory; after an error without the others, which learn of it where they wait for this rank."""
        if kind is None:
            self.close()
        else:
            self._store.leave()

    def _host(self) -> HostMemory:
        """Get the memory of the host, which collectives go over."""
        store = self.store()
        if not isinstance(store, HostMemory):
            raise RuntimeError("collectives go over symmetric memory of the host alone; use the group's own.")
        return store

    def store(self, rank: int = 0) -> Store:
        """Get what holds the memory, if it is open and has such a rank; for `Signal`."""
        self._store.check()
        if type(rank) is not int or not 0 <= rank < self.size:
            raise ValueError(f"rank {rank!r} is not in the group, whose {self.size} ranks count from 0.")
        return self._store

    def claim(self, slot: int) -> None:
        """Give a slot to a signal, the only one that it has."""
        self.store()
        if type(slot) is not int or not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot!r} is not in the memory, whose {self.slots} slots count from 0.")
        if slot in self._claimed:
            raise ValueError(
                f"slot {slot} has a signal already, and a second one would begin with the counts of the first. Choose"
                " another slot, or use the same signal."
            )
        self._claimed.add(slot)
