"""A checkpoint with which the program ends."""

from __future__ import annotations

import threading

from tests.migration.moves import succeeded
from xmigd.demo.node import Program


def stop_at_checkpoint(program: Program) -> str:
    """The checkpoint's id. Its parent, who is we, takes note of the end at once: the daemon waits for that."""
    reaping = threading.Thread(target=program.process.wait)
    reaping.start()
    body = {"job": program.job, "stop": True}
    operation = succeeded(program.node, program.node.client.post("/v1/checkpoints", body))
    reaping.join(60)
    return str(operation["result"]["checkpoint"])
