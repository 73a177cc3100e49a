"""Who comes to the port for peers with pieces of a transfer."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xmigd.transfers import door as doors
from xmigd.transfers.door import Door
from xmigd.transfers.wire import BULK

TRANSFER = "a" * 32


def never(*_: Any) -> Any:
    raise AssertionError("nobody asks for that")


@pytest.mark.parametrize(("most", "why"), [(0, "two has 0 connections"), (1, None)])
def test_a_peer_with_too_many_connections_gets_no_process(
    monkeypatch: pytest.MonkeyPatch, most: int, why: str | None
) -> None:
    started = []

    def start(*_: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.close()
        started.append(ours)
        return subprocess.Popen(["true"]), ours

    async def comes() -> None:
        links = SimpleNamespace(
            other_connections={}, peer=lambda _: SimpleNamespace(certificate="PEM"),
            trust=SimpleNamespace(identity=None),
        )  # fmt: skip
        Door(
            cast(Any, links), in_loop=never, in_thread=never, longest=lambda _: 0,
            sender=lambda transfer: "two" if transfer == TRANSFER else None,
        )  # fmt: skip
        there, here = socket.socketpair()
        with there, here:
            there.sendall(BULK + TRANSFER.encode())
            await links.other_connections[BULK](here)

    monkeypatch.setattr(doors, "start_pump", start)
    monkeypatch.setattr(doors, "prepare", lambda sock: sock.settimeout(5))
    monkeypatch.setattr(doors, "CONNECTIONS", most)
    if why is None:
        asyncio.run(comes())
    else:
        with pytest.raises(ValueError, match=why):
            asyncio.run(comes())
    assert len(started) == most
