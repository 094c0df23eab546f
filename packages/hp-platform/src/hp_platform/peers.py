"""Detection of lost ranks, over TCP, once a collective has failed and never before.

Note [Lost ranks]
    A backend says "Connection closed by peer [10.0.0.7]:45123", or on a rank further on only that a rank which failed
    because of another one has gone. So each process keeps a listening socket that nobody reads. While the process
    lives the kernel completes connections to it; when it ends, in whatever way, they are refused or reset. A rank whose
    collective failed connects to all others and watches the connections: what ends is gone. It then tells those that
    live whom it found, and they find that in their own sockets when their turn comes. A rank that is gone and had told
    of another one was no cause but a consequence. No thread and no message is needed before something fails.

    A connection that the other side has accepted stays open until that process ends, so that its end says the same.

    Whoever reaches the port can connect. Each listener draws a token, which is published beside its address, in the
    store that only the job's ranks read; a connection that does not begin with it is closed and what it says unread.
    Only so many connections are kept, each with only so many unread bytes, and those without a token go first.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Address", "Listener", "LostRankError", "find_lost", "lost_text", "own_host"]

LIMIT = 5.0
SETTLE = 0.2
_POLL = 0.05
_HELLO = 128  # bytes of a token and a rank, at the most
_MESSAGE = 2**16
_STRANGERS = 64
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_NOWHERE = ("192.0.2.1", 9)  # reserved for documentation; nothing is sent there


class LostRankError(RuntimeError):
    """A collective can't complete, because the process of a rank has ended.

    Args:
        text: the message, with the ranks and the collective.
        ranks: their global ranks, ascending.
    """

    def __init__(self, text: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))


@dataclass(frozen=True)
class Address:
    """Address that a rank listens on.

    Attributes:
        host: its IP address.
        port: the port.
        network: names the network stack; the loopback address is meaningful only inside it.
        token: a connection must begin with it to be trusted.
    """

    host: str
    port: int
    network: str
    token: str = field(default="-", repr=False)

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token} {self.network}"

    @staticmethod
    def parse(text: str) -> Address:
        """Read what `str` wrote."""
        host, port, token, network = text.split(" ", 3)
        return Address(host, int(port), network, token)

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
    """Return True if connecting there reaches another rank: containers of several hosts may share one address."""
    return address.reachable_from(own.network) and (address.network == own.network or address.host != own.host)


@dataclass(eq=False)
class _Caller:
    """A connection that was accepted, who it is once its token was right, and what it wrote of a line that goes on."""

    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""


class Listener:
    """This rank's socket, to which others connect and tell what they found.

    Args:
        rank: this process's global rank.
        size: the number of ranks.
        host: the address to listen on.

    Attributes:
        address: for the other ranks.
        told: whom each rank that wrote says was lost.
    """

    def __init__(self, rank: int, size: int, host: str = "127.0.0.1") -> None:
        self.rank, self.size = rank, size
        self.told: dict[int, set[int]] = {}
        self._callers: list[_Caller] = []
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(4096)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.address = Address(host, self._socket.getsockname()[1], _network(), secrets.token_hex(16))

    def read(self) -> None:
        """Take in what others wrote so far; never waits."""
        with contextlib.suppress(OSError):
            for _ in range(self.size + _STRANGERS):
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._callers.append(_Caller(connection))
        for caller in list(self._callers):
            if not self._hear(caller):
                self._callers.remove(caller)
                caller.connection.close()
        strangers = [caller for caller in self._callers if caller.rank is None]
        for caller in strangers[: max(0, len(strangers) - self.size - _STRANGERS)]:  # the oldest
            self._callers.remove(caller)
            caller.connection.close()

    def _hear(self, caller: _Caller) -> bool:
        """Read what a caller wrote so far; tell whether it is one to go on listening to."""
        ended = False
        try:
            while len(caller.unread) < _MESSAGE and not ended:
                part = caller.connection.recv(2**12)
                caller.unread, ended = caller.unread + part, not part
        except BlockingIOError:
            pass  # that is all for now
        except OSError:
            ended = True
        *lines, caller.unread = caller.unread.split(b"\n")
        for line in lines:
            if caller.rank is None:
                caller.rank = self._recognise(line)
                if caller.rank is None:
                    return False
            else:
                with contextlib.suppress(ValueError):
                    self.told.setdefault(caller.rank, set()).update(map(int, line.split()[: self.size]))
        return not ended and len(caller.unread) < (_HELLO if caller.rank is None else _MESSAGE)

    def _recognise(self, line: bytes) -> int | None:
        """Get the rank of a caller that begins with this line, None of a stranger."""
        token, _, number = line.partition(b" ")
        if not hmac.compare_digest(token, self.address.token.encode()) or not number.isdigit():
            return None
        return int(number) if int(number) < self.size else None

    def close(self) -> None:
        """Stop listening: to the others this rank is gone."""
        for each in (self._socket, *(caller.connection for caller in self._callers)):
            each.close()
        self._callers.clear()


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
        line = " ".join(map(str, lost)).encode() + b"\n"
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
