"""Asking who lives: sockets of this process stand for the ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hp_platform import LostRankError
from hp_platform.failures.peers import (
    Address,
    FailedRankError,
    Listener,
    Lost,
    find_lost,
    lost_text,
    own_host,
    tell_failure,
)

QUICK = {"limit": 0.5, "settle": 0.1}


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    made = [Listener(rank, 4) for rank in range(4)]
    yield made
    for listener in made:
        listener.close()


def addresses(listeners: list[Listener]) -> dict[int, Address]:
    return {listener.rank: listener.address for listener in listeners}


def test_all_live(listeners):
    begin = time.monotonic()
    assert find_lost(listeners[0], addresses(listeners), range(4), **QUICK) == Lost(())
    assert 0.5 <= time.monotonic() - begin < 5
    listeners[1].read()
    assert listeners[1].told == {}


def test_whoever_ended_is_found_and_told_to_the_others(listeners):
    peers = addresses(listeners)
    listeners[2].close()
    assert find_lost(listeners[0], peers, range(4), limit=30.0) == Lost((2,))
    listeners[1].read()
    assert listeners[1].told == {0: {2}}


def test_a_rank_that_told_of_another_one_is_not_blamed(listeners):
    peers = addresses(listeners)
    listeners[2].close()
    assert find_lost(listeners[3], peers, range(4), **QUICK) == Lost((2,))
    listeners[3].close()  # ended by its error
    # Rank 0 communicated with rank 3 alone, and sees two that ended.
    assert find_lost(listeners[0], peers, [0, 3], **QUICK) == Lost((2,))
    # Rank 1 is told by rank 0, too.
    assert find_lost(listeners[1], peers, [1, 3], **QUICK) == Lost((2,))
    assert listeners[1].told == {0: {2}, 3: {2}}


def test_two_that_ended(listeners):
    peers = addresses(listeners)
    listeners[2].close()
    listeners[3].close()
    assert find_lost(listeners[0], peers, range(4), **QUICK) == Lost((2, 3))


def test_who_took_no_part_is_not_blamed(listeners):
    peers = addresses(listeners)
    listeners[1].close()
    listeners[3].close()
    assert find_lost(listeners[0], peers, [0, 1], **QUICK) == Lost((1,))
    # With nobody of the group gone, it is somebody else after all.
    assert find_lost(listeners[0], peers, [0, 2], **QUICK) == Lost((1, 3))


def test_an_end_that_comes_a_moment_later(listeners):
    """The backend's connections may close before the listening socket does."""
    peers = addresses(listeners)
    timer = threading.Timer(0.3, listeners[2].close)
    timer.start()
    assert find_lost(listeners[0], peers, range(4), limit=30.0, settle=0.0) == Lost((2,))
    timer.join()


def test_an_end_after_the_connection_was_accepted(listeners):
    peers = addresses(listeners)

    def accept_and_end() -> None:
        time.sleep(0.2)
        listeners[2].read()
        time.sleep(0.2)
        listeners[2].close()

    thread = threading.Thread(target=accept_and_end)
    thread.start()
    assert find_lost(listeners[0], peers, range(4), limit=30.0, settle=0.0) == Lost((2,))
    thread.join()


def test_a_verdict_that_comes_meanwhile(listeners):
    peers = addresses(listeners)
    peers.pop(2)  # this rank doesn't know where it is
    thread = threading.Timer(0.3, find_lost, (listeners[1], peers | {2: _closed()}, range(4)))
    thread.start()
    assert find_lost(listeners[0], peers, range(4), limit=30.0, settle=0.0) == Lost((2,))
    thread.join()


def _closed() -> Address:
    listener = Listener(3, 4)
    listener.close()
    return listener.address


def test_the_death_of_a_process():
    """SIGKILL, with the connection made before."""
    program = (
        "from hp_platform.failures.peers import Listener; import signal; l = Listener(1, 2); "
        "print(l.address, flush=True); signal.pause()"
    )
    here = Listener(0, 2)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        peers = {1: Address.parse(process.stdout.readline().strip())}
        assert find_lost(here, peers, [0, 1], limit=0.2) == Lost(())
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        assert find_lost(here, peers, [0, 1], limit=30.0) == Lost((1,))
    here.close()


def test_a_listener_that_rests_has_no_thread_and_still_answers(listeners):
    heard: list[bool] = []
    listeners[2].watch(lambda: heard.append(True))
    (thread,) = [each for each in threading.enumerate() if each.name == "hp_platform peers"]
    listeners[2].rest()
    listeners[2].rest()  # again: nothing
    assert not thread.is_alive() and not heard
    assert find_lost(listeners[0], addresses(listeners), range(4), **QUICK) == Lost(())


def test_a_fork_lets_go_of_the_listening_socket_while_the_thread_reads(listeners):
    """The child has neither the thread nor whoever holds the lock."""
    listeners[2].watch(lambda: None)
    with listeners[2]._reading:
        child = os.fork()
        if child == 0:
            listeners[2].close_after_fork()
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    listeners[2].close()
    assert find_lost(listeners[0], addresses(listeners), range(4), **QUICK) == Lost((2,))


def test_a_host_that_does_not_answer(listeners, monkeypatch):
    """It is down if another host answers; else there may be a firewall."""
    silent = listeners[1].address.port
    connect = socket.socket.connect_ex

    def unreachable(self: socket.socket, address: tuple[str, int]) -> int:
        return 113 if address[1] == silent else connect(self, address)  # EHOSTUNREACH

    monkeypatch.setattr(socket.socket, "connect_ex", unreachable)
    peers = addresses(listeners)
    assert find_lost(listeners[0], peers, [0, 1], **QUICK) == Lost(())
    peers[2] = Address("0.0.0.0", listeners[2].address.port, "another host")  # this host by another address
    assert find_lost(listeners[0], peers, [0, 1], **QUICK) == Lost((1,), silent=True)


