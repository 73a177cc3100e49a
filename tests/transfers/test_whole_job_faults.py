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


def test_a_program_dies_at_the_target(job: Job) -> None:
    """While it stands still there, decided, and the source's daemon is gone. A rank's server: all are recovered there.
    A rank itself: then nothing of it runs there."""
    for dies, moves in (("pid", False), ("server_pid", True)):
        here, source, target = job.where(), job.source, job.target
        source.dies_at("write.committed transfers.committed")
        job.move()
        wait_until(source.has_died, "it is decided")
        assert target.transfers()[0]["state"] == "prepared"
        killed(target, target.lives()[-1][dies])
        if dies == "server_pid":
            wait_until(lambda: all(one["recoveries"] for one in target.lives()), "they are recovered")  # noqa: B023
        source.starts_again()
        job.settle()
        assert (job.where() != here) is moves, f"{dies}: {job.describe()}"
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
