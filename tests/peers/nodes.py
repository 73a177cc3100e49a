"""Real daemons that know each other, each in folders of its own, and a proxy that disturbs what they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import IO, Any, Self

from tests import forked
from tests.harness import wait_until
from tests.namespaces import PLACES, NetworkNode
from tests.ports import free_port
from xmigd.demo import node

TALKING = Path(__file__).with_name("talking.py")


class PeerNode(node.Node):
    """A daemon that talks to others (talking.py), maybe in a network of its own."""

    executed: Path | None = TALKING  # None: xmigd as it is

    def __init__(
        self, folder: Path, name: str, native_dir: Path, *, network: NetworkNode | None = None,
        port: int | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.name = name
        self.port = free_port() if port is None else port
        address = "127.0.0.1" if network is None else network.address
        self.address = f"{address}:{self.port}"
        self._namespaces = [] if network is None else [PLACES / network.name]
        more = {"device_memory": 1 << 20} | settings
        super().__init__(
            folder, node=name, peer_host=address, peer_port=self.port, native_dir=native_dir, **more
        )  # fmt: skip

    def popen(self, log: IO[bytes]) -> node.Child:
        return forked.begin(
            self, log, self.folder / "xmig.db", program=self.executed, namespaces=self._namespaces
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        return str(self.client.get("/v1/identity")["fingerprint"])

    def knows(self, other: PeerNode, address: str | None = None) -> None:
        """Enter the other one, reached at this address or its own."""
        self.client.post(
            "/v1/peers",
            {"name": other.name, "address": address or other.address, "fingerprint": other.fingerprint},
        )

    def peer(self, name: str) -> dict[str, Any]:
        """As the API has it."""
        return next(dict(row) for row in self.client.get("/v1/peers") if row["name"] == name)

    def until(self, name: str, state: str, why: str = "") -> dict[str, Any]:
        """Wait until a peer is in this state, with this in its reason."""

        def holds() -> bool:
            row = self.peer(name)
            return row["state"] == state and why in row["why"]

        wait_until(holds, f"{self.name} has {name} {state} {why}: {self.peer(name)}")
        return self.peer(name)

    def send(self, to: PeerNode, count: int, length: int = 0) -> int:
        """The next numbers. Returns how many were taken."""
        return int(self._request({"to": to.name, "count": count, "length": length})["sent"])

    def heard(self, of: PeerNode) -> dict[str, Any]:
        """What of this peer: `events`, `last` number of the session, and what was `wrong`."""
        return dict(self._request({}).get(of.name, {"events": [], "wrong": [], "last": 0}))

    def until_heard(self, of: PeerNode, last: int, timeout: float = 120) -> dict[str, Any]:
        wait_until(lambda: self.heard(of)["last"] >= last, f"{self.name} hears {last} of {of.name}", timeout)
        return self.heard(of)

    def _request(self, wanted: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(300)
            sock.connect(str(self.folder / "talk.sock"))
            sock.sendall(json.dumps(wanted).encode() + b"\n")
            with sock.makefile() as file:
                return dict(json.loads(file.readline()))


def acquainted(*nodes: PeerNode) -> None:
    """All enter all others, and wait until they are connected."""
    for here in nodes:
        for there in nodes:
            if here is not there:
                here.knows(there)
    connected(*nodes)


def connected(*nodes: PeerNode) -> None:
    """All with all."""
    for here in nodes:
        for there in nodes:
            if here is not there:
                here.until(there.name, "connected")


@contextlib.contextmanager
def daemons(native_dir: Path, *names: str) -> Iterator[list[PeerNode]]:
    """Daemons that run and do not know each other yet."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            made.append(stack.enter_context(PeerNode(folder, name, native_dir)))
        yield made


class Proxy:
    """TCP from a port of its own to `target`, in a thread. It splits what it forwards anywhere, and may delay it."""

    def __init__(self, target: str, seed: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay = 0.0  # seconds, at most, before each piece
        self.forwarded = 0  # bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def sever(self) -> int:
        """End all connections in the middle of whatever they transport. Returns how many."""

        async def abort() -> int:
            for writer in self._writers:
                writer.transport.abort()
            return len(self._writers) // 2

        return int(self._call(abort()))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    async def _end(self) -> None:
        """Nothing stays open. What is just being accepted comes to `_accepted` first."""
        self._server.close()
        while accepting := asyncio.all_tasks() - {asyncio.current_task(), *self._tasks}:
            await asyncio.wait(accepting)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0)  # their ends are called

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._spawn(self._serve(reader, writer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
            ends.append(other_writer)
            self._writers.add(other_writer)
            there, back = self._forward(reader, other_writer), self._forward(other_reader, writer)
            await asyncio.gather(self._spawn(there), self._spawn(back))
        except (OSError, asyncio.CancelledError):
            for end in ends:
                end.transport.abort()
        self._writers.difference_update(ends)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for piece in self._pieces(data):
                    if self.delay:
                        await asyncio.sleep(self._random.uniform(0, self.delay))
                    writer.write(piece)
                    await writer.drain()
                    self.forwarded += len(piece)
        writer.close()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(data):
            length = self._random.choice((1, 7, 100, 1460, 20_000))
            yield data[at : at + length]
            at += length
