"""Which jobs are given a unit of their own, and that one is none the worse without it. That they get it is seen in
tests/packages, on a machine with systemd."""

from __future__ import annotations

import pwd
import socket
import threading
from pathlib import Path

import pytest

from xmigd import log
from xmigd.cli import scope

NOBODY = pwd.getpwnam("nobody").pw_uid
SESSION = "/user.slice/user-1000.slice/session-3.scope"
DESKTOP = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-terminal-77.scope"
ELSEWHERE = [
    "", "/", "/system.slice/cron.service", "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0",
    "/system.slice/docker-0123.scope", "/machine.slice/libpod-0123.scope",
    "/user.slice/user-1000.slice/user@1000.service/app.slice/train.service",
]  # fmt: skip


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(scope, "LINGERING", tmp_path)
    return tmp_path


class TestWhere:
    @pytest.mark.parametrize("group", ELSEWHERE)
    def test_what_is_no_login_stays(self, lingering: Path, group: str) -> None:
        (lingering / "nobody").touch()
        for uid in (0, NOBODY):
            assert scope.bus_for(group, uid=uid, runtime_dir="/run/user/1") is None

    @pytest.mark.parametrize("group", [SESSION, DESKTOP])
    def test_root_has_the_system(self, group: str) -> None:
        assert scope.bus_for(group, uid=0, runtime_dir="/run/user/0") == "SYSTEM"

    def test_a_session_is_left_if_the_users_manager_stays(self, lingering: Path) -> None:
        assert scope.bus_for(SESSION, uid=NOBODY, runtime_dir="/run/user/1") is None
        (lingering / "nobody").touch()
        assert scope.bus_for(SESSION, uid=NOBODY, runtime_dir="/run/user/1") == "unix:path=/run/user/1/bus"
        assert scope.bus_for(SESSION, uid=NOBODY, runtime_dir=None) is None
        assert scope.bus_for(SESSION, uid=1 << 30, runtime_dir="/run/user/1") is None  # who has no name

    def test_a_desktops_job_is_the_users_manager_s(self, lingering: Path) -> None:
        assert scope.bus_for(DESKTOP, uid=NOBODY, runtime_dir="/run/user/1") == "unix:path=/run/user/1/bus"


class TestWithoutAnAnswer:
    """The program works all the same. `enter` returns, and the debug log has a line."""

    @pytest.fixture
    def bus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "bus"
        monkeypatch.setattr(scope, "bus_for", lambda *_, **__: f"unix:path={path}")
        return path

    @pytest.mark.parametrize(("level", "lines"), [("debug", 1), ("info", 0)])
    def test_nobody_is_there(self, bus: Path, capsys: pytest.CaptureFixture[str], level: str, lines: int) -> None:
        log.configure(level)
        scope.enter("xmig-job-0123.scope", "digits, under xMIG")
        assert capsys.readouterr().err.count("the job has no scope of its own") == lines

    def test_it_hangs_up(self, bus: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def hang_up() -> None:
            for _ in range(2):  # it is queried again once
                connection, _ = listener.accept()
                connection.close()

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(bus))
            listener.listen()
            other = threading.Thread(target=hang_up)
            other.start()
            log.configure("debug")
            scope.enter("xmig-job-0123.scope", "digits, under xMIG")
            other.join()
        assert capsys.readouterr().err.count("the job has no scope of its own") == 1
