"""A rank's listening socket: while it is there the rank lives; see Note [Lost ranks] in `hp_platform.failures.peers`.

Note [Threads at the end]
    While the interpreter is finalized, a thread other than the main one that asks for the interpreter is ended where it
    stands, by unwinding its stack. If it stands in a destructor of C++, as that of a process group which it held last,
    the unwinding meets a function that may not throw, and the process aborts: "terminate called without an active
    exception". A daemon thread is not waited for. So a thread holds no group, tensor or model, and one that may still
    run at the end is woken and joined by an `atexit` function, which runs before finalization begins.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

_HELLO = 128  # bytes of a token and a rank, at the most
_MESSAGE = 2**16
_STRANGERS = 64
_NOWHERE = ("192.0.2.1", 9)  # reserved for documentation; nothing is sent there


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


def own_network() -> str:
    """Name this process's network stack, which the processes of one machine, or of one container, share."""
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


def is_another(address: Address, own: Address) -> bool:
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
        failed: what ranks that gave up have raised.
    """

    def __init__(self, rank: int, size: int, host: str = "127.0.0.1") -> None:
        self.rank, self.size = rank, size
        self.told: dict[int, set[int]] = {}
        self.failed: dict[int, str] = {}
        self._callers: list[_Caller] = []
        self._reading, self._closed = threading.Lock(), False
        self._wakes: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(4096)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.address = Address(host, self._socket.getsockname()[1], own_network(), secrets.token_hex(16))

    def watch(self, heard: Callable[[], object]) -> None:
        """Sleep in a thread until a rank tells of a loss or of its failure, or until `rest` or `close`.

        The thread ends before the interpreter does: see Note [Threads at the end].

        Args:
            heard: called once, in that thread, when a rank has told something. It must keep no group alive.
        """
        self._wakes, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=(woken, heard), name="hp_platform peers", daemon=True)
        self._thread.start()
        atexit.register(self.rest)

    def _listen(self, woken: socket.socket, heard: Callable[[], object]) -> None:
        with woken:
            while not (self.told or self.failed):
                with self._reading:
                    sources = [self._socket, woken, *(caller.connection for caller in self._callers)]
                with contextlib.suppress(OSError, ValueError):  # one that was closed meanwhile
                    if woken in wait(sources):
                        return
                self.read()
        heard()

    def rest(self) -> None:
        """End the thread; the socket stays, since this rank still lives."""
        thread, self._thread = self._thread, None
        if thread is None or self._wakes is None:
            return
        atexit.unregister(self.rest)
        with contextlib.suppress(OSError):  # the thread has ended
            self._wakes.send(b"!")
        if thread is not threading.current_thread():
            thread.join()
        self._wakes.close()

    def read(self) -> None:
        """Take in what others wrote so far; never waits."""
        with self._reading:
            if not self._closed:
                self._read()

    def _read(self) -> None:
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
            elif line.startswith(b"!"):
                with contextlib.suppress(ValueError):
                    self.failed[caller.rank] = str(json.loads(line[1:]))
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
        self.rest()
        with self._reading:
            self._closed = True
            for each in (self._socket, *(caller.connection for caller in self._callers)):
                each.close()
            self._callers.clear()

    def close_after_fork(self) -> None:
        """Close this forked process's copies of the sockets; the thread, and whoever had the lock, are not in it."""
        self._reading, self._thread = threading.Lock(), None
        atexit.unregister(self.rest)
        if self._wakes is not None:
            self._wakes.close()
        self.close()
