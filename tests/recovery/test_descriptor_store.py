"""Memory that xMIG's own process keeps, where no service manager does: the daemon and a server die at the same moment,
and nothing is lost. The same with a service manager: test_kept.py."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, moved, resumed, suspended
from tests.recovery.conftest import Starter
from tests.recovery.kept_memory import kill_both, memory, settled, store, stores
from xmigd.demo.node import Node, Program
from xmigd.native import DESCRIPTOR_STORE

PARTS = (200, 300, 50)


@pytest.fixture
def daemon(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, adoption_grace=0.5, port=-1) as node:
        node.folder.chmod(0o755)  # other users come as far as the sockets
        yield node
        node.stop()
    harness.wait_until(lambda: not stores(node), "nothing is left to be held, and the store has ended")


@pytest.fixture
def expected(daemon: Node, start: Starter) -> list[str]:
    """The answers of a program that nothing happens to."""
    program = start("stepwise")
    harness.go(program)
    answers = [harness.steps(program, part) for part in PARTS]
    harness.output(program)
    return answers


def test_daemon_and_server_die_together(daemon: Node, start: Starter, expected: list[str]) -> None:
    program = start("stepwise")
    harness.go(program)
    holder = store(daemon)
    answers = []
    for part in PARTS:
        answers.append(harness.steps(program, part))
        kill_both(daemon, program)
        daemon.start()
        assert store(daemon) == holder, "the same one, found again"
    assert answers == expected
    program.until("running")
    harness.output(program)
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)] * len(PARTS)
    harness.wait_until(lambda: not memory(holder), "nothing of it is kept")


def nothing(daemon: Node, program: Program) -> None: ...


def found_again(daemon: Node, program: Program) -> None:
    server = program.until("running")["server_pid"]
    daemon.kill()
    daemon.start()
    assert program.until("running")["server_pid"] == server


def recovered(daemon: Node, program: Program) -> None:
    before = harness.kill_server(program)
    harness.wait_until(lambda: program.until("running")["server_pid"] not in (None, before), "another server has it")


def moved_away(daemon: Node, program: Program) -> None:
    moved(program)


def suspended_once(daemon: Node, program: Program) -> None:
    here = info(program)["device"]
    suspended(program)
    resumed(program, here)


@pytest.mark.parametrize("before", [nothing, found_again, recovered, moved_away, suspended_once])
def test_memory_that_the_daemon_never_heard_of(
    daemon: Node, start: Starter, expected: list[str], before: Callable[[Node, Program], None]
) -> None:
    """The daemon stands still while the server takes memory, and they die together: the backlog has it."""
    program = start("stepwise")
    before(daemon, program)
    server = program.until("running")["server_pid"]
    assert daemon.process is not None
    harness.stop(daemon.process.pid)
    harness.go(program)
    answers = [harness.steps(program, PARTS[0])]
    assert memory(server) - memory(store(daemon)), "the server has memory that nobody was informed of"
    for victim in (daemon.process.pid, server):
        os.kill(victim, signal.SIGKILL)
    daemon.process.wait()
    daemon.start()
    answers += [harness.steps(program, part) for part in PARTS[1:]]
    assert answers == expected
    program.until("running")  # it has its answers before the daemon has heard that the recovery is over
    last = program.recoveries()[-1]
    assert (last["outcome"], last["exact"]) == ("resumed", True)
    harness.output(program)


def test_several_programs_and_their_standbys(daemon: Node, start: Starter, expected: list[str]) -> None:
    programs = [start("stepwise") for _ in range(3)]
    for program in programs:
        harness.go(program)
        assert harness.steps(program, PARTS[0]) == expected[0]
    kill_both(daemon, programs[0], *(set(harness.server_pids(daemon)) - {programs[0].until("running")["server_pid"]}))
    daemon.start()
    for program in programs:
        assert harness.steps(program, PARTS[1]) == expected[1]
        harness.output(program)


def test_a_server_of_which_there_is_no_record(daemon: Node, start: Starter, expected: list[str]) -> None:
    """The daemon died before its record was written. It takes longer to announce itself than the daemon waits for those
    that nobody knows; its process is its own all the same, and recovered if it ends."""
    program = start("stepwise")
    harness.go(program)
    answers = [harness.steps(program, PARTS[0])]
    for part, dies in zip(PARTS[1:], (False, True), strict=True):
        server = program.until("running")["server_pid"]
        daemon.kill()
        with contextlib.closing(sqlite3.connect(daemon.folder / "xmig.db")) as database, database:
            changed = database.execute("update processes set server_pid = null, server_start_time = null")
            assert changed.rowcount > 0
        harness.stop(server)
        daemon.start()
        harness.wait_until(
            lambda: "still waiting for a server" in daemon.log.read_text(), "the daemon's patience with others is over"
        )
        daemon.log.write_text("")
        os.kill(server, signal.SIGKILL if dies else signal.SIGCONT)
        answers.append(harness.steps(program, part))
        harness.wait_until(lambda: (program.info() or {}).get("server_pid") is not None, "the daemon has its server")
        assert (program.until("running")["server_pid"] == server) == (not dies)
    assert answers == expected
    harness.output(program)
    program.until("ended")
    assert [(r["outcome"], r["exact"]) for r in program.recoveries()] == [("resumed", True)]


def test_the_store_dies_and_another_one_has_everything(daemon: Node, start: Starter, expected: list[str]) -> None:
    program = start("stepwise")
    harness.go(program)
    answers = [harness.steps(program, PARTS[0])]
    holder = store(daemon)
    os.kill(holder, signal.SIGKILL)
    harness.wait_until(lambda: bool(stores(daemon)) and stores(daemon) != [holder], "another one")
    harness.wait_until(lambda: settled(daemon), "it has been given all memory")
    kill_both(daemon, program)
    daemon.start()
    answers.append(harness.steps(program, PARTS[1]))
    answers.append(harness.steps(program, PARTS[2]))
    assert answers == expected
    harness.output(program)


def test_all_three_die_together(daemon: Node, start: Starter) -> None:
    """Nobody held its memory: the program is informed, and the next daemon has a store again."""
    program = start("stepwise")
    harness.go(program)
    harness.steps(program, PARTS[0])
    kill_both(daemon, program, store(daemon))
    harness.ask(program, 10)
    daemon.start()
    _, reported = program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    assert "returned 46" in reported, "device unavailable"
    program.until("lost", "ended")
    why = "nobody kept its memory"
    harness.wait_until(lambda: any(why in line for line in program.lines("xmigd")), "its job's log says why")
    assert store(daemon)


def test_it_ends_with_the_last_program(daemon: Node, start: Starter) -> None:
    """No daemon comes back: memory is held for its programs, and for no longer."""
    first, second = start("stepwise"), start("stepwise")
    for each in (first, second):
        harness.go(each)
        harness.steps(each, 100)
    harness.wait_until(lambda: settled(daemon), "the store has all memory")
    holder = store(daemon)
    kill_both(daemon, first)
    held = len(memory(holder))
    first.process.kill()
    harness.wait_until(lambda: 0 < len(memory(holder)) < held, "what was the first's is free")
    second.process.kill()
    harness.wait_until(lambda: not harness.open_fds(holder), "the store has ended")
    daemon.start()


def test_without_programs_it_leaves_with_the_daemon(daemon: Node) -> None:
    holder = store(daemon)
    daemon.stop()
    harness.wait_until(lambda: not harness.open_fds(holder), "the store has ended")
    daemon.start()
    assert store(daemon) != holder


CONNECT = """
import os, socket, sys
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    s.connect(sys.argv[1])
except PermissionError:
    sys.exit("refused by the file system")
