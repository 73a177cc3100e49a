"""What a node does with orders of others: those of strangers, late ones, wrong ones, and one that comes twice."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.fleet.nodes import FleetNode
from tests.harness import wait_until
from tests.web.front import end_calm, start_calm
from xmigd.demo.node import Program
from xmigd.ids import new_id
from xmigd.peers.certificates import client_context, open_identity, server_name
from xmigd.transfers.wire import PREFIX, Line


@pytest.fixture
def program(nodes: list[FleetNode]) -> Iterator[Program]:
    program = start_calm(nodes[1], "ordered", device="cpu:0")
    wait_until(lambda: bool((program.info() or {}).get("live_bytes")), "a snapshot")
    yield program
    end_calm(program)


def request(nodes: list[FleetNode], body: dict[str, Any]) -> dict[str, Any]:
    """From the first to the second."""
    sender, receiver, *_ = nodes
    context = client_context(open_identity(sender.folder), open_identity(receiver.folder).certificate)
    host, _, port = receiver.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 10)
    sock.sendall(PREFIX)
    with closing(Line(context.wrap_socket(sock, server_hostname=server_name(sender.name)))) as line:
        return line.call(body)[0]


def order(program: Program, source: str, device: str, process: str | None = None, **fields: Any) -> dict[str, Any]:
    info = program.info()
    assert info is not None
    its = {"process": process or info["id"], "source": source, "device": device}
    found = {"id": new_id(), "job": info["job_id"], "node": "two", "processes": [its], "token": None}
    return {"op": "order", "order": found | fields}


def over(nodes: list[FleetNode], sent: dict[str, Any]) -> dict[str, Any]:
    """The state of an order that was taken, once it is over."""
    answer: dict[str, Any] = {}

    def holds() -> bool:
        answer.update(request(nodes, {"op": "order-state", "id": sent["order"]["id"]}))
        return answer["state"] not in ("pending", "running")

    wait_until(holds, "the order is carried out")
    return answer


def test_orders(nodes: list[FleetNode], program: Program) -> None:
    friend, victim, _ = nodes
    refused = request([victim, friend], order(program, "cpu:0", "cpu:1"))
    assert refused["problem"]["code"] == "peer_not_allowed"
    first = order(program, "cpu:0", "cpu:1", token=7)
    assert request(nodes, first)["state"] in ("pending", "running", "succeeded")
    assert over(nodes, first)["state"] == "succeeded"
    assert (program.info() or {})["device"] == "cpu:1"
    # It comes again, and changes nothing.
    assert request(nodes, first)["state"] == "succeeded"
    late = request(nodes, order(program, "cpu:1", "cpu:0", token=6))
    assert late["problem"]["code"] == "order_superseded"
    victim.stop()
    victim.start()
    wait_until(lambda: (program.info() or {}).get("state") == "running", "its process is there again")
    victim.until("one", "connected")
    late = request(nodes, order(program, "cpu:1", "cpu:0", token=6))
    assert late["problem"]["code"] == "order_superseded"
    assert request(nodes, first)["state"] == "succeeded"
    stale = request(nodes, order(program, "cpu:0", "cpu:1", token=8))
    assert stale["problem"]["code"] == "plan_stale"
    gone = request(nodes, order(program, "cpu:1", "cpu:0", process="nobody"))
    assert gone["problem"]["code"] == "plan_stale"
    assert (program.info() or {})["device"] == "cpu:1"
    second = order(program, "cpu:1", "cpu:0", token=9)
    request(nodes, second)
    assert over(nodes, second)["state"] == "succeeded"


ONE = {"process": "p", "source": "cpu:0", "device": "cpu:1"}
NONE: list[dict[str, Any]] = [
    {"id": "x"}, {"node": "A b"}, {"token": -1}, {"token": "7"}, {"token": True}, {"more": 1}, {"processes": []},
    {"processes": None}, {"processes": [ONE] * 65}, {"processes": [ONE | {"device": "cpu"}]},
    {"processes": [ONE | {"more": 1}]},
]  # fmt: skip


def test_orders_that_are_none(nodes: list[FleetNode], program: Program) -> None:
    for change in NONE:
        sent = order(program, "cpu:0", "cpu:1")
        answer = request(nodes, sent | {"order": sent["order"] | change})
        assert answer["problem"]["code"] == "protocol", change
    others: tuple[Any, ...] = (None, [], "x")
    for other in others:
        assert request(nodes, {"op": "order", "order": other})["problem"]["code"] == "protocol"
    assert (program.info() or {})["device"] == "cpu:0"


def test_processes_that_are_others(nodes: list[FleetNode], program: Program) -> None:
    """An order to another node names all processes of the job, each once; one within the node a single one."""
    sent = order(program, "cpu:0", "cpu:1")["order"]
    its = sent["processes"]
    for processes, node, code in (
        (its * 2, "two", "order_refused"), (its * 2, "three", "plan_stale"),
        ([*its, its[0] | {"process": "nobody"}], "three", "plan_stale"),
    ):  # fmt: skip
        body = sent | {"id": new_id(), "processes": processes, "node": node}
        assert request(nodes, {"op": "order", "order": body})["problem"]["code"] == code
    assert (program.info() or {})["device"] == "cpu:0"


def test_an_operation_of_somebody_else(nodes: list[FleetNode], program: Program) -> None:
    _, victim, _ = nodes
    info = program.info()
    assert info is not None
    move = victim.client.post("/v1/migrations", {"process": info["id"], "target": "cpu:1"})
    for op in ("order-state", "order-cancel"):
        assert request(nodes, {"op": op, "id": move["id"]})["problem"]["detail"].startswith("there is no order")
    taken = request(nodes, order(program, "cpu:0", "cpu:1", id=move["id"]))
    assert taken["problem"]["code"] == "order_refused"
