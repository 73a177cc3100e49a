"""Who has the genuine driver in a job is found, shown, and in a strict job ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMPILER, own_node, stop, wait_until
from xmigd.cli import landlock
from xmigd.cli.exits import Exit
from xmigd.demo.node import Node
from xmigd.ipc.pidfd import start_time
from xmigd.supervisor import unprotected
from xmigd.supervisor.unprotected import READ_ALL, Found, Root, Watch

HOLD = "import ctypes, os, sys, time; ctypes.CDLL(sys.argv[1]); print(os.getpid(), flush=True); time.sleep(600)"
JOB = uuid.uuid4().hex  # nobody else's, of those who run this test on this machine


NUMBERS = itertools.count()


class Running:
    """`xmigctl run`, and what it has started."""

    def __init__(self, node: Node, *words: str | Path, options: tuple[str, ...] = ()) -> None:
        self.name = f"watched {next(NUMBERS)}"
        command = [sys.executable, "-m", "xmigd.cli", "run", "--name", self.name, *options, "--", *map(str, words)]
        pipe = subprocess.PIPE
        self.node = node
        self.process = subprocess.Popen(
            command, env=node.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def job(self) -> dict[str, Any]:
        (job,) = [job for job in self.node.client.get("/v1/jobs", limit=1000) if job["name"] == self.name]
        return dict(job)

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.node.client.get("/v1/processes", job=self.job()["id"]) if row["unprotected"]]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:
            self.process.kill()


@pytest.fixture
def run(node: Node) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(*words: str | Path, options: tuple[str, ...] = ()) -> Running:
        running.append(Running(node, *words, options=options))
        return running[-1]

    yield start
    for each in running:
        each.end()


def test_a_child_with_an_environment_of_its_own(run: Callable[..., Running], node: Node, genuine: Path) -> None:
    driver = genuine / "libcuda.so.1"
    running = run("sh", "-c", 'env -i "$@" & wait', "sh", sys.executable, "-c", HOLD, driver)
    pid = int(running.line())
    wait_until(lambda: bool(running.rows()), "it is seen")
    (row,) = running.rows()
    assert (row["pid"], row["state"], row["protected"], row["uid"]) == (pid, "unprotected", False, os.getuid())
    assert str(genuine / "libcuda.so.550.54.15") in row["unprotected"]
    job = running.job()
    assert (job["unprotected"], job["state"], job["processes"]) == (1, "running", 1)
    events: list[dict[str, Any]] = []

    def reported() -> bool:
        found = node.client.get("/v1/events", limit=1000)
        events[:] = [e for e in found if e["type"] == "process.unprotected" and e["job_id"] == job["id"]]
        return bool(events)

    wait_until(reported, "the event")
    (event,) = events
    assert (event["data"]["pid"], event["data"]["why"]) == (pid, row["unprotected"])
    (line,) = node.client.get(f"/v1/jobs/{job['id']}/logs")
    assert (line["source"], line["level"]) == ("xmigd", "warning")
    assert f"process {pid} " in line["text"]
    assert row["unprotected"] in line["text"]
    shown = subprocess.run(
        [sys.executable, "-m", "xmigd.cli", "ps"], env=node.environment | {"COLUMNS": "240"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "not protected" in shown.stdout
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running.job()["state"] == "ended", "its end is seen")
    assert [(row["state"], row["protected"]) for row in running.rows()] == [("ended", False)]


BESIDE = """
import ctypes, os, sys, time
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0
opener = ctypes.CDLL(sys.argv[1], mode=os.RTLD_DEEPBIND | os.RTLD_NOW)
opener.open_it.restype = ctypes.c_void_p
assert opener.open_it(sys.argv[2].encode())
print("ready", flush=True)
time.sleep(600)
"""


def test_beside_the_shim(run: Callable[..., Running], genuine: Path, tmp_path: Path) -> None:
    """A program under xMIG that has found a way: it is one row, and says so."""
    source, opener = tmp_path / "opener.c", tmp_path / "opener.so"
    source.write_text("#include <dlfcn.h>\nvoid* open_it(const char* name) { return dlopen(name, RTLD_NOW); }")
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", opener], check=True)
    running = run(sys.executable, "-c", BESIDE, opener, genuine / "libcuda.so.1")
    assert running.line() == "ready"
    wait_until(lambda: bool(running.rows()), "it is seen")
    (row,) = running.rows()
    assert (row["pid"], row["state"], row["protected"]) == (running.process.pid, "running", False)
    assert len(running.node.client.get("/v1/processes", job=running.job()["id"])) == 1


def two_looks(run: Callable[..., Running], genuine: Path) -> None:
    """The daemon has looked at everybody twice: first it has seen somebody else, and then that one's end."""
    other = run("sh", "-c", 'env -i "$@" & wait', "sh", sys.executable, "-c", HOLD, genuine / "libcuda.so.1")
    pid = int(other.line())
    wait_until(lambda: bool(other.rows()), "it is seen")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: other.rows()[0]["state"] == "ended", "its end is seen")