s.settimeout(60)
data, fds, _, _ = socket.recv_fds(s, 4096, 8)
sys.exit(0 if data else "refused by the store")
"""


@harness.needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_user_is_refused(daemon: Node, start: Starter, mode: int) -> None:
    """By the socket's mode, and by the store itself should the mode ever be another one."""
    program = start("stepwise")
    harness.go(program)
    harness.steps(program, 100)
    harness.wait_until(lambda: settled(daemon), "the store has all memory")
    path = daemon.settings.runtime_dir / "descriptors.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    outcome = subprocess.run(
        [sys.executable, "-c", CONNECT, path, "65534"], capture_output=True, text=True, check=False, timeout=90
    )
    why = "the file system" if mode == 0o600 else "the store"
    assert (outcome.returncode, outcome.stderr.strip()) == (1, f"refused by {why}")
    # The daemon's connection is as it was.
    kill_both(daemon, program)
    daemon.start()
    harness.steps(program, 100)
    harness.output(program)


# --- the process alone -----------------------------------------------------------------------------------------------


Connect = Callable[[], socket.socket]


@pytest.fixture
def alone(native_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], Connect]]:
    """A store that no daemon has."""
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder, contextlib.ExitStack() as stack:
        path = f"{folder}/descriptors.sock"
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listening.bind(path)
        listening.listen(4)
        process = subprocess.Popen(
            [native_dir / DESCRIPTOR_STORE, "--listen-fd", str(listening.fileno())], pass_fds=(listening.fileno(),)
        )

        def connect() -> socket.socket:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(60)
            sock.connect(path)
            return sock

        yield process, connect
        process.kill()
        process.wait()


