"""Supervision with the real xmig-server, where it differs from a peer that only uses the protocol: it maps what it
is given, as the user that it runs as. The programs here shake hands and do nothing; real ones are in tests/recovery."""

from __future__ import annotations

import os
import pwd
import resource
import signal
from pathlib import Path

import pytest

from tests.harness import descriptor_stores, open_fds, stop

from .conftest import MakeNode
from .node import Node, Program, alive, until
from .test_supervision import wait_for_recoveries


@pytest.fixture
def node(make_node: MakeNode, native_dir: Path) -> Node:
    node = make_node(native_dir)
    node.start()
    return node


def test_kills_of_servers_and_standbys_leak_nothing(node: Node) -> None:
    """Five in a row of each of four programs: these make no progress, and more would only be replaced ever later."""
    nobody = node.descriptors()
    for first in range(1, 21, 5):
        with Program(node) as program:
            assert program.welcome()[:2] == (0, 3)
            node.open_devices()
            process = node.wait_for_standby()
            before = node.descriptors()
            for count in range(first, first + 5):
                victims = node.servers() if count % 4 == 0 else [process["server_pid"]]
                # Together: the second would otherwise be the one that has recovered from the first.
                stop(node.pid)
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                os.kill(node.pid, signal.SIGCONT)
                process = node.wait_for_standby(after=process["server_pid"])
                wait_for_recoveries(node, count)
            # A standby that is killed at the same moment may have been given the process before.
            assert process["generation"] >= 6
            assert len(node.servers()) == 2
            node.wait_until_closed(before)
        until(lambda: not node.servers(), "servers end with their program")
        node.wait_until_closed(nobody)
    assert all(recovery["differing"] == 0 for recovery in node.get("/v1/recoveries"))


def test_room_for_descriptors_is_made_in_advance(node: Node) -> None:
    """The kernel's table of them: when it grows later, all processors are waited for, in the middle of a recovery."""
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        node.wait_for_standby()
        for pid in (node.pid, *node.servers()):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            assert int(status["FDSize"]) >= min(16384, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_servers_run_as_the_program_does(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can serve other users")
    with Program(node, user=65534) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        for pid in node.servers():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            assert set(status["Uid"].split()) == {"65534"}
            assert set(status["Gid"].split()) == {"65534"}
            assert set(status["Groups"].split()) <= {"65534"}
            assert int(status["CapEff"], 16) == 0
            # Where the driver keeps what it compiles.
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"HOME={pwd.getpwuid(65534).pw_dir}".encode() in environment
        os.kill(process["server_pid"], signal.SIGKILL)
        wait_for_recoveries(node, 1)
        # Without root's rights it finds the next daemon too.
        process = node.wait_for_standby()
        node.kill()
        node.start()
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]


def test_a_server_holds_nothing_of_the_daemons(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        node.wait_for_standby()
        for pid in node.servers():
            kinds = {name.partition(":")[0] for name in open_fds(pid)}
            assert not any("xmig.db" in name or "lock" in name for name in open_fds(pid)), open_fds(pid)
            assert kinds <= {"/dev/null", "socket", "/memfd", "anon_inode", "pipe"}
            assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_a_server_that_dies_with_everybody_leaves_a_clear_answer(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        (store,) = descriptor_stores(node.runtime_dir)
        node.kill()
        for pid in (store, process["server_pid"]):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(store), "nobody has the store's socket")
        node.start()
        status, _, _, message = program.reattach(process["id"])
        assert status == 46
        assert "its server ended while no daemon was there, and nobody kept its memory; start" in message
        assert alive(program.pid)


def test_a_stopped_server_is_replaced_when_it_is_killed(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        stop(process["server_pid"])
        os.kill(process["server_pid"], signal.SIGKILL)
        wait_for_recoveries(node, 1)
