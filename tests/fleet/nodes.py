"""Nodes that show themselves to each other, and take orders."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.peers.nodes import PeerNode, acquainted
from xmigd.client import Client

LYING = Path(__file__).with_name("lying.py")


class FleetNode(PeerNode):
    executed = LYING

    def lies(self, text: str) -> None:
        draft = self.folder / "draft"
        draft.write_text(text)
        draft.rename(self.folder / "lie.json")

    def is_honest(self) -> None:
        (self.folder / "lie.json").unlink(missing_ok=True)

    def fleet(self, client: Client | None = None) -> dict[str, dict[str, Any]]:
        """By node, as the API has it."""
        return {node["name"]: node for node in (client or self.client).get("/v1/fleet")["nodes"]}

    def as_user(self, uid: int) -> Client:
        """Over the network, with a token of this user's."""
        made = self.client.post("/v1/tokens", {"name": f"user {uid}", "scope": "read", "uid": uid})
        return Client(self.settings, url=self.client.get("/v1/node")["tcp_address"], token=made["token"])

    def ctl(self, *words: str) -> str:
        command = [sys.executable, "-m", "xmigd.cli", *words]
        environment = os.environ | {"XMIG_RUNTIME_DIR": str(self.folder), "COLUMNS": "200"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@contextlib.contextmanager
def running(native_dir: Path, **nodes: dict[str, str]) -> Iterator[list[FleetNode]]:
    """These, by their names, each with its settings. They know each other."""
    with contextlib.ExitStack() as stack:
        made = []
        for name, settings in nodes.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            more: dict[str, Any] = {"device_memory": 1 << 28} | settings
            made.append(FleetNode(folder, name, native_dir, **more))
        with ThreadPoolExecutor(len(made)) as pool:
            beginning = [pool.submit(each.__enter__) for each in made]
            for each in made:
                stack.push(each)
        for begun in beginning:
            begun.result()
        acquainted(*made)
        yield made
