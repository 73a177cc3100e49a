"""A scheduler sends SIGUSR1 to all processes of a job, some time before it ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_client_dump import ROOT, STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import succeeded

pytestmark = pytest.mark.criu


def test_it_is_written_down_and_goes_on_later(native_dir: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    let_end(undisturbed)
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        assert start(node, native_dir, undisturbed, 0).finish()[0] == 0
        command = [
            sys.executable, "-m", "xmigd.cli", "run", "--checkpoint-on-signal", "USR1", "--stop-after-checkpoint", "--",
            "setsid", "--wait", sys.executable, str(ROOT / "tests" / "criu" / "client.py"), str(output), str(STEPS),
            "0.02",
        ]  # fmt: skip
        environment = node.environment | {"KERNELS": str(native_dir / "xmig_kernels.so"), "PYTHONPATH": str(ROOT)}
        with (tmp_path / "log").open("wb") as log:
            run = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_for_lines(output, STEPS // 4)
        for pid in processes_of(run.pid):
            os.kill(pid, signal.SIGUSR1)
        ended = run.wait(timeout=120)
        log_text = (tmp_path / "log").read_text()
        assert (ended, log_text) == (-signal.SIGKILL, "")
        assert len(output.read_text().splitlines()) < STEPS
        (made,) = node.client.get("/v1/checkpoints")
        succeeded(node, node.client.post(f"/v1/checkpoints/{made['id']}:restore", {"devices": ["cpu:1"]}))
        let_end(output)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed.read_text()


def processes_of(session: int) -> list[int]:
    """All that descend from it."""
    found, new = [session], [session]
    while new:
        listed = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in new]
        new = [int(pid) for pids in listed for pid in pids]
        found += new
    return found


def test_a_program_that_is_to_end_with_its_parent(native_dir: Path, tmp_path: Path) -> None:
    """Its parent is over, and CRIU, which is the next one, leaves at once."""
    output = tmp_path / "steps"
    wish = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    client = ROOT / "tests" / "criu" / "client.py"
    with harness.own_node(native_dir, port=-1, criu=criu_or_skip()) as node, (tmp_path / "log").open("wb") as log:
        program = node.program(
            [sys.executable, "-c", wish, client, output, str(STEPS), "0.02"],
            environment={"KERNELS": str(native_dir / "xmig_kernels.so")}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
        wait_for_lines(output, STEPS // 4)
        checkpoint = stop_at_checkpoint(program)
        succeeded(node, node.client.post(f"/v1/checkpoints/{checkpoint}:restore", {"devices": []}))
        let_end(output)
        wait_for_lines(output, STEPS)