def test_protected_programs_are(run: Callable[..., Running], genuine: Path) -> None:
    code = "import ctypes; print(ctypes.CDLL('libcuda.so').cuInit(0), flush=True); import time; time.sleep(600)"
    running = run(sys.executable, "-c", code)
    assert running.line() == "0"
    two_looks(run, genuine)
    (row,) = running.node.client.get("/v1/processes", job=running.job()["id"])
    assert (row["protected"], row["unprotected"], running.job()["unprotected"]) == (True, "", 0)


def test_across_a_restart_of_the_daemon(native_dir: Path, genuine: Path) -> None:
    with own_node(native_dir, devices="cpu:0", port=-1) as node, contextlib.ExitStack() as stack:

        def run(*words: str | Path) -> Running:
            running = Running(node, *words)
            stack.callback(running.end)
            return running

        running = run("sh", "-c", 'env -i "$@" & wait', "sh", sys.executable, "-c", HOLD, genuine / "libcuda.so.1")
        pid = int(running.line())
        wait_until(lambda: bool(running.rows()), "it is seen")
        node.kill()
        node.start()
        two_looks(run, genuine)
        assert [(row["pid"], row["state"]) for row in running.rows()] == [(pid, "unprotected")]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: running.rows()[0]["state"] == "ended", "its end is seen")


# --- strict jobs -----------------------------------------------------------------------------------------------------


def test_a_strict_job_ends(run: Callable[..., Running], genuine: Path) -> None:
    """All of it, with an exit code and a sentence."""
    script = 'sleep 1000 & echo $!; env -i "$@" & wait'
    driver = genuine / "libcuda.so.1"
    running = run("sh", "-c", script, "sh", sys.executable, "-c", HOLD, driver, options=("--strict",))
    sibling = int(running.line())
    _, err = running.process.communicate(timeout=60)
    assert running.process.returncode == Exit.NOT_PROTECTED, err
    assert "was not protected: it has loaded the driver itself" in err
    assert "the job is strict and was ended" in err
    wait_until(lambda: start_time(sibling) == 0, "its other processes are ended, too")
    wait_until(lambda: running.job()["state"] == "stopped", "the end of all is seen")
    job = running.job()
    assert (job["strict"], job["unprotected"]) == (True, 1)
    lines = [line["text"] for line in running.node.client.get(f"/v1/jobs/{job['id']}/logs")]
    assert any(line.startswith("the job is ended: the job is strict, and process") for line in lines), lines


@pytest.mark.parametrize(("code", "expected"), [("exit 7", 7), ("kill -TERM $$", 128 + 15)])
def test_a_strict_job_that_is_protected(run: Callable[..., Running], code: str, expected: int) -> None:
    running = run("sh", "-c", code, options=("--strict",))
    out, err = running.process.communicate(timeout=60)
    assert (running.process.returncode, out, err) == (expected, "", "")


def test_signals_reach_a_strict_job(run: Callable[..., Running]) -> None:
    code = "trap 'echo reported; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("sh", "-c", code, options=("--strict",))
    assert running.line() == "ready"
    running.process.send_signal(signal.SIGTERM)
    assert running.process.communicate(timeout=60)[0] == "reported\n"
    assert running.process.returncode == 3


def test_no_such_program(run: Callable[..., Running]) -> None:
    running = run("/nothing/here", options=("--strict",))
    _, err = running.process.communicate(timeout=60)
    assert (running.process.returncode, err) == (127, "xmigctl: there is no program '/nothing/here'\n")


TRY = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from xmigd.cli import landlock
dev = Path(sys.argv[1])
landlock.close_devices(dev)
def can(path, flags):
    try:
        os.close(os.open(path, flags)); return "yes"
    except OSError as error:
        return error.strerror
print([can(dev / name, os.O_RDWR) for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "null0")])
others = (dev.parent / "beside", "/dev/null", "/dev/ptmx")
print([can(path, os.O_RDWR) for path in others], can("/etc/passwd", os.O_RDONLY))
print(can(dev.parent / "made", os.O_CREAT | os.O_RDWR), os.system("test -c /dev/null"))
try:
    os.mknod(dev.parent / "node", 0o20600, os.makedev(195, 0)); print("made")
