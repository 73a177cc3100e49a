"""Starting and stopping: every reason not to start is one clear line, and no start or stop touches a program."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.harness import stop
from xmigd.settings import Settings

from .conftest import MakeNode
from .disks import fill, small_disk
from .node import Node, Program, alive, until
from .test_supervision import wait_for_recoveries
from .test_upgrade import older


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each daemon here starts as a service manager starts it."""
    monkeypatch.setattr(Node, "executed", True)


def start_in_vain(node: Node) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "xmigd.main"], env=node.environment, cwd=node.folder, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("xmigd: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_second_daemon_is_refused(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        line = start_in_vain(node)
        assert f"another xmigd (pid {node.pid}) runs in {node.runtime_dir}" in line
        assert node.get("/healthz")["status"] == "ok"
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]


def test_stale_sockets_do_not_matter(node: Node) -> None:
    node.kill()
    assert (node.runtime_dir / "api.sock").exists()
    node.start()
    assert node.kill(signal.SIGTERM) == 0
    # Programs go on, and those that they start find the driver's names in `lib`.
    assert sorted(p.name for p in node.runtime_dir.iterdir()) == ["lib", "xmigd.lock"]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("XMIG_RUNTIME_DIR", "/proc/nothing", "the runtime directory /proc/nothing cannot be used"),
        ("XMIG_RUNTIME_DIR", "/tmp/" + "x" * 120, "too long"),
        ("XMIG_DATABASE", "/proc/nothing/x.db", "the database /proc/nothing/x.db cannot be written"),
        ("XMIG_DATABASE", "/dev/full", "/dev/full"),
        ("XMIG_NATIVE_DIR", "/nothing", "xmig-server is not in /nothing"),
        ("XMIG_DEVICES", "gpu", "XMIG_DEVICES"),
        ("XMIG_DEVICES", "cpu:0,cpu:0", "named twice"),
        ("XMIG_JOURNAL_MIB", "1", "XMIG_JOURNAL_MIB"),
        ("XMIG_HOST", "203.0.113.1", "would listen at 203.0.113.1 without TLS"),
    ],
)
def test_reasons_not_to_start(make_node: MakeNode, setting: str, value: str, expected: str) -> None:
    node = make_node(**{setting: value})
    line = start_in_vain(node)
    assert expected in line
    if value.startswith("/tmp/xxx"):
        shutil.rmtree(value)


def test_an_address_that_is_not_this_machines(make_node: MakeNode) -> None:
    node = make_node(XMIG_HOST="203.0.113.1", XMIG_PLAIN_TCP="true")
    assert "cannot listen at 203.0.113.1" in start_in_vain(node)


def test_a_full_disk_at_start(make_node: MakeNode) -> None:
    node = make_node()
    with small_disk(node.folder / "small", "64k") as folder:
        node.environment["XMIG_DATABASE"] = str(folder / "xmig.db")
        assert "cannot be written" in start_in_vain(node)


def test_a_full_disk_while_running(make_node: MakeNode) -> None:
    """Recoveries go on; what could not be recorded is recorded when there is room again."""
    node = make_node()
    with small_disk(node.folder / "small", "24m") as folder:
        node.environment["XMIG_DATABASE"] = str(folder / "xmig.db")
        node.start()
        with Program(node) as program:
            assert program.welcome()[0] == 0
            process = node.wait_for_standby()
            filler = folder / "filler"
            fill(filler)
            with node.http() as http:

                def refused() -> httpx.Response | None:
                    answer = http.post("/v1/jobs", json={"name": "x" * 200})
                    return answer if answer.status_code == 503 else None

                refusal = until(refused, "writes fail").json()
                assert refusal["code"] == "disk_full"
                assert "make room" in refusal["hint"]
                jobs = http.get("/v1/jobs", params={"limit": 1000}).json()
                assert len(jobs) >= 1
                assert http.get("/readyz").status_code == 503
                for _ in range(2):
                    os.kill(process["server_pid"], signal.SIGKILL)
                    process = node.wait_for_standby(after=process["server_pid"])
                filler.unlink()
                wait_for_recoveries(node, 2)
                assert [r["outcome"] for r in http.get("/v1/recoveries").json()] == ["resumed"] * 2
                # By itself: nobody asks for anything to be written.
                until(lambda: http.get("/readyz").status_code == 200, "it takes writes again")
                assert http.post("/v1/jobs", json={"name": "again"}).status_code == 201
                assert len(http.get("/v1/jobs", params={"limit": 1000}).json()) == len(jobs) + 1
        node.kill(signal.SIGTERM)


