"""Checkpoints of jobs on several nodes whose programs have connections between the nodes: nothing of what they send is
lost, and nothing comes twice."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_nodes import back_to, in_reach, listed, phase_of, restore, restored_while_killed
from tests.harness import found_again, wait_until
from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines

pytestmark = [pytest.mark.criu, needs_networks]

PROGRAM = Path(__file__).with_name("connected.py")
PORT = 29_400
KILOBITS = 60_000  # a second
# NFT_MSG_GETTABLE, of all families: an answer for each, and one behind them.
TABLES = """import socket, struct
sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
sock.send(struct.pack("=IHHIIBBH", 20, 10 << 8 | 1, 0x301, 0, 0, 0, 0, 0))
count, done = 0, False
while not done:
    data = sock.recv(1 << 16)
    while data:
        length, kind = struct.unpack_from("=IH", data)
        done = kind == 3
        count += not done
        data = data[(length + 3) & ~3:]
print(count)
"""


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


class Pair:
    """A job with a program on each of two nodes. In the end each has all that the other one has sent."""

    def __init__(self, nodes: list[TransferNode], folder: Path, *outside: str) -> None:
        """`outside`: an address with which the second one is connected, too."""
        self.nodes = nodes
        self.outputs = [folder / "one", folder / "two"]
        request = {"name": "connected", "nodes": ["one", "two"]}
        for node, output, others in zip(nodes, self.outputs, (["-"], [nodes[0].network.address]), strict=True):
            words: list[str | Path] = [sys.executable, PROGRAM, output, *others, str(PORT)]
            if node is nodes[1]:
                wait_until(lambda: listens(nodes[0], PORT), "the other one listens")
                words += outside
            node.begin(words, output.with_suffix(".out"), request=request)
        self.goes_on()

    def goes_on(self) -> None:
        for output in self.outputs:
            wait_for_lines(output, len(output.read_text().splitlines()) + 20 if output.exists() else 20)

    def create(self, *, stop: bool = False) -> dict[str, Any]:
        job = self.nodes[0].lives()[0]["job_id"]
        operation: dict[str, Any] = self.nodes[0].client.post("/v1/checkpoints", {"job": job, "stop": stop})
        return operation

    def stopped(self) -> str:
        checkpoint = succeeded(self.nodes[0], self.create(stop=True))["result"]["checkpoint"]
        self.until_ended()
        return str(checkpoint)

    def end(self) -> None:
        for node in self.nodes:
            for job in {each["job_id"] for each in node.lives()}:
                node.client.delete(f"/v1/jobs/{job}")
        self.until_ended()

    def until_ended(self) -> None:
        wait_until(lambda: not any(node.lives() for node in self.nodes), "it has ended", 60)

    def check(self) -> None:
        self.goes_on()
        (self.outputs[0].parent / "go").touch()
        self.until_ended()
        one, two = (output.read_text().splitlines()[-1].split() for output in self.outputs)
        assert (one[::2], two[::2]) == (["sent", "came"],) * 2, self.errors()
        assert (one[1], two[1]) == (two[3], one[3]), (one, two)

    def errors(self) -> list[str]:
        return [output.with_suffix(".err").read_text() for output in self.outputs]


def listens(node: TransferNode, port: int) -> bool:
    return f":{port} " in inside(node, "ss", "-ltnH")


@contextlib.contextmanager
def listening(node: TransferNode, port: int) -> Iterator[None]:
    """Somebody who belongs to no job."""
    code = "import socket, sys; sock = socket.create_server(('', int(sys.argv[1]))); sock.accept()[0].recv(1)"
    with node.network.run([sys.executable, "-c", code, str(port)]) as process:
        try:
            wait_until(lambda: listens(node, port), "it listens")
            yield
        finally:
            process.kill()


def nothing_is_left(job: Pair) -> None:
    """Of what was restored by half: no program, no end of a connection, and packets come."""
    job.until_ended()
    for node in job.nodes:
        wait_until(lambda: f":{PORT} " not in inside(node, "ss", "-tnH"), "no end of it is left")  # noqa: B023
        assert tables(node) == 0


def tables(node: TransferNode) -> int:
    """Of nf_tables, in the node's network."""
    return int(inside(node, sys.executable, "-c", TABLES))


