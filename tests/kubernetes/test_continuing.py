"""Pods that go on from what an earlier one of their controller left: real programs, servers and CRIU, under `xmig-pod`.

The control groups are the test's: what the adapter writes into them is looked at, and then taken as done."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.harness import ROOT
from tests.kubernetes.cluster import Adapter, Cluster, Json
from tests.migration.moves import succeeded
from xmigd.demo.node import Node

pytestmark = pytest.mark.criu
CLIENT = ROOT / "tests" / "criu" / "client.py"


class Container:
    """One of a pod, as a runtime starts it: `xmig-pod` and its command."""

    def __init__(self, xmig: Node, native_dir: Path, cluster: Cluster, pod: Json, **options: Any) -> None:
        self.xmig = xmig
        self.cluster = cluster
        self.pod = pod
        self._native_dir = native_dir
        self._options = options

    def start(self, errors: Path, *command: str | Path) -> subprocess.Popen[bytes]:
        made = self.xmig.client.post("/v1/jobs", {"name": "for its variables"})
        environment = {
            "PATH": os.environ["PATH"], "XMIG_SOCKET": str(self.xmig.folder / "pods" / "client.sock"),
            "LD_LIBRARY_PATH": made["library_path"], "LD_PRELOAD": made["preload"],
            "KERNELS": str(self._native_dir / "xmig_kernels.so"),
        }  # fmt: skip
        with errors.open("ab") as file:
            process = subprocess.Popen(
                [self._native_dir / "xmig-pod", *command], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=file, start_new_session=True, **self._options,
            )  # fmt: skip
        self.cluster.put(process.pid, self.pod)
        return process

    def client(self, output: Path, errors: Path) -> subprocess.Popen[bytes]:
        """That writes a line for each step."""
        return self.start(errors, sys.executable, CLIENT, output, str(STEPS), "0.02")


@pytest.fixture(autouse=True)
def can_checkpoint(xmig: Node) -> Iterator[None]:
    criu_or_skip()
    xmig.folder.chmod(0o755)
    yield
    for each in xmig.client.get("/v1/checkpoints"):
        xmig.client.delete(f"/v1/checkpoints/{each['id']}")


@contextlib.contextmanager
def ended_with_it(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def known(xmig: Node, pod: Json) -> bool:
    """xMIG has a program of this pod's."""
    external_id = f"k8s:default/{pod['metadata']['name']}/{pod['metadata']['uid']}"
    return bool(xmig.client.get("/v1/jobs", external_id=external_id, live=True))


def evict(xmig: Node, cluster: Cluster, adapter: Adapter, pod: Json, process: subprocess.Popen[bytes]) -> int:
    """How its container has ended."""
    name = pod["metadata"]["name"]
    adapter.until(lambda: known(xmig, pod), f"{name} is known")
    cluster.delete(f"/api/v1/namespaces/default/pods/{name}")
    adapter.until(lambda: process.poll() is not None, "the program has ended with its checkpoint")
    cluster.end(name)
    return process.wait()


HOLDS = """import socket, sys
sys.stdin.readline()
held = []
for _ in range(80):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()"""


