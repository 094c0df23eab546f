"""The steps of each collective as data: what a rank copies, posts, waits for and reduces, round by round.

Note [Two slots]
    Each rank has a counter and two slots of memory, which the others of its host read. In a round it writes to a slot,
    posts (counts up by one), waits until the others have counted as far, and reads their slots; the next round takes
    the other slot. A slot is written again two rounds later: by then this rank has seen all others post the round
    between, which each of them does once it has read. So one wait a round is enough, and no round ends with a barrier,
    as long as each rank posts and waits for all others in every round. The sender of a broadcast that waits for nobody
    would write to what others still read.

A step of a round says its places in the first round; from one round to the next they move on by a stride. So a program
is as long for a gigabyte as for a kilobyte. Both cores run these programs, and the tests run all interleavings of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

KINDS = ("barrier", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "close")
"""The collectives, and the end of symmetric memory; ranks tell each other their numbers."""
STEPS = ("copy_in", "post", "wait", "check", "copy", "copy_out", "reduce", "reduce_in")
"""The kinds of steps, likewise."""
GRAIN = 64
"""Bytes that pieces are multiples of: a cache line, which no element of any dtype crosses."""
SMALL = 32768
"""Bytes up to which each rank reduces a whole tensor of an all-reduce; above, each its share."""
_SLOT = 2**18
_LARGEST_SLOT = 2**22


@dataclass(frozen=True)
class Step:
    """What a rank does at one place of a round.

    Attributes:
        kind: "copy_in": from the input to the own slot that is posted next; "post": count up; "wait": until a peer has
            counted as far; "check": that all ranks called the same, in the first round alone; "copy": from the input to
            the output; "copy_out": from a peer's slot to the output; "reduce": all ranks' slots to the output;
            "reduce_in": all ranks' slots to the own slot that is posted next.
        peer: the rank that is waited for or read.
        slot: where in a slot, in bytes.
        at: where in the input ("copy_in") or the output, in bytes, in the first round.
        own: where the own part is in the input, for "copy", "reduce" and "reduce_in".
        piece: bytes of a round, at most.
        stride: bytes by which `at` and `own` move on in each round.
        end: where, in what `at` counts, this step's bytes end.
    """

    kind: Literal["copy_in", "post", "wait", "check", "copy", "copy_out", "reduce", "reduce_in"]
    peer: int = 0
    slot: int = 0
    at: int = 0
    own: int = 0
    piece: int = 0
    stride: int = 0
    end: int = 0

    def span(self, number: int) -> tuple[int, int, int]:
        """Get a round's place in what `at` counts, the own part's place, and the number of bytes.

        Args:
            number: of the round, from 0.
        """
        moved = number * self.stride
        at = self.at + moved
        return at, self.own + moved, max(0, min(self.piece, self.end - at))


@dataclass(frozen=True)
class Program:
    """The steps of one rank in a collective.

    Attributes:
        steps: of each round.
        rounds: how often they are done; 0 where only what all ranks tell each other says so, as in an all-to-all.
        chunk: bytes that a rank sends another one in a round of an all-to-all.
    """

    steps: tuple[Step, ...]
    rounds: int = 1
    chunk: int = 0


def slot_bytes(size: int) -> int:
    """Choose the bytes of a slot for a group of so many ranks: 256 KiB a rank, at most about 4 MiB."""
    step = GRAIN * size
    return max(min(_SLOT * size, _LARGEST_SLOT) // step, 1) * step


def rounds_for(counts: Sequence[Sequence[int]], chunk: int) -> int:
    """Count the rounds of an all-to-all, once it is known what each rank sends each other one.

    Args:
        counts: bytes from each rank (first) to each (second).
        chunk: of the program.
    """
    most = max((count for one, row in enumerate(counts) for other, count in enumerate(row) if one != other), default=0)
    return max(1, -(-most // chunk))


def barrier(rank: int, size: int) -> Program:
    """Wait for all."""
    return Program((Step("post"), *_all_come(rank, size)))


def all_gather(rank: int, size: int, nbytes: int, slot: int) -> Program:
    """Concatenate each rank's tensor.

    Args:
        rank: this one, in the group.
        size: of the group.
        nbytes: of the input.
        slot: bytes of a slot.
    """
    rounds, piece = _rounds(nbytes, slot)

    def part(kind: Literal["copy_out", "copy"], peer: int) -> Step:
        return Step(kind, peer, at=peer * nbytes, piece=piece, stride=piece, end=(peer + 1) * nbytes)

    steps = (
        Step("copy_in", piece=piece, stride=piece, end=nbytes),
        Step("post"),
        part("copy", rank),
        *_all_come(rank, size),
        *(part("copy_out", peer) for peer in _others(rank, size)),
    )
    return Program(steps, rounds)


def reduce_scatter(rank: int, size: int, nbytes: int, slot: int) -> Program:
    """Reduce, and keep a piece.

    Args:
        rank: this one, in the group.
        size: of the group.
        nbytes: of the output.
        slot: bytes of a slot.
    """
    rounds, piece = _rounds(nbytes, slot // size)

    def send(peer: int) -> Step:
        return Step("copy_in", peer, peer * piece, peer * nbytes, piece=piece, stride=piece, end=(peer + 1) * nbytes)

    steps = (
        *(send(peer) for peer in _others(rank, size)),
        Step("post"),
        *_all_come(rank, size),
        Step("reduce", slot=rank * piece, own=rank * nbytes, piece=piece, stride=piece, end=nbytes),
    )
    return Program(steps, rounds)


def all_reduce(rank: int, size: int, nbytes: int, slot: int) -> Program:
    """Reduce: each rank all of it if it is small or there are two, else each its share, which the others then read.

    Args:
        rank: this one, in the group.
        size: of the group.
        nbytes: of the tensor.
        slot: bytes of a slot.
    """
    rounds, piece = _rounds(nbytes, slot)
    send = Step("copy_in", piece=piece, stride=piece, end=nbytes)
    if size == 2 or nbytes <= SMALL:
        reduce = Step("reduce", piece=piece, stride=piece, end=nbytes)
        return Program((send, Step("post"), *_all_come(rank, size), reduce), rounds)
    each = _grains(-(-piece // size))

    def share(kind: Literal["reduce_in", "copy_out"], peer: int) -> Step:
        first = min(peer * each, piece)
        return Step(kind, peer, first, first, first, min(each, piece - first), piece, nbytes)

    steps = (
        send,
        Step("post"),
        *_all_come(rank, size),
        share("reduce_in", rank),
        Step("post"),
        share("copy_out", rank),
        *(step for peer in _others(rank, size) for step in (Step("wait", peer), share("copy_out", peer))),
    )
    return Program(steps, rounds)


def all_to_all(rank: int, size: int, sent: Sequence[int], received: Sequence[int], slot: int) -> Program:
    """Send each rank a piece, and receive one from each.

    Args:
        rank: this one, in the group.
        size: of the group.
        sent: bytes to each rank.
        received: bytes from each rank.
        slot: bytes of a slot.
    """
    chunk = slot // size // GRAIN * GRAIN

    def part(kind: Literal["copy_in", "copy_out"], peer: int, place: int, counts: Sequence[int]) -> Step:
        first = sum(counts[:peer])
        return Step(kind, peer, place * chunk, first, 0, chunk, chunk, first + counts[peer])

    own, first = sum(sent[:rank]), sum(received[:rank])
    kept = sent[rank]
    steps = (
        *(part("copy_in", peer, peer, sent) for peer in _others(rank, size)),
        Step("post"),
        *_all_come(rank, size),
        Step("copy", rank, at=first, own=own, piece=kept, stride=kept, end=first + kept),
        *(part("copy_out", peer, rank, received) for peer in _others(rank, size)),
    )
    return Program(steps, 0, chunk)


def broadcast(rank: int, size: int, root: int, nbytes: int, slot: int) -> Program:
    """Copy one rank's tensor to the others.

    Args:
        rank: this one, in the group.
        size: of the group.
        root: the sender, in the group.
        nbytes: of the tensor.
        slot: bytes of a slot.
    """
    rounds, piece = _rounds(nbytes, slot)
    move = Step("copy_in" if rank == root else "copy_out", root, piece=piece, stride=piece, end=nbytes)
    sends, reads = ((move,), ()) if rank == root else ((), (move,))
    return Program((*sends, Step("post"), *_all_come(rank, size), *reads), rounds)


def _others(rank: int, size: int) -> Iterator[int]:
    """Go through the other ranks, the next one first, so that not all read the same one at once."""
    return ((rank + ahead) % size for ahead in range(1, size))


def _all_come(rank: int, size: int) -> tuple[Step, ...]:
    return (*(Step("wait", peer) for peer in _others(rank, size)), Step("check"))


def _grains(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN


def _rounds(nbytes: int, most: int) -> tuple[int, int]:
    """Split bytes into equal pieces of at most so many; an empty tensor has a round, too."""
    rounds = max(1, -(-nbytes // (most // GRAIN * GRAIN)))
    return rounds, _grains(-(-nbytes // rounds))
