"""Pipeline stages that are played at once, one process each, and what they tell each other.

Note [Stages that are played]
Ranks of different stages run different programs, so that one process can't speak for all of them. Each stage gets a
process that plays one of its ranks, and speaks for the others of the stage. The processes are connected to this one
alone: it collects what all stages of a group say, and hands it on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

Place = Callable[[int], int]
"""Returns the stage of a rank."""


class StagePeers:
    """What the ranks of all stages say, as one of their processes hears it.

    Args:
        connection: to the process that connects the stages.
        place: of a rank.
        own: this process's stage.
    """

    def __init__(self, connection: Connection, place: Place, own: int) -> None:
        self._connection, self._place, self._own = connection, place, own

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of some ranks says: those of a stage say the same."""
        places = [self._place(rank) for rank in ranks]
        stages = tuple(sorted(set(places)))
        if stages == (self._own,):
            return [payload] * len(ranks)
        self._connection.send(("gather", stages, payload))
        told: Mapping[int, bytes] = self._connection.recv()
        return [told[place] for place in places]

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        """Give a message to a stage."""
        self._connection.send(("send", self._place(rank), tag, payload))

    def receive(self, rank: int, tag: int) -> bytes:
        """Wait for a message of a stage."""
        self._connection.send(("receive", self._place(rank), tag))
        return self._connection.recv()


@dataclass(frozen=True)
class Said:
    """What a stage said and heard, in order.

    Attributes:
        gathers: the ranks, what this stage said, and what each of them did.
        messages: (rank, tag, content) of those that it received.
    """

    gathers: list[tuple[tuple[int, ...], bytes, list[bytes]]] = field(default_factory=list)
    messages: list[tuple[int, int, bytes]] = field(default_factory=list)


class Listening:
    """Peers that note what is said.

    Args:
        peers: who say it.

    Attributes:
        said: what was.
    """

    def __init__(self, peers: StagePeers) -> None:
        self._peers, self.said = peers, Said()

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of some ranks says."""
        told = self._peers.gather(payload, ranks)
        self.said.gathers.append((tuple(ranks), payload, told))
        return told

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        """Give a message to a rank."""
        self._peers.send(payload, rank, tag)

    def receive(self, rank: int, tag: int) -> bytes:
        """Wait for a message of a rank."""
        payload = self._peers.receive(rank, tag)
        self.said.messages.append((rank, tag, payload))
        return payload


class Repeating:
    """Peers that are not there, and say once more what they said.

    A rank that said what this one did says what this one says now, which may be another number of the same kind.

    Args:
        said: what was said.
    """

    def __init__(self, said: Said) -> None:
        self._gathers, self._messages = deque(said.gathers), deque(said.messages)

    def gather(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of some ranks said."""
        asked, own, told = self._gathers.popleft() if self._gathers else ((), b"", [])
        if asked != tuple(ranks) or len(own) != len(payload):
            raise self._otherwise(f"ranks {list(ranks)} say {len(payload)} bytes", f"ranks {list(asked)} {len(own)}")
        return [payload if each == own else each for each in told]

    def send(self, payload: bytes, rank: int, tag: int) -> None:
        """Forget the message."""

    def receive(self, rank: int, tag: int) -> bytes:
        """Return the message of a rank."""
        sender, number, payload = self._messages.popleft() if self._messages else (-1, -1, b"")
        if (sender, number) != (rank, tag):
            raise self._otherwise(f"rank {rank} sends message {tag}", f"rank {sender} message {number}")
        return payload

    @staticmethod
    def _otherwise(now: str, before: str) -> NotImplementedError:
        return NotImplementedError(
            f"a stage of a pipeline can't be played by itself here: {now}, where in the dry run {before}; its program"
            " depends on values"
        )


@dataclass
class _Exchange:
    """What is on its way between stages.

    Attributes:
        connections: to each stage's process.
        said: by the stages of a group: what each has said that not all have said yet.
        messages: (from, to, tag): payloads that were not asked for yet.
        awaited: (from, to, tag) of stages that wait for a message.
    """

    connections: Mapping[int, Connection]
    said: dict[tuple[int, ...], dict[int, bytes]] = field(default_factory=dict)
    messages: dict[tuple[int, int, int], deque[bytes]] = field(default_factory=dict)
    awaited: set[tuple[int, int, int]] = field(default_factory=set)

    def take(self, stage: int, request: tuple[Any, ...]) -> None:
        """Take what a stage says or asks, and answer whoever can be answered now."""
        if request[0] == "gather":
            _, stages, payload = request
            told = self.said.setdefault(stages, {})
            told[stage] = payload
            if len(told) == len(stages):
                del self.said[stages]
                for each in stages:
                    self.connections[each].send(told)
        elif request[0] == "send":
            _, to, tag, payload = request
            self.messages.setdefault((stage, to, tag), deque()).append(payload)
            self._deliver((stage, to, tag))
        else:
            _, sender, tag = request
            self.awaited.add((sender, stage, tag))
            self._deliver((sender, stage, tag))

    def _deliver(self, way: tuple[int, int, int]) -> None:
        if way in self.awaited and self.messages.get(way):
            self.awaited.discard(way)
            self.connections[way[1]].send(self.messages[way].popleft())


def play_stages(
    task: Callable[..., Any], arguments: Mapping[int, Sequence[Any]], place: Place, *, preload: Sequence[str] = ()
) -> dict[int, Any]:
    """Run a task for each stage in a process of its own, and return their results by stage.

    Args:
        task: called as `task(*arguments, peers)`; a function of a module.
        arguments: of each stage.
        place: of a rank; a function of a module, or an object whose class is one's.
        preload: modules that are imported once for all processes.

    Raises:
        RuntimeError: a stage failed; it has the stage's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    here: dict[int, Connection] = {}
    processes = []
    try:
        for stage, own in arguments.items():
            here[stage], there = context.Pipe()
            process = context.Process(target=_run, args=(task, tuple(own), there, place, stage), daemon=True)
            with _without_main():
                process.start()
            there.close()
            processes.append(process)
        return _connect(here)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for connection in here.values():
            connection.close()


_hiding = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from running the caller's script again, which needs no guard and may be a notebook."""
    main = sys.modules["__main__"]
    with _hiding:
        hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


def _connect(connections: Mapping[int, Connection]) -> dict[int, Any]:
    exchange, results = _Exchange(connections), dict[int, Any]()
    stages = {connection: stage for stage, connection in connections.items()}
    while len(results) < len(connections):
        for connection in wait([each for each, stage in stages.items() if stage not in results]):
            assert isinstance(connection, Connection)
            stage = stages[connection]
            try:
                request = connection.recv()
            except EOFError:
                raise RuntimeError(f"the process of stage {stage} ended without a result") from None
            if request[0] == "result":
                results[stage] = request[1]
            elif request[0] == "error":
                raise request[2] from RuntimeError(f"stage {stage} failed:\n{request[1]}")
            else:
                exchange.take(stage, request)
    return results


def _run(task: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection, place: Place, own: int) -> None:
    try:
        result = task(*arguments, StagePeers(connection, place, own))
    except Exception as error:  # whatever it is, the caller gets it
        text = traceback.format_exc()
        try:
            connection.send(("error", text, error))
        except Exception:  # an error that can't be pickled
            connection.send(("error", text, RuntimeError(f"{type(error).__name__}: {error}")))
        return
    connection.send(("result", result))
