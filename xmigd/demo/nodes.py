"""Nodes that programs move between, on one machine: each has its own network, processes, mounts and daemon.

Files are shared, as on nodes with one network file system. A program finds its daemon at the same path on every node:
the folder of each is mounted there. Only root can make them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

from xmigd.demo import node
from xmigd.demo.namespaces import NetworkNode
from xmigd.demo.namespaces import nodes as networks
from xmigd.demo.node import PATIENCE, Program, looks
from xmigd.errors import StartError

ROOT = Path(__file__).parents[2]
PORT = 7460
# The first process of a node: it takes what is orphaned, and lives until it is killed. Pids begin elsewhere on each
# node: a program keeps its own. Only bash ignores SIGCHLD for what it executes.
INIT = 'mount --bind "$1" "$2" && echo "$3" > /proc/sys/kernel/ns_last_pid && trap "" CHLD && exec sleep infinity'
PIDS = {"one": 5_000, "two": 15_000, "three": 25_000}


class Inside:
    """A process in other namespaces: its parent waits for it, signals go to itself."""

    def __init__(self, entering: node.Child) -> None:
        self._entering = entering
        self.pid = entering.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._entering.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._entering.wait(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        for pid in _children(self._entering.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class NamespacedNode(node.Node):
    """`place`: the path at which its programs find its folder."""

    def __init__(self, folder: Path, name: str, network: NetworkNode, place: Path, **settings: object) -> None:
        """Raises StartError."""
        self.name = name
        self.network = network
        self.address = f"{network.address}:{PORT}"
        more = {"programs_from": "*", "port": -1, "runtime_dir": place, "database": place / "xmig.db"} | settings
        super().__init__(folder, node=name, peer_host=network.address, peer_port=PORT, **more)
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--", "bash", "-c", INIT]
        self._first = network.run([*command, "sh", folder, place, str(PIDS[name])])
        wait(lambda: bool(_children(self._first.pid)), "the node has no first process")
        self._init = _children(self._first.pid)[0]
        wait(lambda: Path(f"/proc/{self._init}/comm").read_text() == "sleep\n", "its folder is not mounted")

    @property
    def namespaces(self) -> list[Path]:
        """In the order in which they are entered."""
        return [Path(f"/proc/{self._init}/ns") / kind for kind in ("net", "pid", "mnt")]

    def close(self) -> None:
        """End all that is there."""
        self._first.kill()
        self._first.wait()

    def entering(
        self, command: Sequence[str | Path], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this node, in a session of its own."""
        # A shell waits for it, and not `nsenter`, which stops when its child is stopped.
        words = ["nsenter", "--no-fork", "--target", str(self._init), "--mount", "--pid", "--net", "--"]
        words += ["sh", "-c", '"$@"; exit $?', "sh", "env", "-i"]
        words += [f"{name}={value}" for name, value in environment.items()]
        return subprocess.Popen([*words, "setsid", *map(str, command)], **options)

    def _imported(self) -> dict[str, str]:
        """Where Python finds this tree, wherever it is started, and what this process finds."""
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [self.environment.get("PYTHONPATH")])])}

    def popen(self, log: IO[bytes]) -> node.Child:
        entering = self.entering(
            [sys.executable, "-m", "xmigd.main"], self.environment | self._imported(),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        return Inside(entering)

    def begin(
        self, command: Sequence[str | Path], output: Path, *, request: Mapping[str, Any] | None = None,
        **environment: str,
    ) -> Program:  # fmt: skip
        """A program under the shim with nothing open but files: its output goes to `output`, its errors beside it.
        `request`: what else its job is to have."""
        body = {"name": output.stem, "command": Path(str(command[1])).name, **(request or {})}
        job = self.client.post("/v1/jobs", body)
        variables = (
            job["defaults"] | self.environment | job["environment"] | environment
            | {"LD_PRELOAD": job["preload"], "LD_LIBRARY_PATH": job["library_path"]} | self._imported()
        )  # fmt: skip
        # Opened there: files of other mounts are not dumped.
        opened = ["sh", "-c", 'out=$1; errors=$2; shift 2; exec "$@" < /dev/null > "$out" 2> "$errors"', "sh"]
        process = self.entering(
            [*opened, output, output.with_suffix(".err"), *command], variables, stdin=subprocess.DEVNULL
        )
        self._programs.append(process)
        return Program(self, job["id"], process)

    def lives(self) -> list[dict[str, Any]]:
        """Programs of it, also those that are stopped."""
        return [each for each in self.client.get("/v1/processes") if each["state"] not in ("ended", "lost")]

    def move(self, job: str, target: str, **fields: Any) -> dict[str, Any]:
        """To another node: the operation."""
        found = self.client.get("/v1/processes", job=job)
        return dict(self.client.post("/v1/migrations", {"process": found[0]["id"], "target": target} | fields))

    def transfers(self) -> list[dict[str, Any]]:
        return list(self.client.get("/v1/transfers"))

    def knows(self, other: NamespacedNode) -> None:
        """Enter it as a peer."""
        fingerprint = other.client.get("/v1/identity")["fingerprint"]
        self.client.post("/v1/peers", {"name": other.name, "address": other.address, "fingerprint": fingerprint})

    def reaches(self, other: NamespacedNode) -> bool:
        rows = self.client.get("/v1/peers")
        return any(row["name"] == other.name and row["state"] == "connected" for row in rows)


Kind = TypeVar("Kind", bound=NamespacedNode)


@contextlib.contextmanager
def pair(kind: type[Kind], **settings: Any) -> Iterator[list[Kind]]:
    """Two nodes that know each other and run. Raises StartError."""
    with several(2, kind, **settings) as made:
        yield made


@contextlib.contextmanager
def several(
    count: int, kind: type[Kind], *, of_each: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    **settings: object,
) -> Iterator[list[Kind]]:  # fmt: skip
    """The same, of so many. `of_each`: settings by node, beside those that all have."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
        made: list[Kind] = []
        for network, name in zip(stack.enter_context(networks(count)), PIDS, strict=False):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            each = kind(folder, name, network, place, **(settings | dict(of_each.get(name, {}))))
            stack.callback(each.close)
            made.append(each)
        with ThreadPoolExecutor(len(made)) as pool:
            beginning = [pool.submit(each.__enter__) for each in made]
            for each in made:
                stack.push(each)
        for begun in beginning:
            begun.result()
        both = [(here, there) for here in made for there in made if here is not there]
        for here, there in both:
            here.knows(there)
        wait(lambda: all(here.reaches(there) for here, there in both), "the nodes do not reach each other")
        yield made


def wait(holds: Callable[[], bool], why: str, patience: float = PATIENCE, *, closely: bool = False) -> None:
    """Until it holds. ``closely``: which may have been over milliseconds later. Raises StartError."""
    for _ in looks(patience, closely=closely):
        if holds():
            return
    raise StartError(why)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
