"""The client: what it sends, and what it makes of answers."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.callers import become
from xmigd.cli.exits import MEANINGS, Exit, exit_code_of
from xmigd.client import Client, NoDaemon, Refused
from xmigd.errors import XmigError
from xmigd.settings import Settings

from .conftest import Scripted, ctl, ctl_process


def test_a_problem_is_kept_whole(scripted: Scripted) -> None:
    problem = {"status": 409, "code": "no_room", "detail": "cpu:1 has no room", "hint": "free some", "phase": "prepare",
               "process_location": "source", "operation": "abc"}  # fmt: skip
    scripted.answer = lambda *_: (409, problem)
    client = Client(Settings(runtime_dir=scripted.folder))
    with pytest.raises(Refused) as caught:
        client.get("/v1/jobs")
    assert caught.value.problem == problem
    assert (caught.value.code, caught.value.message, caught.value.hint) == ("no_room", "cpu:1 has no room", "free some")
    client.close()
    done = ctl(scripted, "ps")
    assert done.returncode == Exit.REFUSED
    assert done.stderr.splitlines() == [
        "xmigctl: cpu:1 has no room", "  in phase prepare", "  the process is where it was",
        "  operation abc: xmigctl op show abc", "  free some",
    ]  # fmt: skip
    done = ctl(scripted, "ps", "-o", "json")
    assert '"no_room"' in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 5), (401, 9), (403, 9), (404, 4), (409, 5), (412, 5), (422, 2), (428, 5), (429, 5), (503, 5), (500, 1)],
)
def test_each_refusal_has_its_exit_code(status: int, code: int) -> None:
    assert exit_code_of(Refused(status, {"detail": "no"})) == code


def test_exit_codes_have_meanings() -> None:
    assert set(MEANINGS) == set(Exit)


def test_an_answer_that_is_no_json(scripted: Scripted) -> None:
    scripted.answer = lambda *_: (500, "<html>")
    done = ctl(scripted, "ps")
    assert (done.returncode, done.stderr) == (1, "xmigctl: xmigd answered 500: <html>\n")


def test_a_start_whose_answer_is_lost_is_sent_again_with_its_key(scripted: Scripted) -> None:
    answers = iter([(0, None), (0, None), (202, {"id": "1", "kind": "drain", "state": "pending"})])
    scripted.answer = lambda *_: next(answers)
    client = Client(Settings(runtime_dir=scripted.folder))
    assert client.start("/v1/devices/cpu:0:drain")["id"] == "1"
    client.close()
    keys = {headers["Idempotency-Key"] for _, _, _, headers in scripted.requests}
    assert (len(scripted.requests), len(keys)) == (3, 1)


def test_a_daemon_that_is_not_there(scripted: Scripted) -> None:
    done = ctl_process(scripted, "ps", XMIG_RUNTIME_DIR="/nowhere")
    assert (done.returncode, done.stderr.count("start it with")) == (Exit.NO_DAEMON, 1)
    done = ctl_process(scripted, "--url", "http://127.0.0.1:1", "ps")
    assert done.returncode == Exit.NO_DAEMON
    assert done.stderr.startswith("xmigctl: no xmigd answers at http://127.0.0.1:1: ")


def test_a_daemon_at_whose_door_many_wait() -> None:
    """More than the kernel keeps: the client waits, too, and does not say that nobody is there."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]"
    with tempfile.TemporaryDirectory(prefix="xmig-") as name, contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(f"{name}/api.sock")
        door.listen(1)
        many = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(f"{name}/api.sock")
                many += 1

        def open_it() -> None:
            for _ in range(many):
                door.accept()[0].close()
            with door.accept()[0] as served:
                served.recv(1 << 16)
                served.sendall(answer)

        later = threading.Timer(0.5, open_it)
        later.start()
        client = Client(Settings(runtime_dir=Path(name)))
        assert client.get("/v1/jobs") == []
        client.close()
        later.join()


@contextlib.contextmanager
def answering(folder: Path, answers: int = 1000) -> Iterator[list[socket.socket]]:
    """A daemon that leaves connections open, and those that it has taken. `answers`: for each of them at most."""
    taken: list[socket.socket] = []

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(answers):
                if not sock.recv(1 << 16):
                    return
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                taken.append(sock)
                threads.append(threading.Thread(target=serve, args=(sock,)))
                threads[-1].start()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "api.sock"))
        os.chmod(folder / "api.sock", 0o777)
        listening.listen()
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield taken
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for sock in taken:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for sock in taken:
                sock.close()