def test_a_pod_takes_only_its_own_places(
    xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path
) -> None:
    """Pods of everybody run as root: one that holds connections keeps no other one from its beginning."""
    greedy, other = (cluster.pod(name, owner=str(uuid.uuid4()), on_eviction="checkpoint") for name in ("g1", "g2"))
    socket = xmig.folder / "pods" / "continue.sock"
    adapter.until(socket.is_socket, "the adapter listens")
    holds = subprocess.Popen(
        [sys.executable, "-c", HOLDS, socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    steps = tmp_path / "steps"
    with holds, contextlib.ExitStack() as stack:
        stack.callback(holds.kill)
        cluster.put(holds.pid, greedy)
        assert holds.stdin is not None
        assert holds.stdout is not None
        print(file=holds.stdin, flush=True)
        assert holds.stdout.readline() == "held\n"
        process = Container(xmig, native_dir, cluster, other).client(steps, tmp_path / "steps.err")
        stack.enter_context(ended_with_it(process))
        harness.wait_until(lambda: steps.exists() and bool(steps.read_text()), "it begins", timeout=20)
    cluster.end("g1")
    cluster.end("g2")


def test_from_pod_to_pod(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """Evicted twice, and the adapter is killed meanwhile: the third pod ends as an undisturbed one does."""
    owner, whole, steps = str(uuid.uuid4()), tmp_path / "whole", tmp_path / "steps"

    def container(name: str) -> Container:
        return Container(xmig, native_dir, cluster, cluster.pod(name, owner=owner, place="0", on_eviction="checkpoint"))

    alone = Container(xmig, native_dir, cluster, cluster.pod("alone"))
    undisturbed = alone.client(whole, tmp_path / "whole.err")
    let_end(whole)
    first = container("c1")
    process = first.client(steps, tmp_path / "c1.err")
    with ended_with_it(process, undisturbed):
        wait_for_lines(steps, STEPS // 4)
        assert evict(xmig, cluster, adapter, first.pod, process) == -signal.SIGKILL
        second = container("c2")
        process = second.client(tmp_path / "nothing", tmp_path / "c2.err")
        with ended_with_it(process):
            adapter.until(lambda: cluster.joined(second.pod) is not None, "it goes on, in the group of the pod")
            wait_for_lines(steps, STEPS // 4 + 3)
            adapter.until(lambda: known(xmig, second.pod), "it is that pod's")
            adapter.kill()
            adapter.start()
            assert evict(xmig, cluster, adapter, second.pod, process) == 128 + signal.SIGKILL
        third = container("c3")
        process = third.client(tmp_path / "nothing", tmp_path / "c3.err")
        with ended_with_it(process):
            adapter.until(lambda: cluster.joined(third.pod) is not None, "it goes on, in the group of the pod")
            let_end(steps)
            assert process.wait(60) == 0, (tmp_path / "c3.err").read_text()
        assert undisturbed.wait(60) == 0
        assert steps.read_text() == whole.read_text()
        assert not (tmp_path / "nothing").exists()
        # What went on once does not again.
        process = container("c4").start(tmp_path / "c4.err", "sh", "-c", "exit 7")
        assert process.wait(60) == 7
    for name in ("c3", "c4", "alone"):
        cluster.end(name)


def test_whose_it_is(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """Pods of another controller, another place and another user begin anew. What cannot be restored is refused, and
    the reason is an event; when that is gone, it goes on, and gets the signals of its container."""
    owner, steps = str(uuid.uuid4()), tmp_path / "steps"
    wanted: dict[str, Any] = {"on_eviction": "checkpoint"}
    first = Container(xmig, native_dir, cluster, cluster.pod("d1", owner=owner, place="1", **wanted))
    process = first.client(steps, tmp_path / "d1.err")
    with ended_with_it(process):
        wait_for_lines(steps, STEPS // 4)
        evict(xmig, cluster, adapter, first.pod, process)
    second = cluster.pod("d2", owner=owner, place="1", **wanted)
    others = [
        Container(xmig, native_dir, cluster, cluster.pod("d3", place="1", **wanted)),
        Container(xmig, native_dir, cluster, cluster.pod("d4", owner=owner, place="2", **wanted)),
        Container(xmig, native_dir, cluster, second, user=60_010),
    ]
    for other in others:
        assert other.start(tmp_path / "d3.err", "sh", "-c", "exit 7").wait(60) == 7, (tmp_path / "d3.err").read_text()
    with steps.open("a") as file:
        file.write("somebody else's\n")
    mine = Container(xmig, native_dir, cluster, second)
    errors = tmp_path / "d2.err"
    assert mine.start(errors, "sh", "-c", "exit 7").wait(60) == 1
    assert "was written to since" in errors.read_text()
    (event,) = cluster.events("d2")
    assert event.startswith("it does not go on from its checkpoint: ")
    os.truncate(steps, steps.stat().st_size - len("somebody else's\n"))
    process = mine.start(errors, "sh", "-c", "exit 7")
    with ended_with_it(process):
        adapter.until(lambda: cluster.joined(second) is not None, "it goes on")
        wait_for_lines(steps, STEPS // 4 + 3)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 128 + signal.SIGUSR1
    for name in ("d2", "d3", "d4"):
        cluster.end(name)


def test_from_another_node(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """By hand: exported there, imported and restored here, with the label of its pods. A pod takes it up as it runs."""
    owner, steps = str(uuid.uuid4()), tmp_path / "steps"
    origin = f"default/{owner}//"
    with harness.own_node(native_dir, devices="cpu:0", criu=criu_or_skip()) as there:
        running = start(there, native_dir, steps, 0.02)
        wait_for_lines(steps, STEPS // 4)
        done = succeeded(there, there.client.start(f"/v1/jobs/{running.job}:preempt", {"prefer": "checkpoint"}))
        checkpoint = done["result"]["checkpoint"]
        done = succeeded(there, there.client.start(f"/v1/checkpoints/{checkpoint}:export", {}))
        folder = Path(xmig.environment["XMIG_DATABASE"]).parent / "checkpoints" / "exported"
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(done["result"]["path"], folder)
    succeeded(xmig, xmig.client.start("/v1/checkpoints:import", {"file": f"{checkpoint}.xmig"}))
    restored = succeeded(xmig, xmig.client.start(f"/v1/checkpoints/{checkpoint}:restore", {}))["result"]
    xmig.client.patch(f"/v1/jobs/{restored['job']}", {"labels": {"k8s/origin": origin}}, "*")
    pod = cluster.pod("e1", owner=owner, on_eviction="checkpoint")
    process = Container(xmig, native_dir, cluster, pod).start(tmp_path / "e1.err", "sh", "-c", "exit 7")
    with ended_with_it(process):
        adapter.until(lambda: cluster.joined(pod) == restored["root"], "it is taken up, in the group of the pod")
        adapter.until(lambda: known(xmig, pod), "it is that pod's")
        adapter.kill()  # and how the program ends, the next one finds out
        let_end(steps)
        adapter.until(lambda: not known(xmig, pod), "it has ended")
        adapter.start()
        assert process.wait(60) == 0, (tmp_path / "e1.err").read_text()
    assert len(steps.read_text().splitlines()) == STEPS
    cluster.end("e1")
