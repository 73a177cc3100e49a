"""Starting and stopping: every reason not to start is one clear line, and no start or stop touches a program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xmigd.settings import Settings

from .conftest import MakeNode
from .node import Node, Program, alive, until


def start_in_vain(node: Node) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "xmigd.main"], env=node.environment, cwd=node.folder, capture_output=True, text=True,
        timeout=60, check=False,
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
    assert sorted(p.name for p in node.runtime_dir.iterdir()) == ["xmigd.lock"]


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
        ("XMIG_HOST", "203.0.113.1", "cannot listen at 203.0.113.1"),
    ],
)
def test_reasons_not_to_start(make_node: MakeNode, setting: str, value: str, expected: str) -> None:
    node = make_node(**{setting: value})
    line = start_in_vain(node)
    assert expected in line
    if value.startswith("/tmp/xxx"):
        os.unlink(f"{value}/xmigd.lock")
        os.rmdir(value)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_at_start(make_node: MakeNode) -> None:
    node = make_node()
    with small_disk(node.folder / "small", "64k") as folder:
        node.environment["XMIG_DATABASE"] = str(folder / "xmig.db")
        assert "cannot be written" in start_in_vain(node)


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_while_running(make_node: MakeNode) -> None:
    """Recoveries go on; what could not be recorded is recorded when there is room again."""
    node = make_node()
    with small_disk(node.folder / "small", "1m") as folder:
        node.environment["XMIG_DATABASE"] = str(folder / "xmig.db")
        node.start()
        with Program(node) as program:
            assert program.welcome()[0] == 0
            process = node.wait_for_standby()
            filler = folder / "filler"
            fill(filler)
            with node.http() as http:
                until(lambda: http.post("/v1/jobs", json={"name": "x" * 200}).status_code == 503, "writes fail")
                assert http.get("/readyz").status_code == 503
                for _ in range(2):
                    os.kill(process["server_pid"], signal.SIGKILL)
                    process = node.wait_for_standby(after=process["server_pid"])
                filler.unlink()
                until(lambda: len(http.get("/v1/recoveries").json()) == 2, "the records are written")
                assert {r["outcome"] for r in http.get("/v1/recoveries").json()} == {"resumed"}
                assert http.get("/readyz").status_code == 200
        node.kill(signal.SIGTERM)


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


def test_every_setting_is_described() -> None:
    undescribed = [name for name, field in Settings.model_fields.items() if not field.description]
    assert undescribed == ["log_level", "log_json"]
