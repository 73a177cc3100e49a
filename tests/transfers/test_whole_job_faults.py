"""Jobs of ranks move between two nodes, and daemons, servers and ranks die meanwhile: one copy of all of it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.migration.moves import ended, reaches
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair
from tests.transfers.ranks import RANKS, Job, job_of_ranks, killed, launched

pytestmark = [pytest.mark.criu, needs_networks]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@pytest.fixture
def job(nodes: list[TransferNode], tmp_path: Path) -> Iterator[Job]:
    with job_of_ranks(nodes, tmp_path) as job:
        yield job


def test_a_daemon_or_a_program_dies(job: Job) -> None:
    """At each side of the decision. The source's daemon is gone while a rank's server dies at the target, which is
    recovered, or a rank itself: then nothing of it runs there."""
    for who, point, dies, moves in (
        ("source", "write.committed transfers.committed", "pid", False),
        ("source", "write.committed transfers.committed", "server_pid", True),
        ("target", "write.committed transfers.going", "", True),
    ):
        here, target = job.where(), job.target
        victim = job.source if who == "source" else target
        victim.dies_at(point)
        job.move()
        wait_until(victim.has_died, f"it comes to {point}")
        if dies:
            assert target.transfers()[0]["state"] == "prepared"
            killed(target, target.lives()[-1][dies])
        if dies == "server_pid":
            wait_until(lambda: all(one["recoveries"] for one in target.lives()), "they are recovered")  # noqa: B023
        victim.starts_again()
        job.settle()
        assert (job.where() != here) is moves, f"{point} {dies}: {job.describe()}"
        job.goes_on()


def test_a_server_of_a_rank_dies_at_the_source(job: Job) -> None:
    """While its content is sent, and once it stands still for the last time."""
    for number, phase in enumerate(("sending", "handing_over")):
        source = job.source
        operation = job.move()
        reaches(source, operation, phase)
        killed(source, source.lives()[number]["server_pid"])
        over = ended(source, operation)
        assert over["state"] == "succeeded" or over["error"]["process_location"] == "source"
        job.goes_on()


def test_a_rank_dies_at_the_source(nodes: list[TransferNode], tmp_path: Path) -> None:
    """Its job is not what was announced any more."""
    job = launched(nodes, tmp_path)
    source = job.source
    operation = job.move()
    reaches(source, operation, "sending")
    killed(source, source.lives()[0]["pid"])
    over = ended(source, operation)
    assert (over["state"], over["error"]["process_location"]) == ("failed", "source")
    assert len(source.lives()) == RANKS - 1
    assert not job.nodes[1].lives()
    source.client.delete(f"/v1/jobs/{job.id()}")
    wait_until(lambda: not source.lives(), "it has ended")
