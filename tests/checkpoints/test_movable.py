"""What stands in the way of a program, of small real ones. What CRIU does with them: tests/criu/test_movable.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.small import CASES, SEMAPHORE, running, things_outside
from tests.harness import needs_root, wait_until
from xmigd.checkpoints import proc, sockets
from xmigd.checkpoints.movable import Criu, Obstacle, obstacles, processes_of
from xmigd.errors import Forbidden, NotFound

NEW = Criu(version=(4, 2))  # of which the kernel's version makes no difference


def codes(found: list[Obstacle], stops: str) -> set[str]:
    return {each.code for each in found if each.stops == stops}


@needs_root
@pytest.mark.parametrize("name", CASES)
def test_what_stands_in_the_way(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "own").mkdir()
    with (
        things_outside(tmp_path / "outside") as outside,
        running(case.program, tmp_path / "own", own_session=case.own_session, outside=json.dumps(outside)) as pid,
    ):
        found = obstacles(pid, NEW)
        if case.here is not None:
            assert codes(found, "here") == case.here, found
        assert codes(found, "elsewhere") == case.elsewhere, found
        assert codes(found, "depends") - {"cpu", "files"} == case.depends, found
        assert {each.pid for each in found} <= set(processes_of(pid))
        assert all(each.what and each.why and each.hint for each in found)


class TestProcesses:
    def test_with_all_that_descend_from_it(self, tmp_path: Path) -> None:
        with running("child(lambda: child()); child()", tmp_path) as pid:
            found = processes_of(pid)
            parents = [proc.Stat(each).parent for each in found]
        assert (found[0], parents[0], len(found)) == (pid, os.getpid(), 4)
        assert sorted(parents[1:]) == sorted([pid, pid, next(each for each in parents[1:] if each != pid)])
        assert all(found.index(parent) < at for at, parent in enumerate(parents) if at)

    def test_one_that_has_ended(self) -> None:
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        for function in (processes_of, obstacles):
            with pytest.raises(NotFound):
                function(ended.pid)

    def test_one_that_has_ended_and_that_nobody_has_waited_for(self) -> None:
        with subprocess.Popen(["true"]) as ended:
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(NotFound, match="has ended"):
                obstacles(ended.pid)

    def test_a_child_that_ends_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running("child()", tmp_path) as pid:
            child = processes_of(pid)[1]
            read = proc.read

            def reads(each: int) -> proc.Process:
                if each == child:
                    raise ProcessLookupError(each)
                return read(each)

            monkeypatch.setattr(proc, "read", reads)
            assert codes(obstacles(pid, NEW), "here") == set()

    def test_a_child_that_ends_after_it_was_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running("child(lambda: os.open('/proc/self/stat', os.O_RDONLY))", tmp_path) as pid:
            child = processes_of(pid)[1]
            read = proc.read

            def reads(each: int) -> proc.Process:
                found = read(each)
                if each == child:
                    os.kill(child, 9)
                    wait_until(lambda: proc.Stat(child).state == "Z", "it has ended")
                return found

            monkeypatch.setattr(proc, "read", reads)
            assert codes(obstacles(pid, NEW), "here") == set()

    @needs_root
    def test_one_that_may_not_be_read(self) -> None:
        program = (
            "import os, sys; from xmigd.checkpoints.movable import obstacles; from xmigd.errors import Forbidden\n"
            "os.setgroups([]); os.setgid(60010); os.setuid(60010)\n"
            f"try: obstacles({os.getpid()})\n"
            "except Forbidden as error: print(error.code)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("process_not_readable\n", "")
        assert Forbidden.status == 403


class TestCriu:
    """What CRIU refuses depends on how it is started."""

    @needs_root
    @pytest.mark.parametrize(
        ("name", "criu", "stops"),
        [
            ("TCP connection", Criu(version=(4, 2), options=frozenset({"tcp-established"})), "elsewhere"),
            ("Unix connection", Criu(version=(4, 2), options=frozenset({"ext-unix-sk"})), "elsewhere"),
            ("terminal", Criu(version=(4, 2), options=frozenset({"shell-job"})), "elsewhere"),
            ("semaphore", Criu(version=(4, 2), options=frozenset({"link-remap"})), "elsewhere"),
            ("session", Criu(version=(4, 2), options=frozenset({"shell-job"})), "depends"),
            ("flock", Criu(version=(4, 2), options=frozenset({"file-locks"})), "depends"),
        ],
    )
    def test_options(self, name: str, criu: Criu, stops: str, tmp_path: Path) -> None:
        case = CASES[name]
        (tmp_path / "own").mkdir()
        with (
            things_outside(tmp_path / "outside") as outside,
            running(case.program, tmp_path / "own", own_session=case.own_session, outside=json.dumps(outside)) as pid,
        ):
            found = obstacles(pid, criu)
        assert case.here is not None
        assert codes(found, "here") == set()
        assert codes(found, stops) >= case.here

    @needs_root
    def test_limit_of_deleted_files(self, tmp_path: Path) -> None:
        with running(CASES["large deleted file"].program, tmp_path) as pid:
            assert codes(obstacles(pid, Criu(version=(4, 2), ghost_limit=1 << 30)), "here") == set()

    @needs_root
    def test_guard_pages(self, tmp_path: Path) -> None:
        with running(CASES["guard pages"].program, tmp_path) as pid:
            assert proc.has_guard_pages(pid) == ("guard_pages" in codes(obstacles(pid, Criu(version=(4, 1))), "here"))
            assert "guard_pages" not in codes(obstacles(pid, NEW), "here")

    @needs_root
    @pytest.mark.parametrize("readable", [True, False])
    def test_options_of_sockets(self, readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sockets, "kernel_has_credentials_of_inet", lambda: readable)
        with running(CASES["UDP"].program, tmp_path) as pid:
            assert codes(obstacles(pid, Criu(version=(4, 1))), "here") == (set() if readable else {"socket"})


class TestWords:
    @needs_root
    def test_what_is_in_the_way_is_named(self, tmp_path: Path) -> None:
        program = f"{SEMAPHORE}; f = open('/dev/tty0', 'rb', opener=lambda p, _: os.open(p, os.O_NOCTTY))"
        with running(program, tmp_path) as pid:
            found = {each.code: each for each in obstacles(pid, NEW)}
        assert (found["device"].what, found["device"].pid) == ("descriptor 3: /dev/tty0", pid)
        assert "/dev/shm/sem." in found["semaphore"].what

    def test_files_are_one_row(self, tmp_path: Path) -> None:
        with running("f = [open(str(n), 'w') for n in range(40)]", tmp_path) as pid:
            (files,) = (each for each in obstacles(pid, NEW) if each.code == "files")
        assert files.stops == "depends"
        assert int(files.what.split()[0]) > 40

    def test_that_which_stops_most_comes_first(self, tmp_path: Path) -> None:
        program = "f = open('f', 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n" + CASES["shared memory"].program
        with running(program, tmp_path) as pid:
            found = [each.stops for each in obstacles(pid, NEW)]
        assert found == sorted(found, key=["here", "elsewhere", "depends"].index)
        assert {"here", "elsewhere", "depends"} == set(found)

    def test_names_of_files_may_have_any_bytes(self, tmp_path: Path) -> None:
        with running(
            "C.prctl(15, b'\\xfe'); f = open(b'\\xff\\x1b[31m', 'w'); fcntl.flock(f, fcntl.LOCK_EX)", tmp_path
        ) as pid:
            (lock,) = (each for each in obstacles(pid, NEW) if each.code == "lock")
        assert lock.what.isprintable()
        assert lock.what.encode()


def test_namespaces_of_one_that_ends() -> None:
    """Its end gives them back one after the other: either all are seen, or that it ends."""
    for _ in range(50):
        with subprocess.Popen(["/bin/true"]) as child:
            while True:
                try:
                    assert proc.namespaces(child.pid).keys() == proc.namespaces("self").keys()
                except FileNotFoundError:
                    break
