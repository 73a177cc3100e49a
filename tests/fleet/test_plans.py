"""Plans over two nodes, applied by real transfers: under leases in a real etcd, with a second controller, an etcd that
is killed, stands still, or lets a lease go in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_client_dump import criu_or_skip
from tests.fleet.etcd import EtcdServer, etcd_or_skip, key
from tests.harness import wait_until
from tests.migration.moves import ended
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, wait_for_lines
from xmigd.client import Refused
from xmigd.demo import nodes as demo_nodes
from xmigd.demo.namespaces import NetworkNode
from xmigd.demo.node import Program

pytestmark = [pytest.mark.criu, needs_networks]
PLAN = {"objective": "free_nodes", "assumed_busy_share": 0.0, "max_slow_down": 50.0}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer(etcd_or_skip()) as server:
        yield server


@pytest.fixture(scope="module")
def nodes(native_dir: Path, etcd: EtcdServer) -> Iterator[list[TransferNode]]:
    class Node(TransferNode):
        def __init__(self, folder: Path, name: str, network: NetworkNode, place: Path) -> None:
            if name == "one":
                etcd.start(network)
            super().__init__(
                folder, name, network, place, failpoint=place / "point", device_memory=1 << 28,
                criu=criu_or_skip(), native_dir=native_dir,
                fleet_readers="*", fleet_controllers="*", lease_seconds=3, etcd_endpoints=etcd.url,
            )  # fmt: skip

    with demo_nodes.pair(Node) as both:
        etcd.answers()
        yield list(both)


@pytest.fixture(scope="module")
def programs(
    nodes: list[TransferNode], native_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Path]]:  # fmt: skip
    """One that stays, on the second node, and one that moves. Their outputs."""
    folder, outputs = tmp_path_factory.mktemp("programs"), []
    for node, name in ((nodes[1], "stays"), (nodes[0], "moves")):
        output = folder / name
        program: Program = node.start_program(native_dir, output, 0.02, steps=1_000_000)
        wait_for_lines(output, 3)
        program.until("running")
        outputs.append(output)
    yield outputs
    for output in outputs:
        output.with_suffix(".stop").touch()
    wait_until(lambda: not any(node.lives() for node in nodes), "the programs have ended")
    for output in outputs:
        steps = [int(line.split()[0]) for line in output.read_text().splitlines()]
        assert steps == list(range(len(steps)))  # no step twice and none left out: one copy ran


def place(nodes: list[TransferNode]) -> list[str]:
    """On which nodes the program lives that moves."""
    return [node.name for node in nodes for each in node.lives() if each["job_name"] == "moves"]


def plan(nodes: list[TransferNode], controller: TransferNode) -> dict[str, Any]:
    """One that moves the program, and nothing else."""
    stay = [each["job_id"] for node in nodes for each in node.lives() if each["job_name"] == "stays"]
    found: dict[str, Any] = {}

    def made() -> bool:
        found.update(controller.client.post("/v1/fleet/plans", PLAN | {"exclude_jobs": stay}))
        return [move["job_name"] for move in found["moves"]] == ["moves"]

    wait_until(made, f"a plan moves it: {found}")
    return found


def apply(node: TransferNode, plan: dict[str, Any]) -> dict[str, Any]:
    return node.client.start(f"/v1/fleet/plans/{plan['id']}/apply")


def back(nodes: list[TransferNode]) -> None:
    """The program is on the first node again."""
    two = nodes[1]
    job = next(each["job_id"] for each in two.lives() if each["job_name"] == "moves")
    two.ctl("migrate", job, "--to", "one")
    assert place(nodes) == ["one"]


def is_sent(source: TransferNode, operation: dict[str, Any]) -> str:
    """Wait until a transfer of this operation sends content: the transfer."""

    def holds() -> bool:
        row = source.client.get(f"/v1/operations/{operation['id']}")
        assert row["state"] in ("pending", "running"), row["error"]
        sending = source.client.get("/v1/operations", kind="transfer", state="running")
        return bool(sending) and sending[0]["phase"] == "sending"

    wait_until(holds, "it is being sent", closely=True)
    return str(source.transfers()[0]["id"])


def test_a_plan_is_applied(nodes: list[TransferNode], programs: list[Path], etcd: EtcdServer) -> None:
    """Also by the controller of the other node, with the command line."""
    one, two = nodes
    stale = plan(nodes, two)
    made = plan(nodes, one)
    assert (made["freed_nodes"], made["moves"][0]["expected_standstill_ms"]) == (["one"], None)
    operation = ended(one, apply(one, made), 120)
    assert operation["state"] == "succeeded", operation["error"]
    assert (operation["result"]["moved"], place(nodes)) == (1, ["two"])
    with pytest.raises(Refused) as caught:
        apply(two, stale)
    assert caught.value.code == "plan_stale"
    assert "has ended" in str(caught.value)
    assert etcd.leases() == []
    back(nodes)
    assert etcd.leases() == []
    assert plan(nodes, one)["moves"][0]["expected_standstill_ms"] > 0
    made = plan(nodes, two)
    assert "1 moved" in two.ctl("fleet", "apply", made["id"][:12], "--yes")
    assert place(nodes) == ["two"]
    back(nodes)


def test_two_controllers(nodes: list[TransferNode], programs: list[Path], etcd: EtcdServer) -> None:
    """One of both moves it. While somebody else has the job's lease, nobody here does."""
    plans = [plan(nodes, node) for node in nodes]

    def both(which: int) -> dict[str, Any]:
        try:
            return ended(nodes[which], apply(nodes[which], plans[which]), 120)
        except Refused as error:
            return {"state": "failed", "error": {"code": error.code}}

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(both, range(2)))
    assert sorted(each["state"] for each in done) == ["failed", "succeeded"], done
    failed = next(each["error"]["code"] for each in done if each["state"] == "failed")
    assert failed in ("lease_taken", "plan_stale", "fleet_stopped", "operation_under_way"), done
    assert place(nodes) == ["two"]
    back(nodes)
    made = plan(nodes, nodes[0])
    job = made["moves"][0]["job_id"]
    lease = {"key": key(f"/xmig/jobs/one/{job}"), "value": key('{"node": "three"}')}
    etcd.call("kv/put", lease)
    operation = ended(nodes[0], apply(nodes[0], made), 120)
    assert (operation["state"], operation["error"]["code"]) == ("failed", "lease_taken")
    assert "three has the lease" in operation["error"]["detail"]
    with pytest.raises(Refused) as caught:
        nodes[0].move(job, "two")
    assert caught.value.code == "lease_taken"
    assert place(nodes) == ["one"]
    etcd.call("kv/deleterange", {"key": lease["key"]})


