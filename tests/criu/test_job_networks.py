"""Networks of jobs of several nodes (`xmigctl run --network job`): connections between a job's programs go where these
go, whatever the addresses of the nodes are."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.criu.test_connected_nodes import PORT, PROGRAM, Pair, again_and_again
from tests.criu.test_nodes import in_reach, phase_of, restore, restored_while_killed
from tests.harness import found_again, wait_until
from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, several
from xmigd.ids import new_id

pytestmark = [pytest.mark.criu, needs_networks]

FIRST = "198.18.0.1"
ONCE_MORE = 'until "$@" || [ -s "$3" ]; do sleep 0.1; done'  # the first node may not listen yet


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


class Connected(Pair):
    """As its parent, in a network of the job's own."""

    def __init__(self, nodes: list[TransferNode], folder: Path) -> None:
        self.nodes = nodes
        self.outputs = [folder / "one", folder / "two"]
        options = ["--network", "job", "--nodes", ",".join(node.name for node in nodes)]
        name = f"connected-{new_id()[:8]}"
        for node, output, others in zip(nodes, self.outputs, (["-"], [FIRST]), strict=True):
            command: list[str | Path] = [sys.executable, PROGRAM, output, *others, str(PORT)]
            if node is nodes[1]:
                command = ["sh", "-c", ONCE_MORE, "sh", *command]
            node.begin_movable(command, output.with_suffix(".err"), *options, name=name)
        self.goes_on()

    def nothing_is_left(self) -> None:
        """Of what was restored by half: neither a program nor a network."""
        self.until_ended()
        for node in self.nodes:
            wait_until(lambda: not networks(node), "no network is left", 60)  # noqa: B023


def networks(node: TransferNode) -> list[Path]:
    return list((node.folder / "networks").iterdir())


@pytest.fixture
def job(nodes: list[TransferNode], tmp_path: Path) -> Iterator[Connected]:
    made = Connected(nodes, tmp_path)
    yield made
    made.end()
    made.nothing_is_left()


def test_daemons_are_started_again(job: Connected) -> None:
    """Connections do not notice; and whoever connects anew gets through."""
    for node in job.nodes:
        node.kill()
        job.goes_on()
        node.starts_again()
        found_again(node)
        job.goes_on()
    wait_until(lambda: in_reach(job.nodes[0], "two"), "they reach each other")
    job.check()


def test_what_the_program_knows(nodes: list[TransferNode], tmp_path: Path) -> None:
    """Its addresses, and the device; and the network ends with it."""
    one, output = nodes[0], tmp_path / "known"
    options = ["--network", "job", "--nodes", "one,two"]
    script = 'env | grep -e ^XMIG_JOB_ADDR -e ^XMIG_JOB_LEADER -e ^GLOO; until [ -e "$0" ]; do sleep 0.1; done'
    program = one.begin_movable(["sh", "-c", script, tmp_path / "go"], output, *options, name="known")
    wait_until(lambda: "GLOO" in output.read_text(), "it has written all")
    assert sorted(output.read_text().splitlines()) == [
        "GLOO_SOCKET_IFNAME=xmig0", f"XMIG_JOB_ADDRESS={FIRST}", f"XMIG_JOB_ADDRESSES={FIRST},198.18.0.2",
        f"XMIG_JOB_LEADER_ADDRESS={FIRST}",
    ]  # fmt: skip
    (tmp_path / "go").touch()
    assert program.process.wait(30) == 0
    wait_until(lambda: not networks(one), "its network has ended, too")


def test_nothing_is_lost(job: Connected) -> None:
    """It goes on beside a checkpoint, and from one, several times. The network is slow: packets are on their way at any
    time."""
    one = job.nodes[0]
    found = one.client.get(f"/v1/jobs/{one.lives()[0]['job_id']}/movable")
    assert found["movable"], found
    again_and_again(job)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", ["restoring", "write.begun operations.decide", "write.committed operations.decide"])
@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_it_is_restored(job: Connected, which: int, at: str) -> None:
    """All goes on, or nothing of it is left, and it is restored the next time."""
    one, two = job.nodes
    checkpoint = job.stopped()
    over = restored_while_killed(job.nodes, job.nodes[which], checkpoint, at)
    assert (over["state"] == "succeeded") == (at == "write.committed operations.decide" and which == 0), over
    if over["state"] != "succeeded":
        job.nothing_is_left()
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        succeeded(one, restore(one, checkpoint))
    job.check()


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_it_is_dumped(job: Connected, which: int) -> None:
    """The programs go on, and nothing of what they send is missing."""
    one, two = job.nodes
    node = job.nodes[which]
    operation = job.create(stop=True)
    wait_until(lambda: phase_of(node, "checkpoint") == "dumping", "it is dumped", closely=True)
    node.kill()
    node.starts_again()
    found_again(node)
    assert ended(one, operation)["state"] != "succeeded"
    wait_until(lambda: not phase_of(two, "checkpoint"), "it is over there, too", 60)
    job.goes_on()
    job.check()


def test_parts_go_to_nodes_with_other_addresses(native_dir: Path, tmp_path: Path) -> None:
    """First one of them, then the other, and the node that led is gone: no part is where it began."""
    with (
        tempfile.TemporaryDirectory(prefix="xmig-mirror-") as mirror,
        several(3, native_dir, checkpoint_mirror=mirror) as nodes,
    ):
        one, two, three = nodes
        job = Connected([one, two], tmp_path)
        checkpoint = mirrored(job, Path(mirror))
        succeeded(one, restore(one, checkpoint, two="three"))
        job.nodes = [one, three]
        job.goes_on()
        checkpoint = mirrored(job, Path(mirror))
        one.close()
        succeeded(two, restore(two, checkpoint, one="two"))
        job.nodes = [two, three]
        job.check()


def mirrored(job: Connected, mirror: Path) -> str:
    checkpoint = job.stopped()
    for node in job.nodes:
        wait_until((mirror / node.name / f"{checkpoint}.json").exists, "it is in the mirror", 60)
    return checkpoint
