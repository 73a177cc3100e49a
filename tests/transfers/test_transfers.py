"""Programs move between two nodes; daemons die, links are down, somebody cancels. What a program writes is what it
writes when nobody disturbs it, and it lives on one node."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_until
from tests.migration.moves import ended, reaches, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from tests.transfers.storm import DEATHS, Storm, compared
from xmigd.client import Refused
from xmigd.demo.namespaces import INTERFACE
from xmigd.demo.node import Program

pytestmark = [pytest.mark.criu, needs_networks]

KEPT = {"memory_quota": 256 << 20, "priority": "best-effort"}  # what a job has, wherever it is


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@contextlib.contextmanager
def program(nodes: list[TransferNode], native_dir: Path, folder: Path) -> Iterator[tuple[Storm, Path]]:
    """One that runs on the first node, and in the end has written what it should."""
    output = folder / "steps"
    started: Program = nodes[0].start_program(native_dir, output, 0.01, steps=1_000_000, request=KEPT)
    wait_for_lines(output, 5)
    started.until("running")
    yield Storm(nodes, random.Random(0)), output
    output.with_suffix(".stop").touch()
    wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
    assert compared(nodes, native_dir, output, folder) == 0


def test_there_and_back(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    with program(nodes, native_dir, tmp_path) as (storm, output):
        one, two = nodes
        job = one.lives()[0]["job_id"]
        assert "two/cpu:1" in one.ctl("migrate", job, "--to", "two", "--plan")
        assert "is on two/cpu:1" in one.ctl("migrate", job, "--to", "two/cpu:1")
        before = len(output.read_text().splitlines())
        assert storm.where() == 1
        there = two.lives()[0]
        assert (there["device"], there["state"]) == ("cpu:1", "running")
        assert one.transfers()[0]["peer_job"] == there["job_id"]
        (arrival,) = two.client.get("/v1/operations?kind=arrival")
        assert arrival["result"]["shared_bytes"] > 0, "its server has what came, as it came"
        assert KEPT.items() <= two.client.get(f"/v1/jobs/{there['job_id']}").items()
        assert {node.transfers()[0]["id"] for node in nodes} == {one.transfers()[0]["id"]}
        assert [one.client.get("/v1/migrations")[0][name] for name in ("source", "target", "state")] == [
            "cpu:0", "two/cpu:1", "done",
        ]  # fmt: skip
        assert [two.client.get("/v1/migrations")[0][name] for name in ("source", "target")] == ["one/cpu:0", "cpu:1"]
        wait_for_lines(output, before + 2)
        succeeded(two, two.move(there["job_id"], "one"))
        assert storm.where() == 0
        assert "running" in one.ctl("transfer", "list")


def test_a_daemon_dies_at_each_write(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    with program(nodes, native_dir, tmp_path) as (storm, output):
        for death in DEATHS:
            before = len(output.read_text().splitlines())
            storm.one_dies(*death)
            wait_for_lines(output, before + 2)


def test_decided_by_hand(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """The target is gone at the worst moment, for good as it seems: an operator says that the program goes on here.
    When the target is back after all, its copy is dropped."""
    with program(nodes, native_dir, tmp_path) as (storm, output):
        one, two = nodes
        two.dies_at("write.begun transfers.going")
        one.move(one.lives()[0]["job_id"], "two")
        wait_until(two.has_died, "the target is gone")
        wait_until(lambda: "waits for two" in one.transfers()[0]["why"], "the source says what it waits for")
        before = len(output.read_text().splitlines())
        transfer = one.transfers()[0]
        assert transfer["state"] == "committed"
        one.client.post(f"/v1/transfers/{transfer['id']}:decide", {"goes_on": "here"})
        wait_for_lines(output, before + 5)
        two.starts_again()
        storm.settle()
        assert storm.where() == 0
        assert {node.transfers()[0]["state"] for node in nodes} == {"failed", "dropped"}
        with pytest.raises(Refused) as caught:
            one.client.post(f"/v1/transfers/{transfer['id']}:decide", {"goes_on": "there"})
        assert caught.value.code == "transfer_over"


def test_cancelled_or_unplugged(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """While pieces are sent over a slow link. The program goes on where it was."""
    with program(nodes, native_dir, tmp_path) as (storm, _):
        one, two = nodes
        job = one.lives()[0]["job_id"]
        two.network.slow(4000)
        operation = one.move(job, "two")
        wait_until(
            lambda: one.client.get(f"/v1/operations/{operation['id']}")["phase"] == "sending",
            "it is sent", closely=True,
        )  # fmt: skip
        one.client.delete(f"/v1/operations/{operation['id']}")
        assert ended(one, operation)["state"] == "cancelled"
        operation = one.move(job, "two")
        wait_until(
            lambda: one.client.get(f"/v1/operations/{operation['id']}")["phase"] == "sending",
            "it is sent", closely=True,
        )  # fmt: skip
        with two.network.unplugged():
            failed = ended(one, operation)
        two.network.fast()
        assert (failed["state"], failed["error"]["code"]) == ("failed", "peer_unreachable")
        assert failed["error"]["process_location"] == "source"
        storm.settle()
        assert storm.where() == 0
        refused = {"three": "not_found", "two/cpu:7": "no_such_device", "two/cuda:0": "no_such_device"}
        for target, code in refused.items():
            with pytest.raises(Refused) as caught:
                one.move(job, target)
            assert caught.value.code == code


def received(node: TransferNode) -> int:
    """Bytes, over its interface."""
    for line in (node.namespaces[0].parents[1] / "net" / "dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[0])
    raise AssertionError("it has no interface")


def begins_to_send(source: TransferNode, target: TransferNode, operation: dict[str, Any]) -> None:
    """Wait until a part of a piece has come."""
    reaches(source, operation, "sending")
    before = received(target)
    wait_until(lambda: received(target) - before > 40_000, "a part of a piece has come", closely=True)
    assert source.client.get(f"/v1/operations/{operation['id']}")["phase"] == "sending"


@pytest.mark.parametrize("kilobits", [200, 2000, None])
def test_a_cancel_waits_for_no_piece(
    nodes: list[TransferNode], native_dir: Path, tmp_path: Path, kilobits: int | None
) -> None:
    """However slow the link is, or if the target hangs (None): the program goes on, and the target forgets what has
    come. At 200 kbit/s a piece of 2 MiB takes 80 s; who hangs is given up after 20 s."""
    with program(nodes, native_dir, tmp_path) as (storm, output):
        one, two = nodes
        two.network.slow(kilobits or 2000)
        operation = one.move(one.lives()[0]["job_id"], "two")
        begins_to_send(one, two, operation)
        if kilobits is None:
            assert two.process is not None
            two.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        one.client.delete(f"/v1/operations/{operation['id']}")
        done = ended(one, operation)
        took = time.monotonic() - began
        if kilobits is None:
            assert two.process is not None
            two.process.send_signal(signal.SIGCONT)
        two.network.fast()
        assert (done["state"], done["error"]["process_location"]) == ("cancelled", "source")
        assert took < 5, f"it took {took:.1f} s"
        wait_for_lines(output, len(output.read_text().splitlines()) + 2)
        wait_until(lambda: two.transfers()[0]["state"] == "dropped", "the target knows")
        pieces = two.folder / "checkpoints" / "objects"
        wait_until(lambda: not any(path.is_file() for path in pieces.rglob("*")), "the target has forgotten it")
        storm.settle()
        assert storm.where() == 0


def test_faults_at_random(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """A short version of `python -m tests.bench --only moves-between-nodes`."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with program(nodes, native_dir, tmp_path) as (storm, output):
        storm.random.seed(seed)
        for _ in range(2):
            storm.attempt(output)
