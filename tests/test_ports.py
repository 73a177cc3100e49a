"""A port that a test has chosen is its own until it listens there."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests import ports
from tests.harness import ROOT

CHOOSES = f"""
import sys
from tests.ports import free_port
print(*(free_port() for _ in range({ports.PART})), flush=True)
sys.stdin.read()
"""


def test_the_kernel_gives_it_to_nobody() -> None:
    low, high = map(int, ports.CHOSEN.read_text().split())
    assert not low <= ports.free_port() <= high


def test_no_other_process_chooses_it() -> None:
    """As long as both live."""
    command, piped = [sys.executable, "-c", CHOOSES], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=piped, stdout=piped, text=True, cwd=ROOT) as one,
        subprocess.Popen(command, stdin=piped, stdout=piped, text=True, cwd=ROOT) as other,
    ):
        chosen = []
        for process in (one, other):
            assert process.stdout is not None
            chosen += process.stdout.readline().split()
        assert len(set(chosen)) == 2 * ports.PART
        assert str(ports.free_port()) not in chosen


def test_who_listens_keeps_it() -> None:
    port = ports.free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert port not in {ports.free_port() for _ in range(2 * ports.PART)}