def everything(sock: socket.socket) -> list[tuple[str, int]]:
    """What a new connection is given: each name, and the inode of what came with it."""
    found: list[tuple[str, int]] = []
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 8)
        if data == b"END=1":
            return found
        assert data
        assert len(fds) == 1
        found.append((data.decode().removeprefix("FDNAME="), os.fstat(fds[0]).st_ino))
        os.close(fds[0])


@pytest.fixture
def memfd() -> Iterator[Callable[[], int]]:
    made: list[int] = []

    def make() -> int:
        made.append(os.memfd_create("one"))
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


def send(sock: socket.socket, message: bytes, *fds: int) -> None:
    socket.send_fds(sock, [message], list(fds))


def test_garbage(alone: tuple[subprocess.Popen[bytes], Connect], memfd: Callable[[], int]) -> None:
    process, connect = alone
    first = connect()
    assert everything(first) == []
    one, two = memfd(), memfd()
    me = os.pidfd_open(os.getpid())
    before = len(harness.open_fds(process.pid))
    for message, fds in (
        (b"\0", ()), (b"=", ()), (b"\n\n\n", ()), (b"x" * 1024, ()), (b"x" * 100_000, ()), (b"\xff" * 700, (one,)),
        (b"FDSTORE=1", (one,)), (b"FDSTORE=1\nFDNAME=", (one,)), (b"FDSTORE=1\nFDNAME=none", ()),
        (b"FDSTORE=1\nFDNAME=two", (one, two)), (b"FDSTOREREMOVE=1", ()), (b"FDSTOREREMOVE=1\nFDNAME=unknown", ()),
        (b"WATCH=1", (me,)), (b"WATCH=1\nPROCESS=p", ()), (b"WATCH=1\nPROCESS=p", (one, two)),
        (b"FDNAME", (two,)), (b"FDSTORE=1\nFDNAME=" + b"n" * 2000, (two,)),
    ):  # fmt: skip
        with contextlib.suppress(OSError):
            send(first, message, *fds)
    send(first, b"FDSTORE=1\nFDNAME=good\nPROCESS=p", one)
    send(first, b"FDSTORE=1\nFDNAME=own", two)
    send(first, b"WATCH=1\nPROCESS=p", me)
    send(first, b"FDSTORE=1\nFDNAME=good\nPROCESS=p", two)  # a name that it has: in the place of what was there
    os.close(me)
    again = connect()
    inode = os.fstat(two).st_ino
    assert everything(again) == [("own", inode), ("good", inode)]
    what = "two descriptors and a pidfd, and nothing of the rest"
    harness.wait_until(lambda: len(harness.open_fds(process.pid)) == before + 3, what)
    assert process.poll() is None


def test_a_daemon_that_does_not_read(alone: tuple[subprocess.Popen[bytes], Connect], memfd: Callable[[], int]) -> None:
    """The next one is served all the same."""
    process, connect = alone
    first = connect()
    assert everything(first) == []
    me = os.pidfd_open(os.getpid())
    send(first, b"WATCH=1\nPROCESS=p", me)
    os.close(me)
    for number in range(1000):
        send(first, b"FDSTORE=1\nFDNAME=%d\nPROCESS=p" % number, memfd())
    deaf = connect()
    first.close()
    last = connect()
    assert [name for name, _ in everything(last)] == [str(number) for number in range(1000)]
    deaf.close()
    assert process.poll() is None


def test_what_belongs_to_nobody_is_not_held_alone(
    alone: tuple[subprocess.Popen[bytes], Connect], memfd: Callable[[], int]
) -> None:
    process, connect = alone
    with subprocess.Popen(["sleep", "600"]) as program:
        first = connect()
        assert everything(first) == []
        send(first, b"FDSTORE=1\nFDNAME=index", memfd())
        send(first, b"FDSTORE=1\nFDNAME=0\nPROCESS=p", memfd())
        pidfd = os.pidfd_open(program.pid)
        send(first, b"WATCH=1\nPROCESS=p", pidfd)
        os.close(pidfd)
        first.close()
        again = connect()
        assert [name for name, _ in everything(again)] == ["index", "0"]
        again.close()
        assert process.poll() is None
        program.kill()
    assert process.wait(timeout=60) == 0


def test_usage(native_dir: Path) -> None:
    for arguments in ((), ("--listen-fd",), ("--listen-fd", "x"), ("--listen-fd", "-1"), ("--help",)):
        command: list[str | Path] = [native_dir / DESCRIPTOR_STORE, *arguments]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        assert outcome.returncode == 2
        assert "started by xmigd" in outcome.stderr