except OSError as error:
    print(error.strerror)
"""


def test_devices_files_are_closed(tmp_path: Path) -> None:
    if not landlock.available():
        pytest.skip("this kernel has no Landlock")
    dev = tmp_path / "dev"
    dev.mkdir()
    for path in (*(dev / name for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "null0")), tmp_path / "beside"):
        path.touch()
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", TRY, dev, root], capture_output=True, text=True, check=False)
    no = "Permission denied"
    assert done.stdout.splitlines() == [
        f"['{no}', '{no}', '{no}', 'yes']", "['yes', 'yes', 'yes'] yes", f"{no} 0", no,
    ], done.stderr  # fmt: skip


# --- who belongs to a job, and what they hold ------------------------------------------------------------------------


@pytest.fixture
def spawn() -> Iterator[Callable[..., int]]:
    """A process that has reported that it is there; its pid is what it says."""
    started: list[subprocess.Popen[str]] = []
    others: list[int] = []

    def start(code: str, *arguments: object, **options: Any) -> int:
        program = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options
        )
        started.append(program)
        assert program.stdout is not None
        others.append(int(program.stdout.readline()))
        return others[-1]

    yield start
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for program in started:
        with program:
            program.kill()


SAY = """
import ctypes, os, sys, time
[ctypes.CDLL(each) for each in sys.argv[1:]]
print(os.getpid(), flush=True)
time.sleep(600)
"""
ORPHAN = """
import ctypes, os, sys, time
if os.fork():
    os._exit(0)
time.sleep(0.2)
ctypes.CDLL(sys.argv[1])
print(os.getpid(), flush=True)
time.sleep(600)
"""


def found(watch: Watch, *known: int, uid: int | None = None) -> list[Found]:
    identities = frozenset((pid, start_time(pid)) for pid in known)
    return watch.look([Root(JOB, os.getuid() if uid is None else uid, identities)])


def test_by_descent_only(spawn: Callable[..., int], genuine: Path) -> None:
    """A stranger's process with the driver is nobody's concern."""
    pid = spawn(SAY, genuine / "libcuda.so.1")
    watch = Watch(frozenset())
    assert found(watch) == []
    assert [each.pid for each in found(watch, pid)] == [pid]
    assert found(Watch(frozenset({str(genuine)})), pid) == []  # the shim's own folder


@pytest.mark.parametrize("how", ["environment", "another job", "another user"])
def test_by_the_environment(spawn: Callable[..., int], genuine: Path, how: str) -> None:
    job = JOB[::-1] if how == "another job" else JOB
    pid = spawn(SAY, genuine / "libcuda.so.1", env=os.environ | {"XMIG_JOB": f"{job}:secret"})
    uid = os.getuid() + 1 if how == "another user" else os.getuid()
    assert [each.pid for each in found(Watch(frozenset()), uid=uid)] == ([pid] if how == "environment" else [])


def test_an_orphan_by_its_group(spawn: Callable[..., int], genuine: Path) -> None:
    pid = spawn(ORPHAN, genuine / "libcuda.so.1", start_new_session=True)
    group = os.getpgid(pid)
    assert group != pid
    os.waitpid(group, 0)  # its parent, the first of the group, is gone
    watch = Watch(frozenset())
    assert [each.pid for each in watch.look([Root(JOB, os.getuid(), frozenset({(group, 1)}))])] == [pid]


def test_the_rest_of_a_pipeline_is_not_of_the_job(spawn: Callable[..., int], genuine: Path) -> None:
    first = spawn(SAY, process_group=0)
    second = spawn(SAY, genuine / "libcuda.so.1", process_group=first)
    assert os.getpgid(second) == first
    assert found(Watch(frozenset()), first) == []


def test_nvml_alone_is_not_the_driver(spawn: Callable[..., int], genuine: Path) -> None:
    pid = spawn(SAY, genuine / "libnvidia-ml.so.1")
    assert found(Watch(frozenset()), pid) == []
    pid = spawn(SAY, genuine / "libnvidia-ml.so.1", genuine / "libcuda.so.1")
    assert [each.what for each in found(Watch(frozenset()), pid)] == ["driver"]


def test_a_device_that_is_open(spawn: Callable[..., int], tmp_path: Path) -> None:
    """Whatever the library is called that opened it."""
    opens = "import os, sys, time; os.open(sys.argv[1], os.O_RDWR); print(os.getpid(), flush=True); time.sleep(600)"
    for name, expected in (("nvidia0", ["device"]), ("nvidia-uvm", ["device"]), ("nvidia-caps", []), ("zero", [])):
        (tmp_path / name).touch()
        watch = Watch(frozenset(), dev=str(tmp_path))
        assert [each.what for each in found(watch, spawn(opens, tmp_path / name))] == expected, name


def test_a_file_that_is_only_read(spawn: Callable[..., int], genuine: Path) -> None:
    """As linkers and debuggers do."""
    code = """