@pytest.mark.parametrize("what", ["killed", "paused", "expired", "cancelled"])
def test_stopped_in_the_middle(
    nodes: list[TransferNode], programs: list[Path], etcd: EtcdServer, what: str
) -> None:  # fmt: skip
    """etcd is gone, stands still, or the lease is lost while content is sent: the program stays where it is."""
    one, two = nodes
    wait_until(lambda: etcd.leases() == [], "the lease of an earlier case has expired")
    made = plan(nodes, one)
    two.network.slow(2000)  # of what comes to it, beside which nothing of etcd's passes
    operation = apply(one, made)
    transfer = is_sent(one, operation)
    if what == "killed":
        etcd.kill()
    elif what == "paused":
        etcd.pause()
    elif what == "expired":
        etcd.call("lease/revoke", {"ID": etcd.leases()[0]["lease"]})
    else:
        one.client.delete(f"/v1/operations/{operation['id']}")
    done = ended(one, operation, 120)
    two.network.fast()
    if what == "killed":
        etcd.starts_again()
    elif what == "paused":
        etcd.goes_on()
        etcd.answers()
    assert (done["state"], done["error"]["code"]) == (
        ("cancelled", "cancelled") if what == "cancelled" else ("failed", "lease_lost")
    ), done["error"]
    assert one.client.get(f"/v1/transfers/{transfer}")["state"] == "failed"
    assert place(nodes) == ["one"]
    lines = len(programs[1].read_text().splitlines())
    wait_for_lines(programs[1], lines + 2)


def test_the_node_that_moves_looks_itself(
    nodes: list[TransferNode], programs: list[Path], etcd: EtcdServer
) -> None:  # fmt: skip
    """Whoever has begun the move does not notice that the lease is lost: right before the point of no return it is."""
    one, two = nodes
    wait_until(lambda: etcd.leases() == [], "the lease of an earlier case is given back")
    job = next(each["job_id"] for each in one.lives() if each["job_name"] == "moves")
    two.network.slow(4000)
    operation = one.move(job, "two")
    is_sent(one, operation)
    etcd.call("lease/revoke", {"ID": etcd.leases()[0]["lease"]})
    two.network.fast()
    done = ended(one, operation, 120)
    assert (done["state"], done["error"]["code"]) == ("failed", "lease_lost")
    assert done["error"]["process_location"] == "source"
    wait_until(lambda: place(nodes) == ["one"], "what had arrived is dropped")


def test_the_daemon_of_the_source_dies(
    nodes: list[TransferNode], programs: list[Path], etcd: EtcdServer
) -> None:  # fmt: skip
    """Right after its decision. The controller waits for it, and hears that the program has moved."""
    one, two = nodes
    wait_until(lambda: etcd.leases() == [], "the lease of an earlier case is given back")
    one.dies_at("write.committed transfers.committed")
    operation = apply(two, plan(nodes, two))
    wait_until(one.has_died, "it has decided")
    one.starts_again()
    done = ended(two, operation, 120)
    assert done["state"] == "succeeded", done["error"]
    wait_until(lambda: place(nodes) == ["two"], "it lives once")
