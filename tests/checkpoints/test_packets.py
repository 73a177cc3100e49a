"""Packets of connections are held, and come when they are released; and what is written down of connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from pydantic import ValidationError

from tests.harness import needs_root, wait_until
from xmigd.checkpoints import outward as outwards
from xmigd.checkpoints import set_messages as s
from xmigd.checkpoints import sockets
from xmigd.checkpoints.manifest import MOST_CONNECTIONS, Connection
from xmigd.checkpoints.outward import check_both_ends, check_free, left_behind, outward
from xmigd.checkpoints.packets import held_packets
from xmigd.errors import Conflict, ProtocolError, Unavailable

Ends = tuple[socket.socket, socket.socket]


@contextmanager
def connection(host: str) -> Iterator[Ends]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((host, 0), family=family))
        one = stack.enter_context(socket.create_connection(listening.getsockname()[:2]))
        two, _ = listening.accept()
        stack.enter_context(two)
        for each in (one, two):
            each.settimeout(60)
        yield one, two


def written(one: socket.socket) -> Connection:
    def text(host: str, port: int, *_: int) -> str:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    return Connection(local=text(*one.getsockname()), remote=text(*one.getpeername()))


def ends(*connections: Connection) -> list[tuple[str, str]]:
    return [(each.local, each.remote) for each in connections]


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_held_comes_later(host: str) -> None:
    """All of it, and once; and what belongs to others comes at once."""

    async def run() -> None:
        with connection(host) as (one, two), connection(host) as (other, its_other):
            async with held_packets(ends(written(two)), confined=False) as packets:
                one.sendall(b"held")
                other.sendall(b"not held")
                assert its_other.recv(64) == b"not held"
                two.setblocking(False)
                with pytest.raises(BlockingIOError):
                    two.recv(64)
                two.settimeout(60)
                await packets.release()
                assert two.recv(64) == b"held"
                one.sendall(b"more")
                assert two.recv(64) == b"more"

    asyncio.run(run())


@needs_root
def test_that_they_were_not_held_is_known() -> None:
    """Until the end: whoever has let something come must not be believed."""

    async def run() -> None:
        with connection("127.0.0.1") as (one, two):
            async with held_packets(ends(written(two)), confined=False) as packets:
                assert packets._process is not None
                os.kill(packets._process.pid, signal.SIGKILL)
                await packets._process.wait()
                one.sendall(b"too early")
                assert two.recv(64) == b"too early"
                with pytest.raises(Unavailable) as caught:
                    await packets.release()
            assert caught.value.code == "packets_not_held"

    asyncio.run(run())


@needs_root
def test_what_programs_have_left_behind_is_forgotten() -> None:
    """The end that closes first stays in TIME_WAIT. One that somebody has is not touched."""

    async def run() -> None:
        with connection("127.0.0.1") as (one, two):
            its, others = written(one), written(two)
            assert not left_behind([its, others])
            with pytest.raises(Conflict) as caught:
                check_free([its])
            assert (caught.value.code, its.remote in str(caught.value)) == ("address_in_use", True)
            one.close()
            assert two.recv(1) == b""
            two.close()
            wait_until(lambda: left_behind([its, others]) == set(ends(its)), "one end is in TIME_WAIT")
            check_free([its])
            async with held_packets(ends(its, others), confined=False, forgotten=left_behind([its])):
                assert not left_behind([its, others])

    asyncio.run(run())


def test_what_leads_out_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of one are in it, of the other one only one is."""
    with connection("127.0.0.1") as (one, two):
        assert not {(each.local, each.remote) for each in outward(os.getpid())} & set(ends(written(one), written(two)))
        child = os.fork()
        if child == 0:
            one.close()
            signal.pause()
            os._exit(0)
        try:

            def left() -> list[Connection]:
                return [
                    each for each in outward(child) if (each.local, each.remote) in ends(written(one), written(two))
                ]

            wait_until(lambda: ends(*left()) == ends(written(two)), "it has closed one end")
            assert left()[0].pid == child
            monkeypatch.setattr(outwards, "MOST_CONNECTIONS", len(outward(child)) - 1)
            with pytest.raises(Conflict, match="are written down at most"):
                outward(child)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert all(each.state for _, each in sockets.inet_rows("self", "tcp"))


def test_more_connections_than_are_written_down() -> None:
    """What another node reports of them is no message."""
    one = {"local": A, "remote": B, "pid": 7}
    reached = {"topic": "checkpoints", "kind": "reached", "id": "a" * 32, "stage": "held"}
    s.parse(reached | {"connections": [one] * MOST_CONNECTIONS})
    with pytest.raises(ProtocolError, match="connections"):
        s.parse(reached | {"connections": [one] * (MOST_CONNECTIONS + 1)})


A, B, OTHER = "10.0.0.1:80", "10.0.0.2:4000", "10.0.0.3:5"


LINK, LINK_TOO = "[fe80::1]:80", "[fe80::2]:90"


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"a": [(A, B)], "b": [(B, A)]}, None),
        ({"a": [], "b": []}, None),
        ({"a": [(A, B)], "b": []}, A),
        ({"a": [(A, B)], "b": [(B, A), (B, OTHER)]}, OTHER),
        ({"a": [(A, B), (B, A)], "b": []}, A),  # a node is no other end of its own
        ({"a": [(A, B)], "b": [(A, B)]}, A),
        ({"a": [(LINK, LINK_TOO)], "b": [(LINK_TOO, LINK)]}, LINK),  # it could not be made again
    ],
)
def test_both_ends_are_in_parts(parts: dict[str, list[tuple[str, str]]], named: str | None) -> None:
    made = {
        node: [Connection(local=local, remote=remote, pid=7) for local, remote in each] for node, each in parts.items()
    }
    if named is None:
        check_both_ends(made)
        return
    with pytest.raises(Conflict) as caught:
        check_both_ends(made)
    assert (caught.value.code, named in str(caught.value), "process 7" in str(caught.value)) == (
        "not_movable", True, True,
    )  # fmt: skip


NONE = [
    "", "80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "::1:80", "[10.0.0.1]:80", "host:80", "10.0.0.1:80\n",
    "10.0.0.1:+80", "10.0.0.1:8_0",
]  # fmt: skip


@pytest.mark.parametrize("end", NONE)
def test_ends_that_are_none(end: str) -> None:
    with pytest.raises(ValidationError):
        Connection(local=end, remote=A)


def test_an_address_of_another_node() -> None:
    with pytest.raises(Conflict) as caught:
        check_free([Connection(local="192.0.2.1:80", remote=A)])
    assert (caught.value.code, "192.0.2.1" in str(caught.value)) == ("address_missing", True)
