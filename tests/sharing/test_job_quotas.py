"""All processes of a job share its memory quota on a device: never more than that, and not less, whatever becomes of
their servers and of the daemon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness import CONFORMANCE
from tests.migration.moves import ended, refusal, succeeded
from tests.sharing.conftest import MIB, PROGRAMS, answer, ask
from xmigd.client import Refused
from xmigd.demo.node import Node, Program
from xmigd.memory import quota

QUOTA = 96  # MiB
OWN = 4  # that each process has from the beginning, MiB
OUT_OF_MEMORY = "2"


class Several:
    """A job of several processes (programs/several.py)."""

    def __init__(self, node: Node, program: Program) -> None:
        self.node = node
        self.program = program
        self.pids = [int(word) for word in answer(program).split()]

    def __call__(self, words: str) -> str:
        ask(self.program, words)
        return answer(self.program)

    def start(self) -> str:
        """One more; what it says."""
        reply, pid = self("start").rsplit(" ", 1)
        self.pids.append(int(pid))
        return reply

    def process(self, number: int) -> dict[str, Any]:
        """What the daemon knows of one."""
        found: list[dict[str, Any]] = []

        def known() -> bool:
            found[:] = [
                one
                for one in self.node.client.get("/v1/processes", job=self.program.job)
                if one["pid"] == self.pids[number]
            ]
            return bool(found)

        harness.wait_until(known, "the daemon knows the process")
        return found[0]

    def until(self, number: int, state: str) -> dict[str, Any]:
        harness.wait_until(lambda: self.process(number)["state"] == state, f"process {number} is {state}")
        return self.process(number)

    def operation(self, number: int, verb: str, **body: Any) -> dict[str, Any]:
        path = f"/v1/processes/{self.process(number)['id']}:{verb}"
        return succeeded(self.node, self.node.client.post(path, body))

    def move(self, number: int, target: str) -> None:
        body = {"process": self.process(number)["id"], "target": target}
        succeeded(self.node, self.node.client.post("/v1/migrations", body))

    def used(self) -> dict[str, int]:
        """By device, MiB."""
        try:
            found = self.node.client.get(f"/v1/jobs/{self.program.job}/sharing")["quota_used"]
        except Refused:  # no server has announced itself to a new daemon yet
            return {}
        return {device: used // MIB for device, used in found.items()}

    def uses(self, **used: int) -> None:
        """Soon: what is given back is queued."""
        wanted = {name.replace("cpu", "cpu:"): number for name, number in used.items()}
        harness.wait_until(lambda: self.used() == wanted, f"{wanted} MiB are used, of {self.used()}")

    def kill_server(self, number: int) -> None:
        server = self.until(number, "running")["server_pid"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, device_memory=512 * MIB, port=-1, adoption_grace=0.5) as node:
        yield node


Begin = Callable[..., Several]


@pytest.fixture
def begin(node: Node, kernels: Path) -> Iterator[Begin]:
    begun: list[Program] = []

    def begin(count: int = 2, quota: int = QUOTA, **request: Any) -> Several:
        program = node.program(
            [sys.executable, PROGRAMS / "several.py", str(count)], name="several", device="cpu:0",
            environment={
                "CUDART": str(harness.cudart("13")), "KERNELS": str(kernels), "PYTHONPATH": str(CONFORMANCE),
            },
            stdin=subprocess.PIPE, request={"memory_quota": quota * MIB, **request},
        )  # fmt: skip
        begun.append(program)
        return Several(node, program)

    yield begin
    for each in begun:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.communicate(timeout=20)
        each.process.kill()
        each.process.wait()


def test_they_share_it(begin: Begin) -> None:
    job = begin()
    assert job("all left") == " ".join([f"{QUOTA - 2 * OWN} of {QUOTA}"] * 2)
    assert job("0 take 60") == "0"
    assert job("1 left") == f"{QUOTA - 2 * OWN - 60} of {QUOTA}"
    assert (job("1 take 30"), job("1 take 28"), job("all take 2")) == (OUT_OF_MEMORY, "0", "2 2")
    job.uses(cpu0=QUOTA)
    # Without their servers they have what they had.
    for number in (0, 1):
        job.kill_server(number)
    assert job("all take 2") == "2 2"
    assert job("all left") == " ".join([f"0 of {QUOTA}"] * 2)
    job.uses(cpu0=QUOTA)
    # What one gives back the other one can have, and what one has that ends.
    assert job("0 give") == "1"
    job.uses(cpu0=2 * OWN + 28)
    assert (job("1 take 56"), job.start(), job("2 take 2")) == ("0", "ready", OUT_OF_MEMORY)
    assert job("end 1") == "0"
    job.uses(cpu0=2 * OWN)
    assert job("2 take 88") == "0"


def test_nobody_gets_the_same_twice(begin: Begin) -> None:
    """Both allocate at the same moment until nothing is left, and their servers are killed meanwhile: in the end they
    have all of it, and no more."""
    job = begin(3)
    pieces = (QUOTA - 3 * OWN) // 2
    for turn in range(4):
        ask(job.program, "all fill 2")
        if turn:
            job.kill_server(turn % 3)
        assert sum(int(word) for word in answer(job.program).split()) == pieces, turn
        assert job.used() == {"cpu:0": QUOTA}
        job("all give")
        job.uses(cpu0=3 * OWN)


def test_a_move_takes_its_part_along(begin: Begin) -> None:
    job = begin()
    assert (job("0 take 36"), job("1 take 50")) == ("0", "0")
    expected = job("1 mix")
    assert expected != job("1 mix")
    job.move(1, "cpu:1")
    job.uses(cpu0=36 + OWN, cpu1=50 + OWN)
    assert job("0 take 56") == "0"
    assert job("all left") == f"0 of {QUOTA} {QUOTA - 50 - OWN} of {QUOTA}"
    # There is no room for it where it was.
    body = {"process": job.process(1)["id"], "target": "cpu:0"}
    assert refusal(job.node, "/v1/migrations", body)["code"] == "quota_full"
    job("0 give")
    job.uses(cpu0=OWN, cpu1=50 + OWN)
    job.move(1, "cpu:0")
    job.uses(cpu0=50 + 2 * OWN)
    job.kill_server(1)
    assert job("all take 38") in ("0 2", "2 0")
    job.uses(cpu0=QUOTA)


def test_a_suspension_gives_it_back(begin: Begin) -> None:
    job = begin()
    assert (job("0 take 20"), job("1 take 50")) == ("0", "0")
    job.operation(1, "suspend", to="host")
    job.uses(cpu0=20 + OWN)
    assert job("0 take 70") == "0"
    problem = refusal(job.node, f"/v1/processes/{job.process(1)['id']}:resume", {})
    assert problem["code"] == "quota_full"
    assert "leave" in problem["title"] or "quota" in problem["detail"], problem
    job("0 give")
    job.uses(cpu0=OWN)
    job.operation(1, "resume", device="cpu:0")
    job.uses(cpu0=50 + 2 * OWN)
    assert (job("0 take 40"), job("0 take 38")) == (OUT_OF_MEMORY, "0")


def test_of_two_that_come_back_one_has_room(begin: Begin) -> None:
    """Requested at the same moment. The other one is refused with the reason, and comes once there is room."""
    job = begin()
    for number in (0, 1):
        assert job(f"{number} take 50") == "0"
        job.operation(number, "suspend", to="host")
    job.uses(cpu0=0)
    paths = [f"/v1/processes/{job.process(number)['id']}:resume" for number in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda path: resumed(job.node, path), paths))
    assert sorted(each is None for each in ends) == [False, True], ends
    (failed,) = [number for number, why in enumerate(ends) if why is not None]
    assert "memory quota" in str(ends[failed]), ends
    job.until(failed, "suspended")
    job.uses(cpu0=50 + OWN)
    assert job(f"{1 - failed} give") == "1"
    job.uses(cpu0=OWN)
    assert resumed(job.node, paths[failed]) is None
    job.uses(cpu0=50 + 2 * OWN)


def resumed(node: Node, path: str) -> dict[str, Any] | None:
    """None: it was. Otherwise why not, before or during the operation."""
    try:
        found = ended(node, node.client.post(path, {"device": "cpu:0"}))
    except Refused as error:
        return dict(error.problem)
    return None if found["state"] == "succeeded" else dict(found["error"])


def test_another_daemon_counts_as_the_one_before(begin: Begin) -> None:
    """Once their servers live on, once one of them dies with the daemon, once both."""
    job = begin()
    assert (job("0 take 40"), job("1 take 30")) == ("0", "0")
    harness.wait_until(lambda: all(job.process(n)["snapshots"] for n in (0, 1)), "both have a snapshot")
    for dying in ((), (1,), (0, 1)):
        victims = [job.until(number, "running")["server_pid"] for number in dying]
        assert job.node.process is not None
        for victim in (job.node.process.pid, *victims):
            os.kill(victim, signal.SIGKILL)
        job.node.process.wait()
        job.node.start()
        for number in (0, 1):
            job.until(number, "running")
        job.uses(cpu0=70 + 2 * OWN)
        assert (job("0 take 20"), job("1 take 18"), job("0 take 2")) == (OUT_OF_MEMORY, "0", OUT_OF_MEMORY)
        job("1 give")
        job.uses(cpu0=40 + 2 * OWN)
        assert job("1 take 30") == "0"


def test_nobody_goes_on_without_a_quota(begin: Begin) -> None:
    """What the page has of a process is gone when server and daemon are: it is lost, and the others are not."""
    job = begin()
    assert (job("0 take 40"), job("1 take 30")) == ("0", "0")
    harness.wait_until(lambda: job.process(1)["snapshots"], "it has a snapshot")
    before = job.until(1, "running")
    assert job.node.process is not None
    job.node.process.kill()
    job.node.process.wait()
    forget_slots(before["server_pid"], before["id"])
    os.kill(before["server_pid"], signal.SIGKILL)
    job.node.start()
    harness.wait_until(lambda: job.process(1)["state"] in ("lost", "ended"), "it is lost")
    assert "memory quota is not known any more" in job.process(1)["why"]
    job.until(0, "running")
    job.uses(cpu0=40 + OWN)


def forget_slots(server: int, process: str) -> None:
    """Free those that a process has in the page that its server has."""
    (path,) = {
        str(each) for each in Path(f"/proc/{server}/fd").iterdir() if os.readlink(each).startswith("/memfd:xmig-quota")
    }
    with open(path, "r+b", buffering=0) as page:
        content = page.read()
        at = content.index(bytes.fromhex(process))
        page.seek(at - quota.SLOT.size + 16)
        page.write(struct.pack("I", quota.FREE))


def test_a_program_that_makes_its_records_larger(begin: Begin) -> None:
    """In its journal, while no server stands: what the next one gives it for them would be more than was claimed."""
    job = begin()
    assert (job("0 take 60"), job("1 take 2")) == ("0", "0")
    before = job.until(1, "running")
    assert job.node.process is not None
    job.node.process.send_signal(signal.SIGSTOP)
    try:
        server = os.pidfd_open(before["server_pid"])
        signal.pidfd_send_signal(server, signal.SIGKILL)
        select.select([server], [], [])
        os.close(server)
        assert make_larger(job.pids[1], 2 * MIB, 40 * MIB) > 0
    finally:
        job.node.process.send_signal(signal.SIGCONT)
    harness.wait_until(lambda: job.process(1)["state"] in ("lost", "ended"), "it is lost")
    assert "more memory than its job's quota has room for" in job.process(1)["why"]
    job.uses(cpu0=60 + OWN)


def make_larger(pid: int, had: int, to_have: int) -> int:
    """Requests for so much device memory in a program's journal; how many there were."""
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            if " rw-s " not in line or "journal" not in line:
                continue
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            memory.seek(start)
            content = memory.read(min(end - start, 64 * MIB))
            at = content.find(struct.pack("<Q", had))
            while at != -1:
                address = struct.unpack_from("<Q", content, at - 8)[0]
                if at % 8 == 0 and address and address % (2 * MIB) == 0:
                    memory.seek(start + at)
                    memory.write(struct.pack("<Q", to_have))
                    found += 1
                at = content.find(struct.pack("<Q", had), at + 1)
    return found
