"""What servers print: a pipe of each, whose lines the daemon writes into the logs, as its own, as many as it likes."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest

from tests.harness import stop
from xmigd.servers.output import BURST, MAX_LINE, RATE, Lines, escaped

from .conftest import MakeNode
from .node import Node, Program, alive, until
from .test_supervision import wait_for_recoveries

PIPE = 64 << 10  # bytes


@pytest.fixture
def node(make_node: MakeNode, native_dir: Path) -> Node:
    node = make_node(native_dir)
    node.start()
    return node


def write_into(server: int, data: bytes) -> int:
    """As the server's user can, who has its descriptors (pidfd_getfd(2)). How much went in."""
    fd = os.open(f"/proc/{server}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        written = 0
        while written < len(data):
            try:
                written += os.write(fd, data[written:])
            except BlockingIOError:
                break
        return written
    finally:
        os.close(fd)


def lines_with(node: Node, text: str) -> list[str]:
    return [line for line in node.log.read_text().splitlines() if text in line]


class TestLines:
    def test_lines_come_as_they_are(self) -> None:
        assert Lines(0).take("één\nzwei  3\n\n \n".encode(), 0) == ["één", "zwei  3"]

    def test_however_they_are_cut_into_pieces(self) -> None:
        chance = random.Random(1)
        data = b"".join(bytes(chance.choices(b"ab\n", k=chance.choice((3, 900, 3000)))) for _ in range(20))
        whole = Lines(0).take(data + b"\n", 0)
        for _ in range(20):
            lines, rest, found = Lines(0), data, []
            while rest:
                size = chance.randint(1, 2000)
                found += lines.take(rest[:size], 0)
                rest = rest[size:]
            assert found + lines.end(0) == whole
            assert lines.dropped == 0 or len(whole) >= BURST

    def test_a_line_without_an_end(self) -> None:
        lines = Lines(0)
        assert lines.take(b"half", 0) == []
        assert lines.end(0) == ["half"]

    def test_long_lines_are_cut(self) -> None:
        lines = Lines(0)
        assert lines.take(b"x" * 10_000_000, 0) == ["x" * MAX_LINE + "..."]
        assert lines.take(b"and more", 0) == []
        assert lines.take(b"\nnext\n", 0) == ["next"]
        assert len(lines._begun) == 0

    @pytest.mark.parametrize("size", [MAX_LINE - 1, MAX_LINE, MAX_LINE + 1])
    def test_at_the_limit(self, size: int) -> None:
        snapshot = ["x" * MAX_LINE + "..."] if size > MAX_LINE else ["x" * size]
        assert Lines(0).take(b"x" * size + b"\ny\n", 0) == [*snapshot, "y"]

    def test_too_many_are_counted(self) -> None:
        lines = Lines(0)
        assert len(lines.take(b"a\n" * 1000, 0)) == BURST
        assert lines.dropped == 1000 - BURST
        assert lines.take(b"b\nrest", 0) == []
        assert lines.dropped == 1001 - BURST
        assert lines.take(b" of it\n", 10) == ["rest of it"], "there is room again, and the line is whole"

    @pytest.mark.parametrize(
        ("line", "shown"),
        [
            (b"\x1b[31mred\x07", r"\x1b[31mred\x07"),
            (b"a\rb\x00c", r"a\rb\x00c"),
            ("\x9b2J\u202eright to left\u2066".encode(), r"\x9b2J\u202eright to left\u2066"),
            (b"caf\xc3\xa9 \xff", r"café \xff"),
            ("\u2028 \ufeff".encode(), r"\u2028 \ufeff"),
        ],
    )
    def test_nothing_paints_a_terminal(self, line: bytes, shown: str) -> None:
        assert escaped(line) == shown


def test_lines_are_the_logs_own_and_say_whose_they_are(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        for server in node.servers():
            assert write_into(server, b"2026-01-01 [error ] forged\n\x1b[2Jhello\n")
        for text in ("forged", "hello"):
            until(lambda text=text: len(lines_with(node, text)) == 2, "both servers' lines")  # type: ignore[misc]
            for line in lines_with(node, text):
                assert "server prints" in line
                assert f"process={process['id'][:12]}" in line
                assert "job=" in line
        assert "\x1b" not in node.log.read_text()
        reported = [
            line["text"] for line in node.get(f"/v1/jobs/{process['job_id']}/logs") if line["source"] == "server"
        ]
        assert reported == ["printed: 2026-01-01 [error ] forged", r"printed: \x1b[2Jhello"] * 2, "the job's, too"


def test_a_server_has_no_way_to_the_log(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        node.wait_for_standby()
        for server in node.servers():
            assert not any(Path(f"/proc/{server}/fd/{fd}").resolve() == node.log.resolve() for fd in (0, 1, 2))


def test_a_flood_costs_the_others_nothing(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        server = node.wait_for_standby()["server_pid"]
        begun, took = time.monotonic(), []
        while time.monotonic() < begun + 3:
            write_into(server, b"flood\n" * 20_000)
            requested = time.monotonic()
            assert node.get("/v1/processes")
            took.append(time.monotonic() - requested)
        assert sorted(took)[len(took) * 9 // 10] < 0.5  # not each: a disk that takes a second for a write is no flood
        until(lambda: lines_with(node, "lines of the server dropped"), "the count is informed")
        prints, seconds = lines_with(node, "server prints"), time.monotonic() - begun
        assert BURST <= len(prints) <= BURST + RATE * seconds + 1
        assert max(map(len, prints)) < 400
        assert len(lines_with(node, "lines of the server dropped")) <= seconds + 1
        assert alive(server)
        os.kill(server, signal.SIGKILL)
        wait_for_recoveries(node, 1)


def test_the_last_words_have_no_end(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        stop(node.pid)
        write_into(process["server_pid"], b"terminate called after th")
        os.kill(process["server_pid"], signal.SIGKILL)
        os.kill(node.pid, signal.SIGCONT)
        wait_for_recoveries(node, 1)
        assert lines_with(node, "terminate called after th")


def test_a_full_pipe_keeps_no_server_waiting(node: Node) -> None:
    """The daemon stands still: who prints loses what does not fit."""
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        server = node.wait_for_standby()["server_pid"]
        stop(node.pid)
        assert write_into(server, b"x" * 10 * PIPE) <= PIPE
        flags = Path(f"/proc/{server}/fdinfo/1").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_NONBLOCK
        os.kill(node.pid, signal.SIGCONT)
        assert node.get("/v1/processes")
        os.kill(server, signal.SIGKILL)
        wait_for_recoveries(node, 1)


def test_the_next_daemon_hears_what_is_printed(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.open_devices()
        process = node.wait_for_standby()
        node.kill()
        fd = os.open(f"/proc/{process['server_pid']}/fd/1", os.O_WRONLY)
        with pytest.raises(BrokenPipeError):  # nobody reads it; the server ignores the signal
            os.write(fd, b"nobody hears this\n")
        os.close(fd)
        node.start()
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]

        def heard() -> bool:
            with contextlib.suppress(BrokenPipeError):  # it has not got it yet
                write_into(process["server_pid"], b"somebody hears this\n")
            return bool(lines_with(node, "somebody hears this"))

        until(heard, "the adopted server has a new pipe")
        assert not lines_with(node, "nobody hears this")
        poll = select.poll()
        fd = os.open(f"/proc/{process['server_pid']}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        poll.register(fd, select.POLLERR)
        assert not poll.poll(0), "its standard error, too"
        os.close(fd)
