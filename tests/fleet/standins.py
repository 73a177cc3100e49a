"""Stand-ins for nodes of a fleet, many in one process: each has a key, a port and a link of its own, over TLS, and
answers questions of its peer with devices and jobs that it makes up. Everything else is the daemon's own code.

It writes a line of JSON with the nodes as `peers.json` has them, and then reads lines of JSON from its standard input:
`{"nodes": [NAME, …], "answer": …}`, where the answer is "honest", "hang", "gone" (nobody listens, and the link is
lost), or what is to be sent in place of an answer; each line is confirmed by an empty one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tests.fleet.nodes import FleetNode
from xmigd.fleet.reading import TOPIC, Readings
from xmigd.fleet.schemas import FleetDevice, FleetJob, FleetProcess, NodeShown
from xmigd.peers import known as known_peers
from xmigd.peers.certificates import open_identity
from xmigd.peers.known import KnownPeer, KnownPeers
from xmigd.peers.links import PeerLinks

HOST = "127.0.0.2"  # another one than that of daemons, whose ports are chosen before they listen
GPUS = 8
JOBS = 7  # of a node, as in the trace of tests/bench/fleet.py


def shown(number: int, owner: int | None) -> NodeShown:
    """What the node with this number has."""
    devices = [
        FleetDevice(
            id=f"cuda:{gpu}", name="NVIDIA H100 80GB HBM3", state="ready", memory_bytes=80 << 30,
            used_bytes=20 << 30 if gpu < JOBS else 0, capacity_bytes=76 << 30, utilisation=0.5,
            processes=int(gpu < JOBS),
        ) for gpu in range(GPUS)
    ]  # fmt: skip
    jobs = [
        FleetJob(
            id=f"{number:08x}{gpu:024x}", name=f"training-{number}-{gpu}", uid=1000 + gpu, user=f"user{gpu}",
            state="running", created_at=1.0,
            processes=[
                FleetProcess(id=f"{number:08x}{gpu:08x}", device=f"cuda:{gpu}", state="running",
                             memory_bytes=20 << 30, busy_share=0.3)
            ],
        ) for gpu in range(JOBS) if owner in (None, 1000 + gpu)
    ]  # fmt: skip
    return NodeShown(version="0.1.0", at=time.time(), devices=devices, jobs=jobs)


class LyingReadings(Readings):
    """`answer`: as the module says."""

    answer: Any = "honest"

    async def _answer(self, peer: str, body: dict[str, Any]) -> None:
        answer = self.answer
        if answer == "honest":
            # As the daemon's, without the thread that a node of its own has for it.
            answer = {"shown": (await self._own(body["owner"])).model_dump()}
        if answer != "hang":
            self._links.send(peer, {"topic": TOPIC, "op": "shown", "id": body["id"]} | answer)


class StandIn:
    def __init__(self, folder: Path, number: int, reader: KnownPeer) -> None:
        self.name = f"node-{number:04}"
        self._folder = folder / self.name
        self._folder.mkdir()
        self._number = number
        self._reader = reader
        self._identity = open_identity(self._folder)
        self._listening = socket.create_server((HOST, 0))
        self.known = KnownPeer(
            self.name, f"{HOST}:{self._listening.getsockname()[1]}", self._identity.fingerprint,
            self._identity.certificate,
        )  # fmt: skip

    async def start(self) -> None:
        known = KnownPeers(self._folder, self.name, self._identity)
        known.put(self._reader)
        self._links = PeerLinks(node=self.name, identity=self._identity, known=known, listening=self._listening)

        async def own(owner: int | None) -> NodeShown:
            return shown(self._number, owner)

        self._readings = LyingReadings(self._links, own, lambda: ["*"])
        await self._links.start()

    async def answers(self, answer: Any) -> None:
        if answer == "gone":
            await self._links.close()
            self._listening.close()
        else:
            self._readings.answer = answer


async def serve(folder: Path, count: int, reader: KnownPeer, out: IO[str]) -> None:
    made = {each.name: each for each in (StandIn(folder, number, reader) for number in range(count))}
    for each in made.values():
        await each.start()
    print(json.dumps([asdict(each.known) for each in made.values()]), file=out, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = json.loads(line)
        for name in wanted["nodes"]:
            await made[name].answers(wanted["answer"])
        print(file=out, flush=True)


class StandIns:
    """The process with them, for tests."""

    def __init__(self, folder: Path, count: int, reader: KnownPeer) -> None:
        words = [sys.executable, "-m", __name__, str(folder), str(count), json.dumps(asdict(reader))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peers = json.loads(self._line())

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, nodes: Iterable[str], answer: Any) -> None:
        """From the next question on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"nodes": list(nodes), "answer": answer}) + "\n")
        self._process.stdin.flush()
        self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the stand-ins have ended"
        return line


@contextlib.contextmanager
def reading(folder: Path, native_dir: Path, count: int, **settings: Any) -> Iterator[tuple[FleetNode, StandIns]]:
    """A daemon that is called `a-reader`, and stand-ins `node-0000`, … that it is connected with."""
    own = folder / "reader"
    own.mkdir()
    reader = FleetNode(own, "a-reader", native_dir, **settings)
    identity = open_identity(own)
    (folder / "standins").mkdir()
    standins = StandIns(
        folder / "standins", count,
        KnownPeer(reader.name, reader.address, identity.fingerprint, identity.certificate),
    )  # fmt: skip
    try:
        (own / known_peers.FILE).write_text(json.dumps({"peers": standins.peers}))
        with reader:
            # Not without a pause: to list so many peers takes the daemon as long as to connect some.
            ends = time.monotonic() + 300
            while any(peer["state"] != "connected" for peer in reader.client.get("/v1/peers")):
                assert time.monotonic() < ends, "not all are connected"
                time.sleep(0.5)
            yield reader, standins
    finally:
        standins.close()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the log, which nobody reads
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), KnownPeer(**json.loads(sys.argv[3])), answers))
