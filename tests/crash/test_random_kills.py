"""The daemon is killed again and again under a running job: nothing of the job changes, all is found again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

from tests import harness
from tests.forked import Zygote
from tests.recovery.conftest import PROGRAMS

from .forked import ForkedNode

KILLS = 20
PIECES = 12
STEPS = 150


def test_the_daemon_dies_at_any_moment(native_dir: Path, kernels: Path) -> None:
    random_moments = random.Random(20261122)
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        contextlib.closing(Zygote()) as zygote,
        ForkedNode(
            Path(folder), zygote, native_dir=native_dir, device_memory=1 << 30, snapshot_cost=0.2, store_budget=1
        ) as node,
    ):
        undisturbed = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        harness.go(undisturbed)
        expected = [harness.steps(undisturbed, STEPS) for _ in range(PIECES)]
        harness.output(undisturbed)

        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
        server = program.until("running")["server_pid"]
        harness.go(program)
        answers: list[str] = []
        go_on = threading.Event()

        def work() -> None:
            """Piece by piece, over and over, for as long as the daemon is being killed."""
            while not (go_on.is_set() and len(answers) >= PIECES):
                answers.append(harness.steps(program, STEPS if len(answers) < PIECES else 1))

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for count in range(KILLS):
                # Every other daemon is killed while it is still starting.
                if count % 2:
                    time.sleep(random_moments.uniform(0, 0.1))
                node.kill()
                if count % 2 == 0:
                    node.launch()
                    time.sleep(random_moments.uniform(0, 1.2))
                else:
                    node.start()
        finally:
            go_on.set()
            worker.join(120)
        assert answers[:PIECES] == expected
        info = program.until("running")
        assert info["server_pid"] == server, "the same server all the time"
        # What the last daemon holds is all that a recovery needs.
        harness.wait_until(lambda: (program.info() or {})["standby"] == "warm", "a standby")
        os.kill(server, signal.SIGKILL)
        harness.wait_until(lambda: [r["outcome"] for r in program.recoveries()] == ["resumed"], "a recovery")
        assert program.recoveries()[0]["exact"]
        harness.output(program)
        program.until("ended")
        assert program.faults()[0]["kind"] == "server"
