"""Signals between ranks of symmetric memory: counters that only grow, of one allocation, one group and one use."""

from __future__ import annotations

from dataclasses import dataclass

from hp_onesided.memory.symmetric import SymmetricMemory


@dataclass(frozen=True)
class Signal:
    """A counter from each rank to each rank, by which one tells another that something is done.

    What a rank wrote to another's memory before `add` is there when the other's `wait` returns. A slot has one signal
    in the life of the memory, and its counters never fall: so no wait is completed by what was meant for another
    group, another allocation or an earlier use. Each rank makes the signal by itself; nothing is communicated.

    Example:
        >>> ready = Signal(memory, 0)
        >>> if rank == 0:
        ...     memory.put(1, torch.ones(3))
        ...     ready.add(1)
        ... else:
        ...     ready.wait(1, rank=0)
        ...     print(memory.local((3,), torch.float32))

    Args:
        memory: of the group.
        slot: from 0; the memory has `SymmetricMemory.slots` of them.

    Raises:
        ValueError: there is no such slot, or it has a signal already.
        RuntimeError: the memory is closed.
    """

    memory: SymmetricMemory
    slot: int

    def __post_init__(self) -> None:
        self.memory.claim(self.slot)

    def add(self, rank: int, n: int = 1) -> None:
        """Count up at a rank, after all that this one wrote before.

        Args:
            rank: in the group; it may be this one.
            n: what is added, at least 1.

        Raises:
            ValueError: there is no such rank, or ``n`` is less than 1.
            RuntimeError: the memory is closed.
        """
        store = self.memory.store(rank)
        if type(n) is not int or n < 1:
            raise ValueError(f"a signal only grows: n has to be a number from 1, got {n!r}.")
        store.add(self.slot, rank, n)

    def count(self, rank: int) -> int:
        """Get what a rank has added so far at this one.

        Args:
            rank: in the group.
        """
        return self.memory.store(rank).count(self.slot, rank)

    def wait(self, value: int, rank: int | None = None, limit: float | None = None) -> None:
        """Wait until a rank has added so much, in all, at this one. It sleeps meanwhile.

        Args:
            value: the sum of all ``n`` that the rank has added since the signal was made.
            rank: in the group; None is each other rank, one after the other.
            limit: seconds for each; None is the limit of the group.

        Raises:
            ValueError: there is no such rank.
            LostRankError: the process of a rank of the group has ended; ``ranks`` names it.
            TimeoutError: it did not come in time; the text names the signal, the rank, what it has added and whether
                its process is stopped. It may be waited for again.
            RuntimeError: the memory is closed, here or by the rank.
        """
        own = self.memory.rank
        ranks = [other for other in range(self.memory.size) if other != own] if rank is None else [rank]
        for each in ranks:
            self.memory.store(each).wait(self.slot, each, value, limit)
