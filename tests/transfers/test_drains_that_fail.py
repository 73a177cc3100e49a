"""A node is drained to another one, which dies or is too slow. The job is lost on neither, and runs on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.drains import drain, program, takes_programs
from tests.transfers.nodes import TransferNode, pair

pytestmark = [pytest.mark.criu, needs_networks]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


def test_the_other_node_dies(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """When the move is decided, and the drain is cancelled then. Nothing else is done with the job."""
    one, two = nodes
    with program(nodes, native_dir, tmp_path) as (_, storm, output):
        two.dies_at("write.begun transfers.going")
        operation = drain(one, nodes=["two"], otherwise="suspend")
        wait_until(two.has_died, "the other node dies")
        one.client.delete(f"/v1/operations/{operation['id']}")
        failed = ended(one, operation)
        assert (failed["state"], failed["error"]["code"]) == ("failed", "drain_incomplete")
        (part,) = failed["progress"]["parts"]
        assert (part["how"], part["state"], part["target"].partition("/")[0]) == ("transfer", "undecided", "two")
        assert one.transfers()[0]["state"] == "committed"
        before = output.read_text()
        two.starts_again()
        storm.settle()
        assert storm.where() == 1
        assert output.read_text().startswith(before)


def test_the_time_is_up(native_dir: Path, tmp_path: Path) -> None:
    """While it is sent over a slow link: the move is cancelled, and what is left of the time is for the suspension. The
    other node has no piece of it yet, and all of them would take two minutes."""
    with pair(native_dir) as nodes, program(nodes, native_dir, tmp_path) as (started, _, __):
        one, two = nodes
        two.network.slow(200)
        (part,) = succeeded(one, drain(one, nodes=["two"], otherwise="either", within_seconds=30))["result"]["parts"]
        two.network.fast()
        assert part["how"] == "host"
        assert [(each["how"], "the time was up" in each["why"]) for each in part["tried"]][-1] == ("transfer", True)
        takes_programs(one)
        succeeded(one, one.client.post(f"/v1/jobs/{started.job}:resume", {}))


def test_without_a_lease(native_dir: Path, tmp_path: Path) -> None:
    """Nothing moves to another node, and no move begins: the job is suspended."""
    with (
        pair(native_dir, etcd_endpoints="http://127.0.0.1:9") as nodes,
        program(nodes, native_dir, tmp_path) as (started, _, __),
    ):
        one = nodes[0]
        (part,) = succeeded(one, drain(one, nodes=["two"], otherwise="suspend"))["result"]["parts"]
        assert part["how"] == "host"
        assert "etcd" in part["tried"][-1]["why"]
        assert one.transfers() == []
        takes_programs(one)
        succeeded(one, one.client.post(f"/v1/jobs/{started.job}:resume", {}))