def test_who_asks_all_the_time_keeps_a_connection() -> None:
    """As long as it is open and not too old, for one user; also for what is not sent again."""
    with tempfile.TemporaryDirectory() as folder, answering(Path(folder)) as taken:
        os.chmod(folder, 0o755)
        client = Client(Settings(runtime_dir=Path(folder)), keep=True)
        for _ in range(3):
            assert client.get("/v1/jobs") == client.post("/v1/jobs") == {}
        assert len(taken) == 1
        taken[0].shutdown(socket.SHUT_RDWR)
        assert client.post("/v1/jobs") == {}
        assert len(taken) == 2
        client.close()
        assert client.get("/v1/jobs") == {}
        assert len(taken) == 3
        if os.geteuid() == 0:
            with become(60_010):
                assert client.get("/v1/jobs") == {}
            assert len(taken) == 4
        client.close()


def test_what_was_not_answered_in_time_is_not_sent_again() -> None:
    with tempfile.TemporaryDirectory() as folder, answering(Path(folder), 1) as taken:
        client = Client(Settings(runtime_dir=Path(folder)), keep=True, timeout=1.0)
        assert client.get("/v1/jobs") == {}
        with pytest.raises(NoDaemon, match="timed out"):
            client.get("/v1/jobs")
        assert len(taken) == 1


def test_others_keep_none() -> None:
    with tempfile.TemporaryDirectory() as folder, answering(Path(folder)) as taken:
        client = Client(Settings(runtime_dir=Path(folder)))
        assert [client.get("/v1/jobs") for _ in range(3)] == [{}] * 3
        assert len(taken) == 3


def test_events_are_parsed(scripted: Scripted) -> None:
    text = (
        ': hello\n\nid: 7\nevent: fault\ndata: {"a":\ndata: 1}\n\nretry: 5\n\nid: 8\nevent: x\ndata: words\n\nid: 9\n'
    )
    scripted.answer = lambda *_: (200, text)
    client = Client(Settings(runtime_dir=scripted.folder))
    assert list(client.events(after=6)) == [
        {"id": "7", "event": "fault", "data": {"a": 1}}, {"id": "8", "event": "x", "data": "words"},
    ]  # fmt: skip
    client.close()
    assert scripted.requests[0][3]["Last-Event-ID"] == "6"


@pytest.mark.parametrize(
    ("url", "token", "code"),
    [
        ("ftp://a", None, "bad_url"), ("host:7450", None, "bad_url"), ("https://", None, "bad_url"),
        ("https://a/v1", None, "bad_url"), ("http://node7:7450", "t", "insecure"), ("http://10.0.0.1", "t", "insecure"),
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_used(url: str, token: str | None, code: str) -> None:
    with pytest.raises(XmigError) as caught:
        Client(Settings(), url=url, token=token)
    assert caught.value.code == code


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "https://node7"])
def test_addresses_that_a_token_may_go_to(url: str) -> None:
    Client(Settings(), url=url, token="t").close()


def test_a_certificate_file_that_is_missing() -> None:
    with pytest.raises(XmigError, match="/nowhere"):
        Client(Settings(), url="https://a", ca_file="/nowhere")


def test_the_token_comes_from_a_file(scripted: Scripted, tmp_path: Any) -> None:
    scripted.answer = lambda *_: (200, [])
    (tmp_path / "token").write_text("secret\n")
    assert ctl(scripted, "--token", f"@{tmp_path}/token", "ps").returncode == 0
    assert ctl(scripted, "ps", XMIG_TOKEN="other").returncode == 0
    assert [headers["Authorization"] for *_, headers in scripted.requests] == ["Bearer secret", "Bearer other"]
    assert ctl(scripted, "--token", "@/nowhere", "ps").returncode == Exit.USAGE


def test_a_wrong_setting_is_wrong_usage(scripted: Scripted) -> None:
    done = ctl(scripted, "ps", XMIG_PORT="many")
    assert done.returncode == Exit.USAGE
    assert "XMIG_PORT" in done.stderr
    assert "Traceback" not in done.stderr
