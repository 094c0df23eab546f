"""Detection of lost ranks, over TCP, once a collective has failed and never before.

Note [Lost ranks]
    A backend says "Connection closed by peer [10.0.0.7]:45123", or on a rank further on only that a rank which failed
    because of another one has gone. So each process keeps a listening socket that nobody reads. While the process
    lives the kernel completes connections to it; when it ends, in whatever way, they are refused or reset. A rank whose
    collective failed connects to all others and watches the connections: what ends is gone. It then tells those that
    live whom it found, and they find that in their own sockets when their turn comes. A rank that is gone and had told
    of another one was no cause but a consequence. No message is needed before something fails.

    A backend tells of a rank that ended to those that wait for that rank alone. So each process has a thread that
    sleeps until another one connects; once that tells of a loss, the thread breaks this process's own connections, and
    whatever it waits in fails as if the lost rank were its neighbour. A rank that raises, and lives, can hold up the
    others just as well: `give_up` tells them its error in the same way.

    A connection that the other side has accepted stays open until that process ends, so that its end says the same.

    Whoever reaches the port can connect. Each listener draws a token, which is published beside its address, in the
    store that only the job's ranks read; a connection that does not begin with it is closed and what it says unread.
    Only so many connections are kept, each with only so many unread bytes, and those without a token go first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hp_platform.failures.listening import Address, Listener, is_another, own_host

__all__ = [
    "Address",
    "FailedRankError",
    "Listener",
    "LostRankError",
    "find_lost",
    "lost_text",
    "own_host",
    "tell_failure",
]

LIMIT = 5.0
SETTLE = 0.2
_POLL = 0.05
_TEXT = 4000  # characters of an error that others are told
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


class LostRankError(RuntimeError):
    """A collective can't complete, because the process of a rank has ended.

    Args:
        text: the message, with the ranks and the collective.
        ranks: their global ranks, ascending.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


class FailedRankError(LostRankError):
    """A collective can't complete, because a rank raised and gave up; its process lives, so ``ranks`` are none.

    Args:
        texts: what each rank that gave up said, by its global rank.
    """

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = dict(texts)
        said = "; ".join(f"rank {rank} gave up: {text}" for rank, text in sorted(self.texts.items()))
        super().__init__(f"{said}. The ranks can't go on together; restart the job from its last checkpoint")

    def __reduce__(self) -> tuple[type, tuple[dict[int, str]]]:
        return FailedRankError, (self.texts,)


@dataclass(frozen=True)
class Lost:
    """Ranks that were lost.

    Attributes:
        ranks: global ranks that were lost, ascending; empty where all live.
        silent: these don't answer at all, as when a host is down; else their processes have ended.
    """

    ranks: tuple[int, ...]
    silent: bool = False


def find_lost(
    listener: Listener,
    peers: Mapping[int, Address],
    group: Collection[int],
    *,
    limit: float = LIMIT,
    settle: float = SETTLE,
) -> Lost:
    """Find out whose loss a failed collective comes from, and tell those that live.

    Args:
        listener: this rank's.
        peers: where the others listen, by global rank.
        group: the global ranks that took part in the collective.
        limit: seconds to wait for somebody's end; it may come a moment after what it caused.
        settle: seconds to wait for further ones once there is one.
    """
    inquiry = _Inquiry(listener, peers)
    try:
        lost = inquiry.run(group, limit, settle)
        if lost.ranks:
            inquiry.tell(lost.ranks)
        return lost
    finally:
        inquiry.close()


def tell_failure(listener: Listener, peers: Mapping[int, Address], text: str, *, limit: float = LIMIT) -> None:
    """Tell all other ranks that this one gives up.

    Args:
        listener: this rank's.
        peers: where the others listen, by global rank.
        text: what this rank raised.
        limit: seconds to wait for those that don't answer.
    """
    listener.failed[listener.rank] = text[:_TEXT]
    inquiry = _Inquiry(listener, peers)
    try:
        inquiry.connect(limit)
        inquiry.say(b"!" + json.dumps(text[:_TEXT]).encode() + b"\n")
    finally:
        inquiry.close()