def readiness(node: Node) -> httpx.Response | None:
    """Its answer, while it need not have begun to work."""
    assert node.daemon is not None
    assert node.daemon.poll() is None, node.log.read_text()[-3000:]
    with contextlib.suppress(httpx.TransportError), node.http() as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        return http.get("/readyz")
    return None


def waits_for(node: Node, what: str) -> bool:
    answer = readiness(node)
    if answer is None or answer.status_code != 503:
        return False
    problem = answer.json()
    assert (answer.headers["content-type"], problem["code"]) == ("application/problem+json", "not_ready")
    assert int(answer.headers["retry-after"]) >= 1
    return what in problem["detail"]


def is_ready(node: Node) -> bool:
    answer = readiness(node)
    return answer is not None and answer.status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpx, which cannot connect yet
def test_it_is_healthy_and_not_ready_while_it_upgrades_its_database(make_node: MakeNode) -> None:
    node = make_node()
    older(node.database, "0003")
    with contextlib.closing(sqlite3.connect(node.database, isolation_level=None)) as somebody:
        somebody.execute("begin immediate")
        node.launch()
        until(lambda: waits_for(node, "upgraded"), "it upgrades")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(node.get, "/v1/node")  # whoever asks for something else waits
            somebody.execute("rollback")
            assert waiting.result(60)["processes"] == 0
    until(lambda: is_ready(node), "it is ready")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_not_ready_before_every_server_is_found(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        node.kill()
        stop(process["server_pid"])
        try:
            node.launch()
            until(lambda: waits_for(node, process["id"][:12]), "it waits for the server")
        finally:
            os.kill(process["server_pid"], signal.SIGCONT)
        until(lambda: is_ready(node), "it is ready")
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]


def test_sigterm_lets_a_starting_program_know(node: Node) -> None:
    node.behave(hello="hang")
    with Program(node) as program:
        until(lambda: node.servers(), "a server is starting")
        assert node.kill(signal.SIGTERM) == 0
        status, _, _, message = program.welcome()
        assert status == 802
        assert "stopping" in message
        assert alive(program.pid)
    until(lambda: not node.servers(), "its server is gone")


def test_settings_come_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "xmigd.toml"
    file.write_text('devices = "cpu:0"\njournal_mib = 16\n')
    monkeypatch.setenv("XMIG_CONFIG", str(file))
    monkeypatch.setenv("XMIG_JOURNAL_MIB", "32")
    settings = Settings()
    assert (settings.devices, settings.journal_mib) == ("cpu:0", 32)
    assert settings.api_socket == settings.runtime_dir / "api.sock"


def test_a_full_run_at_start(make_node: MakeNode) -> None:
    """The daemon refuses to start and says why; programs and servers go on, and the next one has them all."""
    node = make_node()
    with small_disk(node.folder / "run", "256k,nr_inodes=64") as folder:
        node.start()
        with Program(node) as program:
            assert program.welcome()[0] == 0
            process = node.wait_for_standby()
            node.kill()
            shutil.rmtree(folder / "lib")  # what makes room when it is replaced
            for path in folder.iterdir():
                path.unlink()
            fill(folder / "filler")
            fillers = [folder / "filler"]
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(folder / f"inode {len(fillers)}")
                    fillers[-1].touch()
            for _ in range(2):
                assert "No space left on device" in start_in_vain(node)
                assert alive(program.pid)
                assert alive(process["server_pid"])
            for path in fillers:
                path.unlink(missing_ok=True)
            node.start()
            assert node.wait_for_standby()["server_pid"] == process["server_pid"]
        node.kill(signal.SIGTERM)
