"""Jobs of several processes move between two nodes as a whole: ranks that share communicators, and a program with
children."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import found_again, wait_until
from tests.migration.moves import ended, reaches, succeeded
from tests.namespaces import needs_networks
from tests.transfers.drains import drain, takes_programs
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from tests.transfers.ranks import RANKS, Job, job_of_ranks
from tests.transfers.storm import family_ends
from xmigd.client import Refused

pytestmark = [pytest.mark.criu, needs_networks]

CONTENT = 2 << 20  # bytes, of each rank
FAMILY = Path(__file__).with_name("family.py")


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@pytest.fixture
def job(nodes: list[TransferNode], tmp_path: Path) -> Iterator[Job]:
    with job_of_ranks(nodes, tmp_path) as job:
        yield job


def test_there_and_back(job: Job) -> None:
    one, two = job.nodes
    plan = one.ctl("migrate", job.id(), "--to", "two", "--plan")
    assert [line.split()[-2] for line in plan.splitlines()[-RANKS:]] == ["two/cpu:0", "two/cpu:1"]
    for target, code in (("two/cpu:0,cpu:7", "no_such_device"), ("two/cuda:0", "no_such_device")):
        with pytest.raises(Refused) as caught:
            one.move(job.id(), target)
        assert caught.value.code == code
    printed = one.ctl("migrate", job.id(), "--to", "two/cpu:1,cpu:0")
    assert "2 processes are on two/cpu:1,cpu:0" in printed
    assert job.where() == 1
    there = sorted(two.lives(), key=lambda each: each["pid"])
    assert [each["device"] for each in there] == ["cpu:1", "cpu:0"]
    arrived = two.transfers()[0]
    assert arrived["processes"] == [each["id"] for each in there]
    assert arrived["content_bytes"] == RANKS * CONTENT
    ahead = [line for line in two.log.read_text().splitlines() if "content is ahead" in line]
    for one_of_them in there:
        assert any(f"device={one_of_them['device']} " in line for line in ahead), "each has a server of its own"
    job.goes_on()
    back = succeeded(two, job.move())
    assert back["result"]["target"] == "one/cpu:0,cpu:1"
    assert job.where() == 0
    job.goes_on()


def test_its_node_is_drained(job: Job) -> None:
    """One part of the drain for each rank, which all left in one transfer."""
    one, two = job.nodes
    processes = {each["id"]: each["device"] for each in one.lives()}
    planned = one.client.post("/v1/drain-plans", {"devices": ["cpu:0", "cpu:1"], "nodes": ["two"]})["steps"]
    assert {each["process"]: each["how"] for each in planned} == dict.fromkeys(processes, "transfer")
    assert sorted(each["target"] for each in planned) == ["two/cpu:0", "two/cpu:1"]
    result = succeeded(one, drain(one, nodes=["two"]))["result"]
    assert {each["process"]: each["source"] for each in result["parts"]} == processes
    assert ({each["how"] for each in result["parts"]}, result["moved"]) == ({"transfer"}, RANKS)
    assert (job.where(), len(one.transfers())) == (1, len(two.transfers()))
    takes_programs(one)
    job.goes_on()


def test_it_is_cancelled(job: Job) -> None:
    """While its content is sent: all ranks go on where they were."""
    operation = job.move()
    reaches(job.source, operation, "sending")
    job.source.client.delete(f"/v1/operations/{operation['id']}")
    assert ended(job.source, operation)["state"] == "cancelled"
    assert job.where() == 0
    job.goes_on()


def test_suspended_ranks(job: Job) -> None:
    """They stay so, also if the target's daemon dies; and are resumed there."""
    one, two = job.nodes
    succeeded(one, one.client.post(f"/v1/jobs/{job.id()}:suspend", {}))
    two.dies_at("write.committed transfers.going")
    operation = job.move()
    wait_until(two.has_died, "the target has it")
    two.starts_again()
    assert succeeded(one, operation)["result"]["downtime_ms"] is None
    found_again(two)
    assert not one.lives()
    assert [each["state"] for each in two.lives()] == ["suspended"] * RANKS
    succeeded(two, two.client.post(f"/v1/jobs/{job.id()}:resume", {"devices": ["cpu:1"]}))
    assert {each["device"] for each in two.lives()} == {"cpu:1"}
    job.goes_on()


def test_a_program_with_children(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """One has a device, one has none, and a pipe leads there."""
    one, two = nodes
    output = tmp_path / "steps"
    outputs = output, Path(f"{output}.child")
    kernels = str(native_dir / "xmig_kernels.so")
    program = one.begin(
        [sys.executable, FAMILY, output, "1000000", "0.01"], tmp_path / "family.out", request={"priority": "critical"},
        KERNELS=kernels,
    )  # fmt: skip
    for each in outputs:
        wait_for_lines(each, 5)
    # The other node does not know who may have critical jobs here, and says so before and after.
    assert "There it is normal" in one.ctl("migrate", one.lives()[0]["job_id"], "--to", "two", "--plan")
    for source, target in ((one, two), (two, one)):
        succeeded(source, source.move(source.lives()[0]["job_id"], target.name))
        assert not source.lives()
        assert len(target.lives()) == 2
        job = target.lives()[0]["job_id"]
        changes = [
            one["data"]
            for one in target.client.get("/v1/events", limit=1000)
            if one["type"] == "job.changed" and one["job_id"] == job
        ]
        assert [(one["before"], one["priority"]) for one in changes] == ([("critical", "normal")] * (target is two))
        for each in outputs:
            wait_for_lines(each, len(each.read_text().splitlines()) + 5)
    family_ends(nodes, native_dir, output)
    assert program.process.poll() is not None