class _Inquiry:
    """Connections to all peers at once."""

    def __init__(self, listener: Listener, peers: Mapping[int, Address]) -> None:
        self.listener = listener
        self.peers = peers
        self.abroad = False
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.connected: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        for rank, address in peers.items():
            if rank != listener.rank and is_another(address, listener.address):
                self._connect(rank, address)

    def _connect(self, rank: int, address: Address) -> None:
        connection = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        connection.setblocking(False)
        code = connection.connect_ex((address.host, address.port))
        if code in (0, errno.EINPROGRESS):
            self.silent.add(rank)  # until it answers
            self.selector.register(connection, selectors.EVENT_WRITE, rank)
        else:
            connection.close()
            (self.gone if code in _GONE else self.silent).add(rank)

    def connect(self, limit: float) -> None:
        """Wait until all that answer have done so."""
        deadline = time.monotonic() + limit
        while self.silent and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(min(left, _POLL)):
                self._answer(key.fileobj, key.data)  # type: ignore[arg-type]

    def run(self, group: Collection[int], limit: float, settle: float) -> Lost:
        deadline, settling = time.monotonic() + limit, False
        while (left := deadline - time.monotonic()) > 0:
            if self.selector.get_map():
                for key, _ in self.selector.select(min(left, _POLL)):
                    self._answer(key.fileobj, key.data)  # type: ignore[arg-type]
            else:
                time.sleep(min(left, _POLL))
            self.listener.read()
            if self.listener.failed:
                break
            if not settling and (self.gone or self.listener.told):
                deadline, settling = min(deadline, time.monotonic() + settle), True
        self.listener.read()
        causes = self.gone - self.listener.told.keys()
        lost = causes & set(group)
        for sender, ranks in self.listener.told.items():
            if sender in self.peers:
                lost |= ranks & (self.peers.keys() | set(group))
        lost = (lost or causes) - {self.listener.rank}
        if lost:
            return Lost(tuple(sorted(lost)))
        # A host is down if others answer and it doesn't; where no other host answers, there may be a firewall.
        silent = tuple(sorted(self.silent & set(group))) if self.abroad else ()
        return Lost(silent, silent=bool(silent))

    def _answer(self, connection: socket.socket, rank: int) -> None:
        if rank in self.connected:
            with contextlib.suppress(BlockingIOError):
                try:
                    ended = not connection.recv(1)
                except ConnectionError:
                    ended = True
                if ended:
                    self._drop(connection)
                    self.gone.add(rank)
            return
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            self.silent.discard(rank)
            self.abroad = self.abroad or self.peers[rank].network != self.listener.address.network
            self.connected[rank] = connection
            self.selector.modify(connection, selectors.EVENT_READ, rank)
            with contextlib.suppress(OSError):  # its end is read next
                connection.send(f"{self.peers[rank].token} {self.listener.rank}\n".encode())
            return
        self._drop(connection)
        if code in _GONE:
            self.silent.discard(rank)
            self.gone.add(rank)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()

    def tell(self, lost: Sequence[int]) -> None:
        self.say(" ".join(map(str, lost)).encode() + b"\n")

    def say(self, line: bytes) -> None:
        for rank, connection in self.connected.items():
            if rank not in self.gone:
                with contextlib.suppress(OSError):
                    connection.send(line)

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            self._drop(key.fileobj)  # type: ignore[arg-type]
        self.selector.close()


def lost_text(lost: Lost, kind: str, group: Sequence[int], rank: int) -> str:
    """Write the text of a `LostRankError`.

    Args:
        lost: the result of `find_lost`.
        kind: the collective that failed, as "all_gather".
        group: the global ranks that took part in it.
        rank: this one's.
    """
    several = len(lost.ranks) > 1
    names = ", ".join(map(str, lost.ranks))
    if lost.silent:
        how = "their hosts don't answer" if several else "its host doesn't answer"
    else:
        how = "their processes have ended" if several else "its process has ended"
    among = f"{list(group)}" if len(group) <= 16 else f"{group[0]} to {group[-1]} ({len(group)} ranks)"
    who = f"rank{'s' if several else ''} {names}"
    return (
        f"{who} {'were' if several else 'was'} lost: {how}, or left the process group. So the {kind} over ranks {among}"
        f" failed on rank {rank}. See the output of {who} for why, and restart the job from its last checkpoint"
    )