def test_another_host_of_the_same_address_is_not_asked(listeners):
    listeners[0].address = Address("172.17.0.2", 1, "here")
    assert find_lost(listeners[0], {1: Address("172.17.0.2", 1, "there")}, [0, 1], **QUICK) == Lost(())


def test_a_loopback_address_of_elsewhere_is_not_asked(listeners):
    peers = {2: Address("127.0.0.1", 1, "another host"), 3: Address("127.0.0.1", 1, listeners[0].address.network)}
    assert find_lost(listeners[0], peers, range(4), **QUICK) == Lost((3,))


def caller(listener, first_line):
    connection = socket.create_connection((listener.address.host, listener.address.port))
    connection.sendall(first_line.encode())
    return connection


def read_until(listener, done):
    """Reads until the kernel has brought what was written on this machine."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        listener.read()


def closed_by_the_other_side(connection):
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_rank_with_the_token_is_believed(listeners):
    here = listeners[0]
    with caller(here, f"{here.address.token} 2\n3\n1 ") as rank2:
        read_until(here, lambda: here.told == {2: {3}})
        rank2.sendall(b"0\n")
        read_until(here, lambda: here.told == {2: {3, 1, 0}})


@pytest.mark.parametrize(
    "first_line",
    [
        "GET / HTTP/1.1\r\n",
        "2 3\n",
        "{other} 2\n",
        "{token} 4\n",
        "{token} -1\n",
        "{token}\n",
        "{token}" * 5,
        "\n",
    ],
)
def test_what_strangers_write_is_not_believed(listeners, first_line):
    here = listeners[0]
    written = first_line.format(token=here.address.token, other=listeners[1].address.token)
    with caller(here, written) as stranger:
        stranger.sendall(b"3\n1\n")
        read_until(here, lambda: closed_by_the_other_side(stranger))
    assert (here.told, here._callers) == ({}, [])


def test_strangers_are_let_go_before_ranks(listeners):
    here = listeners[0]
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(caller(here, f"{here.address.token} 1\n2\n"))
        read_until(here, lambda: here.told)
        strangers = [stack.enter_context(caller(here, "")) for _ in range(80)]
        read_until(here, lambda: closed_by_the_other_side(strangers[80 - 4 - 64 - 1]))
        assert len(here._callers) == 1 + 4 + 64
        rank.sendall(b"3\n")
        read_until(here, lambda: here.told == {1: {2, 3}})


def test_a_line_without_an_end_is_let_go(listeners):
    here = listeners[0]
    with caller(here, f"{here.address.token} 1\n") as rank:
        rank.sendall(b"1" * 2**16)
        read_until(here, lambda: closed_by_the_other_side(rank))
    assert (here.told, here._callers) == ({}, [])


def test_a_rank_that_gives_up_is_heard_with_its_text(listeners):
    peers, heard = addresses(listeners), threading.Event()
    listeners[1].watch(heard.set)
    tell_failure(listeners[3], peers, "ValueError: no\nsuch file")
    assert heard.wait(30.0)
    assert listeners[1].failed == listeners[3].failed == {3: "ValueError: no\nsuch file"}
    assert find_lost(listeners[0], peers, range(4), limit=30.0) == Lost(())
    assert listeners[0].failed == listeners[3].failed


def test_whoever_sleeps_is_woken_by_the_one_that_finds_a_loss(listeners):
    peers, heard = addresses(listeners), threading.Event()
    listeners[1].watch(heard.set)
    listeners[2].close()
    assert find_lost(listeners[0], peers, [0, 2], **QUICK) == Lost((2,))
    assert heard.wait(30.0)
    assert find_lost(listeners[1], peers, [0, 1], **QUICK) == Lost((2,))


def test_a_listener_that_is_closed_ends_its_thread():
    def threads():
        return [each for each in threading.enumerate() if each.name == "hp_platform peers"]

    before, listener = threads(), Listener(0, 2)
    listener.watch(lambda: None)
    (thread,) = set(threads()) - set(before)
    listener.close()
    thread.join(30.0)
    assert not thread.is_alive()
    listener.read()


def test_addresses():
    address = Address("10.0.0.1", 5, "a b", "secret")
    assert Address.parse(str(address)) == address
    assert "secret" not in repr(address)
    assert own_host("127.0.0.1") == own_host("localhost") == "127.0.0.1"
    with _At(own_host()) as there:
        assert find_lost(there, {}, [0], **QUICK) == Lost(())


class _At:
    def __init__(self, host: str) -> None:
        self.listener = Listener(0, 4, host)

    def __enter__(self) -> Listener:
        return self.listener

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def test_the_text():
    assert lost_text(Lost((2,)), "all_gather", [0, 1, 2], 1) == (
        "rank 2 was lost: its process has ended, or left the process group. So the all_gather over ranks [0, 1, 2]"
        " failed on rank 1. See the output of rank 2 for why, and restart the job from its last checkpoint"
    )
    text = lost_text(Lost((2, 5), silent=True), "all_reduce", range(64), 1)
    assert "ranks 2, 5 were lost: their hosts don't answer" in text
    assert "over ranks 0 to 63 (64 ranks)" in text
    error = pickle.loads(pickle.dumps(LostRankError("text", [5, 2])))
    assert (str(error), error.ranks) == ("text", (2, 5))
    error = pickle.loads(pickle.dumps(FailedRankError({1: "ValueError: no"})))
    assert str(error).startswith("rank 1 gave up: ValueError: no. The ranks can't go on") and error.ranks == ()
