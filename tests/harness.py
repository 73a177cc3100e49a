"""What the tests with real programs share: kernels built on the spot, both libcudarts, programs to be armed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conformance import shared
from xmigd.demo.node import Node, Program, looks, status
from xmigd.native import DESCRIPTOR_STORE

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance" / "programs"
COMPILER = shared.COMPILER
# CI is root. As anybody else one cannot become another user, nor give files to one.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for several users")


def compile_kernels(folder: Path) -> Path:
    """The image of tests/conformance/kernels.c."""
    return shared.compile_kernels(folder)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine that nobody has signed, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@functools.cache
def cudart(version: str) -> Path:
    """The libcudart of the PyPI package for CUDA 12 or 13, as it was installed."""
    package = {"12": "nvidia-cuda-runtime-cu12", "13": "nvidia-cuda-runtime"}[version]
    files = importlib.metadata.files(package) or []
    return Path(next(f for f in files if f.name == f"libcudart.so.{version}").locate()).resolve()


@contextlib.contextmanager
def own_node(native_dir: Path, **settings: object) -> Iterator[Node]:
    """A daemon in a folder of its own, with cpu devices of 1 GiB if nothing else is reported; nothing is left of it."""
    # Not pytest's own folder: a socket's path has at most 107 bytes.
    settings = {"native_dir": native_dir, "device_memory": 1 << 30} | settings
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder, forked.Node(Path(folder), **settings) as node:
        yield node


def start(
    node: Node,
    program: Path,
    *arguments: object,
    kernels: Path,
    runtime: str = "13",
    device: str | None = None,
    hang_timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Program:
    """Start a program; it has shaken hands and waits for `go`, so that faults can be armed at any record of it."""
    variables = {"CUDART": str(cudart(runtime)), "KERNELS": str(kernels), "PYTHONPATH": str(CONFORMANCE)}
    command: list[str | Path] = [sys.executable, CONFORMANCE.parent / "start.py", program, *map(str, arguments)]
    options = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    started = node.program(
        command, name=program.stem, device=device, hang_timeout=hang_timeout,
        environment=variables | dict(environment or {}), **options,
    )  # fmt: skip
    is_ready(started)
    return started


def is_ready(program: Program) -> None:
    """It has shaken hands, and waits for `go`."""
    assert program.process.stdout is not None
    if program.process.stdout.readline() != "ready\n":
        _, reported = program.process.communicate()
        raise AssertionError(f"it did not start: {reported} {program.lines()}")
    program.until("running")


def open_devices(program: Program) -> None:
    """A program that waits for `go` has no context, and so no standby. For a pause, too, its devices are opened."""
    info = program.info()
    assert info is not None
    for request in ("pause", "continue"):
        program.node.client.post(f"/v1/processes/{info['id']}:{request}", {})


def go(program: Program) -> None:
    """Let it begin."""
    assert program.process.stdin is not None
    program.process.stdin.write("go\n")
    program.process.stdin.flush()


def output(program: Program, timeout: float = 300) -> str:
    """What it printed. Fails with what it reported when it did not end well."""
    try:
        out, err = program.process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        program.process.kill()
        out, err = program.process.communicate()
        raise AssertionError(f"it hangs; so far: {out[-500:]} {err[-2000:]} {program.info()}") from None
    assert program.process.returncode == 0, f"exit code {program.process.returncode}: {out[-500:]} {err[-3000:]}"
    return out


def run(node: Node, program: Path, *arguments: object, **options: Any) -> str:
    """Start, go, output."""
    started = start(node, program, *arguments, **options)
    go(started)
    return output(started)


def kill_server(program: Program) -> int | None:
    """SIGKILL to the server that has the program now, if there is one. Returns its pid."""
    info = program.info()
    server: int | None = None if info is None else info["server_pid"]
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    return server


def stop(pid: int) -> None:
    """SIGSTOP, and wait until all of it stands: one thread takes the signal, and until that one has run, the others go
    on for milliseconds."""

    def stands() -> bool:
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
            # One that has ended, whose parent may stand still, too, does nothing any more either.
            return {stat.rpartition(")")[2].split()[0] for stat in stats} <= {"T", "Z", "X"}
        return False

    os.kill(pid, signal.SIGSTOP)
    wait_until(stands, f"{pid} is stopped")


def found_again(node: Node) -> None:
    """This daemon has every program of an earlier one. What it says of one before is from the database: it runs, and
    cannot be moved yet."""
    wait_until(lambda: status(node.settings.api_socket, "/readyz") == 200, "it has found every program again")


def injected(program: Program, count: int = 1) -> None:
    """So many of the faults that were armed have been injected. What waits for one may have been kept from getting
    there."""
    info = program.info()
    assert info is not None
    reported = ("an armed fault is injected", f"process={info['id'][:12]}")

    def lines() -> list[str]:
        return [line for line in program.node.log.read_text().splitlines() if all(each in line for each in reported)]

    wait_until(lambda: len(lines()) >= count, f"{count} of its faults are injected")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60, *, closely: bool = False) -> None:
    """Poll until it holds. Fails with `what` when it does not within `timeout` seconds. ``closely``: what may hold for
    milliseconds only."""
    for _ in looks(timeout, closely=closely):
        if condition():
            return
    raise AssertionError(f"not within {timeout} s: {what}")


@dataclass(frozen=True)
class Held:
    """What a node holds, counted through /proc."""

    servers: int
    descriptors: int  # of the daemon, but for its database
    memfds: int  # of the daemon and its servers: jobs' memory


def held(node: Node) -> Held:
    """Count it now."""
    assert node.process is not None
    servers = server_pids(node)
    links = [link for pid in (node.process.pid, *servers) for link in open_fds(pid)]
    own = descriptors(node.process.pid, Path(node.environment["XMIG_DATABASE"]))
    memory = [
        link for link in links if "memfd:" in link and "xmig-index" not in link
    ]  # the daemon's account of it stays
    return Held(len(servers), len(own), len(memory))


def held_at_rest(node: Node) -> Held:
    """Count it when no program lives, and nobody asks the daemon anything: on a busy machine it sees later than the
    next line of a test that the connection of the last request has been closed, or that a server has gone."""
    node.client.close()
    path = node.settings.api_socket
    wait_until(lambda: all(state == LISTENS for _, state in unix_sockets(path)), f"no connection to {path}")
    assert node.process is not None
    daemon = node.process.pid

    def nobody_lives() -> bool:  # of each server the daemon has a pidfd, and the pipe into which it prints
        return not [link for link in open_fds(daemon) if "pidfd" in link or link.startswith("pipe:")]

    wait_until(nobody_lives, "the daemon has seen every server's end")
    return held(node)


LISTENS = "01"


def unix_sockets(path: Path) -> list[tuple[str, str]]:
    """Of those that have this path: the name of its descriptor, and its state, as /proc/net/unix has them."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [(f"socket:[{line[6]}]", line[5]) for line in lines if line[-1] == str(path.resolve())]


