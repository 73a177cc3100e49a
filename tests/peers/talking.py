"""xmigd with one more user of its links: it sends numbered messages, and checks those that come.

It listens at `talk.sock` in the runtime directory for lines of JSON: `{"to": NAME, "count": N}` sends the next N
numbers; `{}` asks for what was heard. Everything else is the daemon's own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmigd import daemon
from xmigd.main import main
from xmigd.peers.links import PeerLinks

AT_ONCE = 20  # messages between two turns of the loop


class Talker:
    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._sent: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self.heard: dict[str, dict[str, Any]] = {}
        self._sending: set[str] = set()
        links.register("talk", self)

    def _of(self, peer: str) -> dict[str, Any]:
        return self.heard.setdefault(peer, {"events": [], "wrong": [], "last": 0})

    def session(self, peer: str) -> None:
        self._of(peer)["events"].append("session")
        self._of(peer)["last"] = 0
        self._sent[peer] = 0

    def up(self, peer: str) -> None:
        self._of(peer)["events"].append("up")

    def down(self, peer: str, why: str) -> None:
        self._of(peer)["events"].append(f"down: {why}")

    def received(self, peer: str, body: dict[str, Any]) -> None:
        of = self._of(peer)
        if body["n"] != of["last"] + 1:
            of["wrong"].append((of["last"], body["n"]))
        of["last"] = body["n"]

    async def send(self, peer: str, count: int, length: int) -> dict[str, Any]:
        """The next numbers; the loop turns between them, so that connections are lost in the middle."""
        sent = 0
        while sent < count:
            number = self._sent.get(peer, 0) + 1
            if not self._links.send(peer, {"topic": "talk", "n": number, "text": "x" * length}):
                break
            self._sent[peer] = number
            sent += 1
            if sent % AT_ONCE == 0:
                await asyncio.sleep(0.001)
        return {"sent": sent}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            wanted: Mapping[str, Any] = json.loads(line)
            answer: dict[str, Any] = self.heard
            if "to" in wanted:
                answer = await self.send(wanted["to"], wanted["count"], wanted["length"])
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


class TalkingLinks(PeerLinks):
    async def start(self) -> None:
        talker = Talker(self)
        path = Path(os.environ["XMIG_RUNTIME_DIR"]) / "talk.sock"
        path.unlink(missing_ok=True)
        self.server = await asyncio.start_unix_server(talker.serve, path)
        await super().start()

    async def close(self) -> None:
        self.server.close()
        await super().close()


if __name__ == "__main__":
    daemon.PeerLinks = TalkingLinks  # type: ignore[attr-defined]
    main()
