"""Which rank was lost: asked over TCP once a collective has failed, and never before.

Note [Lost ranks]
    A backend says "Connection closed by peer [10.0.0.7]:45123", or on a rank further on only that a rank which failed
    because of another one has gone. So each process keeps a listening socket that nobody reads. While the process
    lives the kernel completes connections to it; when it ends, in whatever way, they are refused or reset. A rank whose
    collective failed connects to all others and watches the connections: what ends is gone. It then tells those that
    live whom it found, and they find that in their own sockets when their turn comes. A rank that is gone and had told
    of another one was no cause but a consequence. No thread and no message is needed before something fails.

    A connection that the other side has accepted stays open until that process ends, so that its end says the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Address", "Listener", "LostRankError", "find_lost", "lost_text", "own_host"]

LIMIT = 5.0
SETTLE = 0.2
_POLL = 0.05
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_NOWHERE = ("192.0.2.1", 9)  # reserved for documentation; nothing is sent there


class LostRankError(RuntimeError):
    """A collective can't complete, because the process of a rank has ended.

    Args:
        text: which ranks, and what it stopped.
        ranks: their global ranks, ascending.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Attributes:
        host: its IP address.
        port: the port.
        network: names the network stack; the loopback address means something only inside of it.
    """

    host: str
    port: int
    network: str

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.network}"

    @staticmethod
    def parse(text: str) -> Address:
        """Read what `str` wrote."""
        host, port, network = text.split(" ", 2)
        return Address(host, int(port), network)

    def reachable_from(self, network: str) -> bool:
        """Tell whether the address means this rank there, and not the process that asks."""
        return self.network == network or not _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _network() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def own_host(toward: str | None = None) -> str:
    """Get the address by which this host reaches another one; nothing is sent for it.

    Args:
        toward: where the ranks meet, a name or an address; None is wherever the default route leads.
    """
    if toward is not None:
        host = _source((toward, _NOWHERE[1]))
        if host is not None and (_is_loopback(toward) or not _is_loopback(host)):
            return host
    return _source(_NOWHERE) or "127.0.0.1"  # a host's own name often stands for the loopback address


def _source(target: tuple[str, int]) -> str | None:
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _is_another(address: Address, own: Address) -> bool:
    """Whether to connect there reaches another rank: hosts' containers may all have one address."""
    return address.reachable_from(own.network) and (address.network == own.network or address.host != own.host)


class Listener:
    """This rank's socket, to which others connect and tell what they found.

    Args:
        rank: this process's global rank.
        host: the address to listen on.

    Attributes:
        address: what the others are to know.
        told: whom each rank that wrote says was lost.
    """

    def __init__(self, rank: int, host: str = "127.0.0.1") -> None:
        self.rank = rank
        self.told: dict[int, set[int]] = {}
        self._accepted: dict[socket.socket, bytes] = {}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(4096)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.address = Address(host, self._socket.getsockname()[1], _network())

    def read(self) -> None:
        """Take in what others wrote so far; never waits."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._accepted[connection] = b""
        for connection, text in self._accepted.items():
            with contextlib.suppress(OSError):
                while len(text) < 2**16 and (part := connection.recv(2**12)):
                    text += part
            *lines, self._accepted[connection] = text.split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # somebody else's
                    sender, *lost = map(int, line.split())
                    self.told.setdefault(sender, set()).update(lost)

    def close(self) -> None:
        """Stop listening: to the others this rank is gone."""
        for each in (self._socket, *self._accepted):
            each.close()
        self._accepted.clear()


@dataclass(frozen=True)
class Lost:
    """What was found.

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
        found = inquiry.run(group, limit, settle)
        if found.ranks:
            inquiry.tell(found.ranks)
        return found
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
            if rank != listener.rank and _is_another(address, listener.address):
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

    def run(self, group: Collection[int], limit: float, settle: float) -> Lost:
        deadline, settling = time.monotonic() + limit, False
        while (left := deadline - time.monotonic()) > 0:
            if self.selector.get_map():
                for key, _ in self.selector.select(min(left, _POLL)):
                    self._answer(key.fileobj, key.data)  # type: ignore[arg-type]
            else:
                time.sleep(min(left, _POLL))
            self.listener.read()
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
            return
        self._drop(connection)
        if code in _GONE:
            self.silent.discard(rank)
            self.gone.add(rank)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()

    def tell(self, lost: Sequence[int]) -> None:
        line = " ".join(map(str, (self.listener.rank, *lost))).encode() + b"\n"
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
        lost: what `find_lost` found.
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