def inside(node: TransferNode, *command: str) -> str:
    """What a command prints in the node's network."""
    return subprocess.run([*node.network.command, *command], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def job(nodes: list[TransferNode], tmp_path: Path) -> Iterator[Pair]:
    made = Pair(nodes, tmp_path)
    yield made
    made.end()


def again_and_again(job: Pair) -> None:
    """Beside a checkpoint, and from one, several times. The network is slow: packets are on their way at any time."""
    one = job.nodes[0]
    for node in job.nodes:
        node.network.slow(KILOBITS)
    succeeded(one, job.create())
    job.goes_on()
    for _ in range(2):
        checkpoint = job.stopped()
        succeeded(one, restore(one, checkpoint))
        job.goes_on()
    for node in job.nodes:
        node.network.fast()
    job.check()


def test_nothing_is_lost(job: Pair) -> None:
    """It goes on beside a checkpoint, and from one, several times. The network is slow: packets are on their way at any
    time."""
    one = job.nodes[0]
    found = one.client.get(f"/v1/jobs/{one.lives()[0]['job_id']}/movable")
    assert (found["movable"], "tcp_connection" in {each["code"] for each in found["programs"][0]["obstacles"]}) == (
        True, True,
    )  # fmt: skip
    again_and_again(job)


def test_one_that_goes_on_is_restored(job: Pair) -> None:
    """It sends more, and is ended with full queues: nothing of that reaches what is restored, or is in its way."""
    one, two = job.nodes
    checkpoint = succeeded(one, job.create())["result"]["checkpoint"]
    job.goes_on()
    wait_until(lambda: listed(two, checkpoint), "it is whole there, too")
    job.end()
    for node in job.nodes:
        manifest = json.loads((node.folder / "checkpoints" / f"{checkpoint}.json").read_text())
        assert len(manifest["connections"]) == 1
        back_to({each["path"]: each["bytes"] for each in manifest["programs"][0]["files"] if each["writable"]})
    succeeded(one, restore(one, checkpoint))
    job.check()


def test_a_connection_with_somebody_else_is_refused(nodes: list[TransferNode], tmp_path: Path) -> None:
    """By name, also at the node that does not lead; and the job goes on."""
    one, two = nodes
    with listening(one, PORT + 1):
        job = Pair(nodes, tmp_path, one.network.address)
        over = ended(one, job.create(stop=True))
        assert (over["state"], over["error"]["code"]) == ("failed", "not_movable")
        assert f"{one.network.address}:{PORT + 1}" in over["error"]["detail"]
        assert " on two " in over["error"]["detail"]
        wait_until(lambda: not phase_of(two, "checkpoint"), "it is over there, too")
        assert [tables(node) for node in nodes] == [0, 0]
        job.check()


@pytest.mark.parametrize(
    ("which", "at"),
    [(1, "restoring"), (0, "write.begun operations.decide"), (0, "write.committed operations.decide")],
)
def test_a_daemon_is_killed_while_it_is_restored(job: Pair, which: int, at: str) -> None:
    """With both ends there, one, or none: all goes on, or nothing of it is left."""
    one, two = job.nodes
    checkpoint = job.stopped()
    node = job.nodes[which]
    over = restored_while_killed(job.nodes, node, checkpoint, at)
    assert (over["state"] == "succeeded") == (at == "write.committed operations.decide"), over
    if over["state"] != "succeeded":
        nothing_is_left(job)
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        succeeded(one, restore(one, checkpoint))
    job.check()


def test_a_daemon_is_killed_while_it_is_dumped(job: Pair) -> None:
    """The programs go on, and nothing of what they send is missing."""
    one, two = job.nodes
    for node in job.nodes:
        operation = job.create(stop=True)
        wait_until(lambda: phase_of(node, "checkpoint") == "dumping", "it is dumped", closely=True)  # noqa: B023
        node.kill()
        node.starts_again()
        found_again(node)
        assert ended(one, operation)["state"] != "succeeded"
        wait_until(lambda: not phase_of(two, "checkpoint"), "it is over there, too", 60)
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        job.goes_on()
    assert [tables(node) for node in job.nodes] == [0, 0]
    job.check()
