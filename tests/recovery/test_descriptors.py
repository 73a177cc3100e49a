"""Every descriptor that a process of the job's owner holds for xMIG, with its reason. Whoever may trace a server has
all of them (pidfd_getfd(2)): the job's owner. So none is anything but the job's own memory, and the ways to the daemon
on which it trusts nobody."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import info, moved, resumed, suspended
from tests.recovery.conftest import Starter
from xmigd.demo.node import Node, Program

REASONS = {
    r"/dev/null": "standard input: nothing",
    r"pipe:\[\d+\]": "what it prints, read by the daemon",
    # On a GPU the driver opens one more, @cuda-uvmfd-<namespace>-<pid>, as in every process that uses it.
    r"socket:\[\d+\]": "its connection to the daemon; its backlog, once it has a job",
    r"anon_inode:\[pidfd\]": "its program, whose end it waits for",
    r"/memfd:xmig-journal \(deleted\)": "the job's journal",
    r"/memfd:xmig-quota \(deleted\)": "what the job's processes have of its memory quota, if it has one",
    r"/memfd:xmig-staging \(deleted\)": "bytes of copies under way",
    r"/memfd:xmig-pinned \(deleted\)": "the program's page-locked memory",
    r"/memfd:xmig-snapshot[01] \(deleted\)": "the last two snapshots",
    r"/memfd:xmig-image \(deleted\)": "a module of the program's, as it was loaded",
    r"/memfd:xmig-module \(deleted\)": "the same, as the cpu device's code",
    r"/memfd:xmig-device-memory-of-cpu:\d \(deleted\)": "device memory: the program's, and the copies of snapshots",
    r"/memfd:xmig-shadow \(deleted\)": "host memory that a suspended program is in",
    r".*/suspended/[0-9a-f]+/[a-z0-9-]+": "the file that a suspended program is in",
}
MEMORY = re.compile(r"/memfd:.*|.*/suspended/.*")  # of the job; the daemon has it, too
ONCE = ("anon_inode", "/memfd:xmig-journal", "/memfd:xmig-staging", "/memfd:xmig-pinned")


@dataclass(frozen=True)
class Open:
    """One descriptor of a process."""

    number: int
    link: str
    file: tuple[int, int]  # the open file's device and inode
    writes: bool


def opened(pid: int) -> list[Open]:
    found = []
    for entry in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda entry: int(entry.name)):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = entry.stat()
            flags = int(re.findall(r"flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text())[0], 8)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            found.append(Open(int(entry.name), os.readlink(entry), (status.st_dev, status.st_ino), writes))
    return found


def check(node: Node, pid: int) -> list[Open]:
    """Each has its reason, and nothing is the daemon's own."""
    assert node.process is not None
    found, daemon = opened(pid), opened(node.process.pid)
    unknown = [one for one in found if not any(re.fullmatch(link, one.link) for link in REASONS)]
    assert not unknown, f"descriptors without a reason: {unknown}"
    assert all(one.link == "/dev/null" for one in found if one.number == 0)
    for beginning in ONCE:
        assert len([one for one in found if one.link.startswith(beginning)]) <= 1, beginning
    # The daemon's files: its log, its database, its sockets, other jobs' memory that is not this job's.
    anyones = ("anon_inode:", "/dev/null")
    shared = {one.file for one in found if not MEMORY.match(one.link) and not one.link.startswith(anyones)}
    theirs = [one for one in daemon if one.file in shared]
    assert all(one.link.startswith("pipe:") and not one.writes for one in theirs), theirs
    # What it prints goes nowhere else, and it does not read it.
    pipes = {one.number: one for one in found if one.link.startswith("pipe:")}
    assert set(pipes) == {1, 2}
    assert pipes[1].file == pipes[2].file
    assert all(pipe.writes for pipe in pipes.values())
    assert [one for one in theirs if one.file == pipes[1].file], "nobody reads it"
    return found


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1) as node:
        yield node


@pytest.fixture
def daemon(node: Node) -> Node:
    return node


def check_all(node: Node, programs: int) -> dict[int, list[Open]]:
    """Of these programs, each of which has a server and a standby: those before them may still be on their way out, and
    one that has been found again may not yet have the pipe that it is given."""
    harness.wait_until(lambda: len(harness.server_pids(node)) == 2 * programs, "a server and a standby each, no others")
    return {pid: check_found_again(node, pid) for pid in harness.server_pids(node)}


def check_found_again(node: Node, pid: int) -> list[Open]:
    """Once it prints to this daemon."""
    assert node.process is not None
    daemon = node.process.pid

    def prints_to_it() -> bool:
        pipes = {one.file for one in opened(daemon) if one.link.startswith("pipe:")}
        return {one.file for one in opened(pid) if one.number in (1, 2)} <= pipes

    harness.wait_until(prints_to_it, "what it prints goes to this daemon")
    return check(node, pid)


def wait_for_standby(program: Program, after: int = 0) -> None:
    def there() -> bool:
        now = program.info() or {}
        return (now["state"], now["standby"]) == ("running", "warm") and int(now["server_pid"]) != after

    harness.wait_until(there, "it runs, and has a standby")


def test_every_descriptor_has_its_reason(node: Node, start: Starter) -> None:
    other, program = start("stepwise"), start("stepwise")
    for each in (other, program):
        harness.go(each)
        harness.steps(each, 300)
        wait_for_standby(each)
    files = check_all(node, 2)
    # No server has anything of the other job's.
    mine, theirs = ((info(each)["server_pid"]) for each in (program, other))
    memory = [{one.file for one in files[pid] if one.link.startswith("/memfd:")} for pid in (mine, theirs)]
    assert all(memory)
    assert not memory[0] & memory[1]
    # The control socket, the backlog, the pidfd: one of each; standbys have no program yet.
    for pid in files:
        kinds = [one.link.split(":")[0] for one in files[pid]]
        assert kinds.count("socket") == (2 if pid in (mine, theirs) else 1)
        assert kinds.count("anon_inode") == (1 if pid in (mine, theirs) else 0)

    os.kill(mine, signal.SIGKILL)
    harness.steps(program, 100)
    wait_for_standby(program, after=mine)
    check_all(node, 2)  # after a recovery
    moved(program)
    wait_for_standby(program)
    check_all(node, 2)  # after a move
    node.kill()
    node.start()
    for each in (program, other):
        wait_for_standby(each)
    check_all(node, 2)  # and of those that another daemon has found


@pytest.mark.parametrize("to", ["host", "file"])
def test_a_suspended_program_s_holder(node: Node, start: Starter, to: str) -> None:
    program = start("stepwise")
    harness.go(program)
    harness.steps(program, 100)
    suspended(program, to)
    check(node, info(program)["server_pid"])
    node.kill()
    node.start()
    harness.wait_until(lambda: bool(info(program)["held_bytes"]), "it is found again")
    check_found_again(node, info(program)["server_pid"])
    resumed(program)
    harness.steps(program, 100)
    harness.output(program)


def test_the_check_sees_a_descriptor_of_the_daemon_s(node: Node) -> None:
    """The check itself: of a process that was given what servers had before."""
    assert node.process is not None
    with pytest.raises(AssertionError, match="without a reason"):
        check(node, node.process.pid)
