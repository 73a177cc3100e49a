"""Who is queried nothing does nothing: neither program wakes up to look whether there is something to do."""

from __future__ import annotations

import email.utils
import re
import time
from pathlib import Path

import httpx

from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.web.front import Front

__all__ = ["make_node", "peer_native"]

SECONDS = 2.0


def wakes(pid: int) -> float:
    """How often its main thread went to sleep in so many seconds, in the calmest of a few stretches: what comes before
    is not over at once."""
    found = []
    for _ in range(4):
        before, begun = _switches(pid), time.monotonic()
        time.sleep(SECONDS)
        found.append((_switches(pid) - before) * SECONDS / (time.monotonic() - begun))
    return min(found)


def _switches(pid: int) -> int:
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)$", status, re.MULTILINE)[0])


def test_at_rest(make_node: MakeNode) -> None:
    node = make_node()
    node.start()
    with Front(node) as front:
        assert front.process is not None
        with httpx.Client(base_url=front.address, timeout=60) as http:
            assert http.get("/healthz").status_code == 200
        assert wakes(front.process.pid) <= 2
        assert wakes(node.pid) <= 16  # lines of jobs, samples of devices, processes of jobs


def test_the_date_of_an_answer(make_node: MakeNode) -> None:
    """On one connection, seconds apart."""
    node = make_node()
    node.start()
    with Front(node) as front, httpx.Client(base_url=front.address, timeout=60) as http:
        for _ in range(2):
            before = int(time.time())
            reported = email.utils.parsedate_to_datetime(http.get("/healthz").headers["date"]).timestamp()
            assert before <= reported <= time.time()
            time.sleep(1.2)
