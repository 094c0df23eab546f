"""Symmetric memory of GPUs by `torch.distributed._symmetric_memory`, whose every name may change: each is looked for.

Note [One allocation a group]
    The words in which a GPU signals belong to a group there, and two allocations of it use the same ones: a signal of
    one completes a wait of the other. So a group has one allocation at a time, and a signal one place in it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hp_onesided.memory.stores import compare, refusal
from hp_platform import get_group_local_rank, get_process_group_ranks
from hp_platform.extend import agree, share_bytes

MODULE = "torch.distributed._symmetric_memory"
_NEEDED = ("empty", "rendezvous")
_OF_HANDLE = ("get_buffer", "put_signal", "wait_signal", "barrier")
_WORD = 4  # bytes of a signal
_groups: set[str] = set()


class CudaMemory:
    """The memory of one allocation on GPUs; a `hp_onesided.memory.stores.Store`.

    All is in the order of the current stream; `wait` returns before the signal has come, and the stream waits. A signal
    there is a bit: `add` takes it from 0 to 1 once the one before was waited for, so it counts up by one at a time.

    Args:
        group: of ranks whose GPUs reach each other.
        nbytes: of each rank.
        slots: signals.
        device: of this rank.
    """

    def __init__(self, group: Any, nbytes: int, slots: int, device: Any) -> None:
        self.members = tuple(get_process_group_ranks(group))
        self.rank, self.size = get_group_local_rank(group), len(self.members)
        self._name, self._slots, self._seen = group.group_name, slots, {}
        share, refused = partial(share_bytes, group=group), partial(refusal, self.members)
        self._buffer: Any = None
        self._handle: Any = None
        told = agree(lambda: self._offer(nbytes, slots, device), refused, share, str)
        compare(self.members, [json.loads(each) for each in told])
        agree(lambda: self._open(group, nbytes), refused, share, str)
        _groups.add(self._name)
        self._buffer.zero_()
        self.barrier()

    def _offer(self, nbytes: int, slots: int, device: Any) -> bytes:
        self._module: Any = importlib.import_module(MODULE)
        handle = sys.modules.get("torch._C._distributed_c10d")
        owners = [(self._module, _NEEDED), (getattr(handle, "_SymmetricMemory", None), _OF_HANDLE)]
        missing = [name for owner, names in owners for name in names if not hasattr(owner, name)]
        if missing:
            raise RuntimeError(f"{MODULE} of torch {torch.__version__} has no {', '.join(missing)}")
        if self._name in _groups:
            raise RuntimeError("the group has symmetric memory already, and signals of both would meet; make another")
        words = getattr(self._module, "get_signal_pad_size", lambda: 2048)() // _WORD
        if type(slots) is int and (slots + 1) * self.size > words:
            raise RuntimeError(f"{slots} slots of {self.size} ranks need more than the {words} words of its signal pad")
        self._device = torch.device(device)
        return json.dumps({"nbytes": nbytes, "slots": slots}, default=repr).encode()

    def _open(self, group: Any, nbytes: int) -> bytes:
        try:
            self._buffer = self._module.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._handle = self._module.rendezvous(self._buffer, group)
        except RuntimeError as error:
            raise RuntimeError(f"{MODULE}: {error}") from None
        return b""

    def ranks(self) -> str:
        """Write the group's ranks."""
        return f"ranks {list(self.members)}"

    def check(self) -> None:
        """Refuse a use of memory that is closed."""
        if not self.is_open():
            raise RuntimeError("the symmetric memory is closed.")

    def is_open(self) -> bool:
        """Tell whether this process has not let go of the memory."""
        return self._handle is not None

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor of a rank's memory."""
        return self._handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def add(self, slot: int, rank: int, n: int) -> None:
        """Signal to a rank."""
        if n != 1:
            raise ValueError(f"on {self._device.type} a signal counts up by one at a time, got n={n}.")
        self._handle.put_signal(rank, channel=slot)

    def count(self, slot: int, rank: int) -> int:
        """Get how often this rank has waited for a signal; what has come is known to the GPU alone."""
        return self._seen.get((slot, rank), 0)

    def wait(self, slot: int, rank: int, value: int, limit: float | None) -> None:
        """Let the stream wait for a signal from a rank."""
        while self.count(slot, rank) < value:
            self._handle.wait_signal(rank, channel=slot, timeout_ms=round(1000 * (limit or 0)))
            self._seen[slot, rank] = self.count(slot, rank) + 1

    def barrier(self) -> None:
        """Let the stream wait for all ranks."""
        self._handle.barrier(channel=self._slots)

    def finish(self) -> None:
        """Wait until all ranks close the memory."""
        self.barrier()
        torch.cuda.synchronize(self._device)

    def leave(self) -> None:
        """Let go of the memory."""
        if self.is_open():
            self._handle = self._buffer = None
            _groups.discard(self._name)


def open_memory(group: Any, nbytes: int, slots: int, device: Any) -> CudaMemory:
    """Make the memory of one allocation."""
    return CudaMemory(group, nbytes, slots, device)