def server_pids(node: Node) -> list[int]:
    """The processes of this node's servers."""
    mark = str(node.folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"xmig-server") and mark in words:
                    found.append(int(entry.name))
    return found


def descriptor_stores(runtime_dir: Path) -> list[int]:
    """The processes of a node's descriptor store: who has its socket. Their command line says nothing of the node."""
    sockets = {name for name, _ in unix_sockets(runtime_dir / "descriptors.sock")}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                ours = (entry / "comm").read_text().strip() == DESCRIPTOR_STORE[:15]
                if ours and sockets.intersection(open_fds(int(entry.name))):
                    found.append(int(entry.name))
    return found


def descriptors(daemon: int, database: Path) -> list[str]:
    """What a daemon has open, but for its database, and for what it has a look at. The database's readers are a pool
    (xmigd/database/engine.py), which opens one more when more threads read at once than ever before, and keeps it."""
    others = (str(database.resolve()), "/proc/", "/sys/")
    return [name for name in open_fds(daemon) if not name.startswith(others)]


def open_fds(pid: int) -> list[str]:
    """What a process has open."""
    links = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(entry))
    return links


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stands_still(program: Program) -> bool:
    """Does it come to rest, and use no processor time? On a busy machine it may not have read yet what it was
    queried."""
    for _ in range(20):
        before = cpu_seconds(program.process.pid)
        time.sleep(0.5)
        if program.process.poll() is not None:
            return False
        if cpu_seconds(program.process.pid) == before:
            return True
    return False


def steps(program: Program, count: int) -> str:
    """Let the stepwise program do some work; its answer."""
    ask(program, count)
    return answer(program)


def ask(program: Program, count: int) -> None:
    assert program.process.stdin is not None
    program.process.stdin.write(f"{count}\n")
    program.process.stdin.flush()


def answer(program: Program) -> str:
    assert program.process.stdout is not None
    return program.process.stdout.readline()
