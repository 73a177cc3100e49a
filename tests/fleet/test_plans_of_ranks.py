"""Plans over two nodes that move a job of ranks: one transfer of all, each on the device that the plan has for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_until
from tests.migration.moves import ended, moved, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from tests.transfers.ranks import RANKS, Job, job_of_ranks
from xmigd.client import Refused

pytestmark = [pytest.mark.criu, needs_networks]
PLAN = {"objective": "free_nodes", "assumed_busy_share": 0.0, "max_slow_down": 50.0}
STAYS = "stays"


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir, fleet_readers="*", fleet_controllers="*") as both:
        yield both


@pytest.fixture
def job(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> Iterator[Job]:
    """On the first node. On the second one is a program that stays: only onto devices of a node in use is packed."""
    with job_of_ranks(nodes, tmp_path) as job:
        output = tmp_path / STAYS
        program = nodes[1].start_program(native_dir, output, steps=1_000_000)
        wait_for_lines(output, 3)
        program.until("running")
        if program.info()["device"] != "cpu:1":  # type: ignore[index]
            moved(program, "cpu:1")
        yield job
        output.with_suffix(".stop").touch()
        wait_until(lambda: not any(each["job_name"] == STAYS for each in nodes[1].lives()), "it has ended")


def ranks(nodes: list[TransferNode]) -> list[str]:
    """Where they are, in the order in which they began."""
    return [
        f"{node.name}/{each['device']}" for node in nodes
        for each in sorted(node.lives(), key=lambda each: each["pid"]) if each["job_name"] != STAYS
    ]  # fmt: skip


def go_on(job: Job) -> None:
    for rank in range(RANKS):
        file = job.folder / f"steps.{rank}"
        wait_for_lines(file, len(file.read_text().splitlines()) + 10)


def planned(both: list[TransferNode], controller: TransferNode, **fields: Any) -> dict[str, Any]:
    """A plan with one move of the ranks' job."""
    stay = [each["job_id"] for node in both for each in node.lives() if each["job_name"] == STAYS]
    found: dict[str, Any] = {}

    def made() -> bool:
        found.update(controller.client.post("/v1/fleet/plans", PLAN | {"exclude_jobs": stay} | fields))
        return len(found["moves"]) == 1

    wait_until(made, f"a plan moves it: {found}")
    return found


def apply(node: TransferNode, plan: dict[str, Any]) -> dict[str, Any]:
    return node.client.start(f"/v1/fleet/plans/{plan['id']}/apply")


def test_all_ranks_by_one_transfer(nodes: list[TransferNode], job: Job) -> None:
    """The order comes from the other node."""
    one, two = nodes
    before = ranks(nodes)
    stale, made = planned(nodes, one), planned(nodes, two, headroom=0.5)
    (move,) = made["moves"]
    # What stays has cpu:1, which is filled first, and each device has room for one rank more.
    assert [each["target"] for each in move["processes"]] == ["two/cpu:1", "two/cpu:0"]
    assert [each["source"] for each in move["processes"]] == before
    assert made["freed_nodes"] == ["one"]
    operation = succeeded(two, apply(two, made))
    assert operation["result"]["moved"] == 1
    assert ranks(nodes) == [each["target"] for each in move["processes"]]
    assert (len(one.transfers()), len(two.transfers())) == (1, 1)
    assert len(two.transfers()[0]["processes"]) == RANKS
    go_on(job)
    with pytest.raises(Refused) as caught:
        apply(one, stale)
    assert caught.value.code == "plan_stale"
    assert "has ended" in str(caught.value)


def test_a_rank_within_its_node(nodes: list[TransferNode], job: Job) -> None:
    one, _ = nodes
    made = planned(nodes, one, objective="free_devices", nodes=["one"])
    (only,) = made["moves"][0]["processes"]
    transfers = len(one.transfers())
    assert succeeded(one, apply(one, made))["result"]["freed"] == [only["source"]]
    assert ranks(nodes) == [only["target"]] * RANKS
    assert len(one.transfers()) == transfers
    go_on(job)


def test_cancelled_in_the_middle(nodes: list[TransferNode], job: Job) -> None:
    """All ranks go on where they were."""
    one, two = nodes
    before = ranks(nodes)
    two.network.slow(2000)
    operation = apply(one, planned(nodes, one))

    def is_sent() -> bool:
        row = one.client.get(f"/v1/operations/{operation['id']}")
        assert row["state"] in ("pending", "running"), row["error"]
        moving = row["progress"]["parts"][0].get("phase") == "moving"
        return moving and bool(one.transfers()[0]["state"] == "copying")

    wait_until(is_sent, "it is sent", closely=True)
    one.client.delete(f"/v1/operations/{operation['id']}")
    done = ended(one, operation, 120)
    two.network.fast()
    assert (done["state"], done["error"]["code"]) == ("cancelled", "cancelled"), done["error"]
    assert "0 of 1 moves were made" in done["error"]["detail"]
    wait_until(lambda: two.transfers()[0]["state"] == "dropped", "what had arrived is dropped")
    assert ranks(nodes) == before
    go_on(job)
