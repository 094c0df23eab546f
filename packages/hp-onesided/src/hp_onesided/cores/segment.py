"""Memory of one rank that the others of its host map: a counter, what is called, lines of messages, and two slots.

It has no name, so nothing of it is left once the processes have ended, in whatever way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

from hp_onesided.planning.headers import words_of
from hp_onesided.planning.steps import GRAIN

POSTED, WAITERS, LEFT, HEADERS = 0, GRAIN, 2 * GRAIN, 3 * GRAIN
"""Where the counter is, the number of ranks that sleep on it, whether the rank has left, and the two headers."""
MESSAGES = 8
"""Records of messages to a peer, before there is a file for them."""


@dataclass(frozen=True)
class Shape:
    """The places in the segments of a group.

    Attributes:
        size: ranks of the group.
        slot: bytes of a slot.
    """

    size: int
    slot: int

    @property
    def header(self) -> int:
        """Bytes of a header."""
        return -(-words_of(self.size) * 8 // GRAIN) * GRAIN

    def line(self, peer: int) -> int:
        """Where a peer's line is: two counters and the records of messages, see `hp_onesided.carriers.messages`."""
        return HEADERS + 2 * self.header + peer * (2 + MESSAGES) * GRAIN

    @property
    def slots(self) -> int:
        """Where the first slot is."""
        return -(-(self.line(self.size)) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def nbytes(self) -> int:
        """Bytes of a segment."""
        return self.slots + 2 * self.slot


@dataclass(frozen=True)
class Place:
    """Where a rank's memory is found by the others of its host.

    Attributes:
        pid: its process.
        descriptor: the number of the open file there.
        device: of the file.
        inode: of the file.
    """

    pid: int
    descriptor: int
    device: int
    inode: int

    def __str__(self) -> str:
        return f"{self.pid} {self.descriptor} {self.device} {self.inode}"

    @staticmethod
    def parse(text: str) -> Place:
        """Read what `str` wrote."""
        return Place(*map(int, text.split()))

    def map(self, nbytes: int) -> Segment:
        """Map the memory of another process.

        Args:
            nbytes: of it.

        Raises:
            OSError: that process can't be looked into, or is another one here, as in another pid namespace.
        """
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                raise OSError(f"process {self.pid} is another one here: the ranks are in different pid namespaces")
            return Segment(descriptor, nbytes)
        finally:
            os.close(descriptor)


class Segment:
    """A mapped segment, until the object is gone.

    Args:
        descriptor: of the file, which may be closed afterwards.
        nbytes: of the file.

    Attributes:
        memory: that is mapped; what views it keeps it.
        address: where it is mapped.

    Raises:
        OSError: it can't be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.memory = mmap.mmap(descriptor, nbytes)
        self._bytes = (ctypes.c_char * nbytes).from_buffer(self.memory)
        self.address = ctypes.addressof(self._bytes)

    def words(self, offset: int, count: int) -> tuple[int, ...]:
        """Read numbers of 64 bits."""
        return tuple((ctypes.c_uint64 * count).from_address(self.address + offset))

    def has_left(self) -> bool:
        """Tell whether the rank whose segment this is comes no more."""
        return bool(ctypes.c_uint32.from_address(self.address + LEFT).value)

    def leave(self) -> None:
        """Let those that wait for this rank know that it comes no more."""
        ctypes.c_uint32.from_address(self.address + LEFT).value = 1


def allocate(nbytes: int) -> int:
    """Make a file in memory whose pages are all there, so that no write to it can fail later.

    Args:
        nbytes: of the file.

    Returns:
        Its descriptor.

    Raises:
        OSError: the system has no such files, or not so much memory.
    """
    descriptor = os.memfd_create("hp_onesided", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def place_of(descriptor: int) -> Place:
    """Say where others find a file of this process."""
    status = os.fstat(descriptor)
    return Place(os.getpid(), descriptor, status.st_dev, status.st_ino)
