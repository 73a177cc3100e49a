"""What the next daemon knows of the clients of an MPS: it stays for those that come late, and not when one has ended
that nobody saw."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from xmigd.mps import service
from xmigd.mps.control import Control
from xmigd.mps.service import Mps, Seat
from xmigd.servers.scopes import Scopes

Client = subprocess.Popen[bytes]


def nothing(why: str) -> None:
    pass


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LINGER", 0.05)


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("cpu*"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def left_behind(folder: Path) -> tuple[Client, str]:
    """A client that works, of a daemon that is gone; and the files of its MPS."""
    mps = Mps(folder, ["cpu:0"], Scopes())
    seat = await mps.join("cpu:0", 0, 0, standby=False, lost=nothing)
    assert isinstance(seat, Seat)
    client = subprocess.Popen(["sleep", "60"], env=seat.control.environment)
    mps.works(seat, client.pid, "executes")
    await mps.stop()
    return client, f"{seat.control.folder.name}.json"


def run(test: Callable[[Client, Mps, str], Coroutine[Any, Any, None]], folder: Path, *, gone: bool = False) -> None:
    async def both() -> None:
        client, name = await left_behind(folder)
        if gone:
            client.kill()
            client.wait()
        mps = Mps(folder, ["cpu:0"], Scopes())
        mps.find_left()
        try:
            await test(client, mps, name)
        finally:
            client.kill()
            client.wait()
            await until(lambda: files(folder) == [])
            await mps.stop()

    asyncio.run(both())


def test_it_stays_for_a_client_that_comes_late(tmp_path: Path) -> None:
    async def test(client: Client, mps: Mps, name: str) -> None:
        await asyncio.sleep(4 * service.LINGER)  # it would have ended by now
        assert name in files(tmp_path)
        lost: list[str] = []
        seat = mps.adopt("cpu:0", 0, client.pid, lost.append)
        assert isinstance(seat, Seat)
        await asyncio.sleep(4 * service.LINGER)
        assert lost == []
        assert name in files(tmp_path)
        mps.left(seat)  # and ends when that one has

    run(test, tmp_path)


def test_a_client_that_ends_before_it_comes_condemns_it(tmp_path: Path) -> None:
    async def test(client: Client, mps: Mps, name: str) -> None:
        client.kill()
        client.wait()
        await until(lambda: name not in files(tmp_path))

    run(test, tmp_path)


def test_it_ends_if_a_client_has_ended_unseen(tmp_path: Path) -> None:
    async def test(client: Client, mps: Mps, name: str) -> None:
        assert name not in files(tmp_path)

    run(test, tmp_path, gone=True)


def test_one_that_rested_may_end_unseen(tmp_path: Path) -> None:
    """Its device was done, as that of a source that has handed over."""

    async def test() -> None:
        mps = Mps(tmp_path, ["cpu:0"], Scopes())
        seats = [await mps.join("cpu:0", 0, 0, standby=False, lost=nothing) for _ in range(2)]
        clients = []
        for seat in seats:
            assert isinstance(seat, Seat)
            clients.append(subprocess.Popen(["sleep", "60"], env=seat.control.environment))
            mps.works(seat, clients[-1].pid, "executes")
        rests = seats[0]
        assert isinstance(rests, Seat)
        mps.works(rests, clients[0].pid, "none")
        await mps.stop()
        clients[0].kill()
        clients[0].wait()
        again = Control(tmp_path, rests.control.owner, rests.control.number, lambda _, __: None)
        try:
            assert again.adopt()
        finally:
            again.kill()
            clients[1].kill()
            clients[1].wait()
            await until(lambda: files(tmp_path) == [])

    asyncio.run(test())
