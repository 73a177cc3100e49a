"""What xMIG has to say goes into the job's log, and never to whatever descriptor 2 is."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import own_node, wait_until
from xmigd.demo.node import Node, Program
from xmigd.ipc.handshake import pack_notice

START = """
import ctypes, os, signal, sys
driver = ctypes.CDLL("libcuda.so.1")
pointer, context = ctypes.c_uint64(), ctypes.c_void_p()
def start():
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == driver.cuCtxSetCurrent(context) == 0
def mistakes():
    assert driver.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(64), 1) != 0
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 50)) != 0
    assert driver.cuGreenCtxCreate(ctypes.byref(context), None, 0, 0) != 0
"""
LINES = [
    "cuMemAllocManaged is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED",
    "no device memory for 1125899906842624 bytes: CUDA error 2",
    "cuGreenCtxCreate is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED",
]


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with own_node(native_dir, devices="cpu:0", port=-1) as node:
        yield node


def run(node: Node, code: str, *arguments: object, **options: Any) -> Program:
    program = node.program([sys.executable, "-c", START + code, *map(str, arguments)], **options)
    program.finish()
    return program


def test_nobody_reads_standard_error(node: Node) -> None:
    """The collector of the logs is gone: a notice must not kill the program."""
    code = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reading, writing = os.pipe()
os.dup2(writing, 2); os.close(reading); os.close(writing)
start(); mistakes()
"""
    program = run(node, code)
    assert program.process.returncode == 0
    assert program.lines() == LINES


@pytest.mark.parametrize("starter", [False, True])
def test_descriptor_2_is_data(node: Node, tmp_path: Path, starter: bool) -> None:
    """A program without standard error has opened a file of its own; `starter`: it began with one that was known."""
    code = """
os.close(2)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
assert fd == 2
os.write(fd, b"DATA")
start(); mistakes()
os.environ["XMIG_SOCKET"] = "/no/such/socket"
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-c",
             "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) != 802)"])
assert os.waitpid(child, 0)[1] == 0
"""
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr:
        status = os.fstat(stderr.fileno())
        environment = {"XMIG_STDERR": f"{status.st_dev}:{status.st_ino}"} if starter else {}
        program = run(node, code, tmp_path / "data", stderr=stderr, environment=environment)
    assert program.process.returncode == 0, errors.read_text()
    assert (tmp_path / "data").read_bytes() == b"DATA"
    assert (errors.read_bytes(), program.lines()) == (b"", LINES)


def test_no_descriptor_stays(node: Node) -> None:
    """Before the handshake a line takes a message of its own."""
    code = """
before = sorted(os.listdir("/proc/self/fd"))
assert driver.cuGreenCtxCreate(ctypes.byref(context), None, 0, 0) != 0
assert sorted(os.listdir("/proc/self/fd")) == before
start(); mistakes()
assert sorted(os.listdir("/proc/self/fd")) == before
"""
    program = run(node, code)
    assert program.process.returncode == 0
    wait_until(lambda: len(program.lines()) == 3, "all three are there")
    assert sorted(program.lines()) == sorted(LINES)


def test_they_outlive_the_daemon(native_dir: Path) -> None:
    """Reported while no daemon was there: the next one has it."""
    with own_node(native_dir, devices="cpu:0", port=-1) as node:
        code = 'start(); print("ready", flush=True); sys.stdin.readline(); mistakes(); print("done", flush=True)\n'
        program = node.program(
            [sys.executable, "-c", START + code + "sys.stdin.readline()"], stdin=subprocess.PIPE
        )  # fmt: skip
        assert program.process.stdin is not None
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == "ready\n"
        program.until("running")  # it is in the database: otherwise the next daemon does not know whose job it is
        node.kill()
        program.process.stdin.write("go\n")
        program.process.stdin.flush()
        # A call that the server answers needs no daemon; the last line is reported by then.
        assert program.process.stdout.readline() == "done\n"
        node.start()
        wait_until(lambda: program.lines() == LINES, "the next daemon has them")


# --- the command, the API --------------------------------------------------------------------------------------------


def ctl(node: Node, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xmigd.cli", *arguments], env=node.environment, capture_output=True, text=True,
        check=False, timeout=60, **options,
    )  # fmt: skip


def test_the_command(node: Node) -> None:
    program = run(node, "start(); mistakes()")
    done = ctl(node, "logs", program.job)
    assert done.returncode == 0, done.stderr
    assert [line.split("  ", 2)[1:] for line in done.stdout.splitlines()] == [["program", line] for line in LINES]
    rows = json.loads(ctl(node, "logs", program.job, "-o", "json").stdout)
    assert [(row["source"], row["text"]) for row in rows] == [("program", line) for line in LINES]
    assert ctl(node, "logs", "nothing").returncode == 4
    after = node.client.get(f"/v1/jobs/{program.job}/logs", after=rows[0]["id"], limit=1)
    assert [row["text"] for row in after] == LINES[1:2]
    before = node.client.get(f"/v1/jobs/{program.job}/logs", before=rows[2]["id"], limit=1)
    assert [row["text"] for row in before] == LINES[1:2]


