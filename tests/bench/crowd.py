"""What others notice of a user who opens thousands of connections and says nothing, at each of the daemon's doors, and
of one who asks the dashboard for pages without a pause."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.native import Failed
from tests.connections.callers import HOG, MANY, OTHER, ask, crowd
from xmigd.demo.node import Node
from xmigd.measurements import Row

ANSWERS = 500
BUSY = 100  # connections that ask without a pause
PAUSE = 0.01  # seconds between two requests
# What is silent stays: with the time-outs that programs have by default, it would be gone after ten seconds.
PATIENT = {
    f"{prefix}{name}": "600" for prefix in ("XMIG_", "XMIG_WEB_") for name in ("REQUEST_TIMEOUT", "IDLE_TIMEOUT")
}


def measure(node: Node, front: str) -> Iterator[Row]:
    """`front`: where xmig-web listens. The node and it are PATIENT."""
    if os.geteuid() != 0:
        print("left out: only root can be several users, of whom one takes the connections", file=sys.stderr)
        return
    node.folder.chmod(0o755)  # for others to come to its socket
    token = node.client.post("/v1/tokens", {"name": "bench"})["token"]
    tcp = str(node.client.get("/v1/node")["tcp_address"]).removeprefix("http://")
    doors: dict[str, tuple[str | Path, str]] = {
        "Unix socket": (node.settings.api_socket, "/v1/node"), "TCP": (tcp, "/v1/node"), "xmig-web": (front, "/login"),
    }  # fmt: skip
    for door, (target, path) in doors.items():
        with crowd("silent", target, MANY, HOG, open=False) as end:
            took = answers(target, path, token if door == "TCP" else "", at=f"the {door}")
            found = end()
        if not found["statuses"].get("429"):
            raise Failed(f"nobody was refused: {found}")
        yield Row(
            name=f"crowd at {door}: others, 99th percentile", value=round(took[int(0.99 * (ANSWERS - 1))], 1),
            unit="ms", target=100, better="lower",
            conditions=f"{MANY} silent connections of one user, from the first on; GET {path} of another user, each on "
            f"a connection of its own, {ANSWERS} times; median {took[ANSWERS // 2]:.1f} ms, slowest {took[-1]:.0f} ms",
        )  # fmt: skip
    # Root is a visitor whom xmig-web takes without a token; everybody else has to give one.
    for uid, path, what in ((OTHER, "/login", "another user"), (0, "/jobs", "root")):
        with crowd("busy", front, BUSY, HOG) as end:
            took = answers(front, path, "", at="xmig-web", uid=uid)
            found = end()
        yield Row(
            name=f"pages without a pause: {path} of others, 99th percentile",
            value=round(took[int(0.99 * (ANSWERS - 1))], 1), unit="ms", target=100, better="lower",
            conditions=f"xmig-web, {BUSY} connections of one user that ask for the next page when they have one: "
            f"{found['pages']:,} pages, half of them within {1e3 * found['page']:.0f} ms; GET {path} of {what}, each "
            f"on a connection of its own, {ANSWERS} times; median {took[ANSWERS // 2]:.1f} ms, slowest "
            f"{took[-1]:.0f} ms",
        )  # fmt: skip


def answers(target: str | Path, path: str, token: str, *, at: str, uid: int = OTHER) -> list[float]:
    """Milliseconds of each, the shortest first."""
    took = []
    for _ in range(ANSWERS):
        time.sleep(PAUSE)
        began = time.perf_counter()
        status, _ = ask(target, path, uid=uid, token=token)
        took.append(1e3 * (time.perf_counter() - began))
        if status != 200:
            raise Failed(f"somebody else is answered with {status} at {at}")
    return sorted(took)
