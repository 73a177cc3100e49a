"""Each user has an MPS of their own, which runs as them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import harness
from tests.daemon.conftest import MakeNode, make_node, peer_native
from tests.daemon.node import Node, Program
from tests.mps.conftest import environment

__all__ = ["make_node", "peer_native"]
USERS = (0, 65534)
pytestmark = harness.needs_root


@pytest.fixture
def node(make_node: MakeNode, native_dir: Path) -> Node:
    node = make_node(native_dir, XMIG_MPS_DEVICES="cpu:0", XMIG_DEVICES="cpu:0", XMIG_STANDBY="false")
    node.start()
    return node


def uids(pid: int) -> set[str]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return set(status["Uid"].split())


def test_of_two_users(node: Node) -> None:
    with Program(node) as first, Program(node, user=65534) as second:
        assert [program.welcome()[0] for program in (first, second)] == [0, 0]
        folders = {}
        for process in node.processes(live=True):
            pipe = Path(environment(process["server_pid"])["CUDA_MPS_PIPE_DIRECTORY"])
            folders[process["uid"]] = pipe.parent
        assert set(folders) == set(USERS)
        assert len(set(folders.values())) == 2
        for uid, folder in folders.items():
            for each, owner, mode in ((folder, 0, 0o711), (folder / "pipe", uid, 0o700), (folder / "log", uid, 0o700)):
                status = each.stat()
                assert (status.st_uid, status.st_mode & 0o777) == (owner, mode)
            if uid:  # what root opens or gives away there is what it has made
                words = ["mv", str(folder / "log"), str(folder / "mine")]
                assert subprocess.run(words, user=uid, group=uid, capture_output=True, check=False).returncode != 0
            started = [
                int(each.name)
                for each in Path("/proc").iterdir()
                if each.name.isdecimal() and _is_control(each, folder / "pipe")
            ]
            assert [uids(pid) for pid in started] == [{str(uid)}]
        assert os.stat(folders[0].parent).st_uid == 0


def _is_control(process: Path, pipe: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"-f" in words and f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode() in variables