def test_following(node: Node) -> None:
    """As it is reported, until the job is over."""
    code = 'start(); print("ready", flush=True); sys.stdin.readline(); mistakes()'
    program = node.program([sys.executable, "-c", START + code], stdin=subprocess.PIPE)
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "ready\n"
    following = subprocess.Popen(
        [sys.executable, "-m", "xmigd.cli", "logs", program.job, "-f", "-o", "json"], env=node.environment,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    program.process.communicate("go\n", timeout=60)
    out, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == LINES


def send(node: Node, job: str, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(node.settings.client_socket))
        sock.send(pack_notice(job, text))


def test_lines_by_message(node: Node) -> None:
    """Only into a job whose token is known, and harmless."""
    job = node.client.post("/v1/jobs", {"name": "reported", "command": "x"})
    token = job["environment"]["XMIG_JOB"]
    send(node, token[:-1], "a wrong token")
    send(node, "", "no job")
    send(node, token, "evil \x1b]0;title\x07 \u202e")
    lines: list[dict[str, Any]] = []

    def reported() -> bool:
        lines[:] = node.client.get(f"/v1/jobs/{job['id']}/logs")
        return bool(lines)

    wait_until(reported, "it is there")
    assert [line["text"] for line in lines] == [r"evil \x1b]0;title\x07 \u202e"]


# --- without a daemon ------------------------------------------------------------------------------------------------

ALONE = (
    "import ctypes, signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
)
NOBODY = "xmig: no xmigd answers at /no/such/socket"


def alone(node: Node, *, stderr: int, known: bool = True, code: str = ALONE, **options: Any) -> tuple[int, str]:
    environment = {"XMIG_SOCKET": "/no/such/socket"}
    if known:
        status = os.fstat(stderr)
        environment["XMIG_STDERR"] = f"{status.st_dev}:{status.st_ino}"
    return node.program([sys.executable, "-c", code], environment=environment, stderr=stderr, **options).finish()


@pytest.mark.parametrize("kind", ["file", "pipe", "socket", "terminal"])
def test_the_starter_is_reported(node: Node, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        reading = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        writing = os.open(tmp_path / "file", os.O_WRONLY)
    elif kind == "pipe":
        reading, writing = os.pipe()
    elif kind == "socket":
        reading, writing = (each.detach() for each in socket.socketpair())
    else:
        reading, writing = pty.openpty()
    assert alone(node, stderr=writing) == (0, "802\n")
    assert os.read(reading, 4096).decode().startswith(NOBODY)
    os.close(writing)
    os.close(reading)


def test_a_starter_that_does_not_read(node: Node) -> None:
    """Gone, or its pipe is full: no signal, and nobody waits."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    assert alone(node, stderr=writing) == (0, "802\n")
    os.close(reading)
    assert alone(node, stderr=writing) == (0, "802\n")
    os.close(writing)


def test_a_limit_of_a_files_size(node: Node, tmp_path: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); import signal\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n" + ALONE
    with (tmp_path / "file").open("wb") as file:
        assert alone(node, stderr=file.fileno(), code=code) == (0, "802\n")


def test_who_is_not_known_to_be_the_starter_is_reported_nothing(node: Node, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert alone(node, stderr=file.fileno(), known=False, start_new_session=True) == (0, "802\n")
    assert (tmp_path / "file").read_bytes() == b""


def test_xmigctl_run_is_the_starter(node: Node) -> None:
    """And of a program that the daemon refuses, it gets the reason, too."""
    job_and_error = "import ctypes, os; print(os.environ['XMIG_JOB'], ctypes.CDLL('libcuda.so.1').cuInit(0))"
    node.client.patch("/v1/devices/cpu:0", {"cordoned": True}, node.client.get_tagged("/v1/devices/cpu:0")[1])
    try:
        done = ctl(node, "run", "--", sys.executable, "-c", job_and_error)
    finally:
        node.client.patch("/v1/devices/cpu:0", {"cordoned": False}, node.client.get_tagged("/v1/devices/cpu:0")[1])
    assert done.stderr.startswith("xmig: xmigd refused this process: every device of this node is cordoned")
    job, error = done.stdout.split()
    assert error == "802"
    (line,) = node.client.get(f"/v1/jobs/{job.partition(':')[0]}/logs")
    assert (line["source"], line["level"]) == ("xmigd", "error")
    assert line["text"].startswith("xmigd refused this process: every device of this node is cordoned")


def test_work_that_is_not_done_yet_is_no_line(node: Node) -> None:
    """Programs look again and again."""
    code = """
import time
start()
stream, entry = ctypes.c_void_p(), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.2))
assert driver.cuStreamCreate(ctypes.byref(stream), 1) == driver.cuLaunchHostFunc(stream, entry, None) == 0
answers = [driver.cuStreamQuery(stream) for _ in range(5)]
assert 600 in answers, answers
assert driver.cuStreamSynchronize(stream) == driver.cuStreamQuery(stream) == 0
"""
    before = node.log.stat().st_size
    program = run(node, code, stderr=-1)
    assert program.process.returncode == 0
    with node.log.open() as log:
        log.seek(before)
        assert "cuStreamQuery" not in log.read()