import mmap, os, sys, time
file = open(sys.argv[1], "rb")
view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(os.getpid(), flush=True)
time.sleep(600)
"""
    assert found(Watch(frozenset()), spawn(code, genuine / "libcuda.so.1")) == []


# --- what one look leaves to the next --------------------------------------------------------------------------------

LATER = """
import ctypes, os, sys, time
print(os.getpid(), flush=True)
sys.stdin.readline()
what = sys.argv[1]
held = os.open(what, os.O_RDWR) if "nvidia" in os.path.basename(what) else ctypes.CDLL(what)
print("held", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
print(int(child.stdout.readline()), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("what", ["driver", "device"])
def test_who_takes_it_after_a_look(what: str, genuine: Path, tmp_path: Path) -> None:
    """The very next look finds it, though the process was looked at before and had nothing."""
    (tmp_path / "nvidia0").touch()
    path = genuine / "libcuda.so.1" if what == "driver" else tmp_path / "nvidia0"
    watch = Watch(frozenset(), dev=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", LATER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()
        for _ in range(3):
            assert found(watch, program.pid) == []
        program.stdin.write("\n")
        program.stdin.flush()
        program.stdout.readline()
        assert [each.what for each in found(watch, program.pid)] == [what]
        program.kill()


def test_a_child_whose_parent_is_known_later(spawn: Callable[..., int], genuine: Path) -> None:
    """Both were strangers until the parent came to the daemon."""
    child = spawn(PARENT, SAY, genuine / "libcuda.so.1")
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    watch = Watch(frozenset())
    for _ in range(2):
        assert found(watch) == []
    assert [each.pid for each in found(watch, parent)] == [child]


def test_an_orphan_after_a_look(spawn: Callable[..., int], genuine: Path) -> None:
    """As long as a shell is the parent, the rest of its pipeline is the shell's."""
    first = spawn(SAY, process_group=0)
    second = spawn(PARENT, SAY, genuine / "libcuda.so.1", process_group=first)
    shell = int(Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1])
    # The shell's own parent is this test, of the same session: only the orphan is the job's.
    watch = Watch(frozenset())
    for _ in range(2):
        assert found(watch, first) == []
    os.kill(shell, signal.SIGKILL)
    os.waitpid(shell, 0)
    if os.getsid(int(Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1])) == os.getsid(second):
        pytest.skip("whoever takes orphans here is of the test's own session")
    assert [each.pid for each in found(watch, first)] == [second]


def test_strangers_are_read_once(
    spawn: Callable[..., int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A look that has nothing new to see costs little, however many others there are."""
    many = "import os, sys, time; all(os.fork() for _ in range(30)) and print(os.getpid(), flush=True); time.sleep(600)"
    strangers = spawn(many, start_new_session=True)
    request.addfinalizer(lambda: os.killpg(strangers, signal.SIGKILL))
    pid = spawn(SAY)
    stop(pid)  # or it would still go to sleep, and touch memory on its way
    watch = Watch(frozenset(), dev="/nonexistent")
    for _ in range(2):
        found(watch, pid)
    read: list[str] = []
    contents = unprotected._contents

    def noting(path: str, *, short: bool = False) -> bytes:
        read.append(path)
        return contents(path, short=short)

    monkeypatch.setattr(unprotected, "_contents", noting)
    processes = sum(name.isdecimal() for name in os.listdir("/proc"))
    assert processes > 30
    looks = READ_ALL - 2  # the next one reads everything
    for _ in range(looks):
        found(watch, pid)
    stats = [path for path in read if path.endswith("/stat")]
    assert stats.count(f"/proc/{pid}/stat") == looks  # a member is looked at each time
    # What is read beside it is new: processes that came meanwhile.
    others = {path for path in stats if path != f"/proc/{pid}/stat"}
    assert len(stats) - looks < looks * processes / 4, others
    assert not [path for path in read if path == f"/proc/{pid}/maps"]
    found(watch, pid)
    assert f"/proc/{pid}/maps" in read  # each tenth
