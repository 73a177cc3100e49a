"""What servers say is checked; hostile ones lose their own job only."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmigd.errors import ProtocolError
from xmigd.ipc import messages as m
from xmigd.process.events import Assign, Careful, Deliver, Injection

from .node import ROOT, Node, Program, alive, until

GOOD: list[dict[str, Any]] = [
    {"type": "hello", "pid": 1, "device": "cpu:0", "warm_ms": 1.5, "device_bytes": 1},
    {"type": "unavailable", "error": 46, "text": "x"},
    {"type": "ready", "generation": 1, "t": 5},
    {"type": "memory", "op": "add", "id": 1, "kind": "shadow", "ordinal": 0, "address": 2, "bytes": 3, "name": ""},
    {"type": "memory", "op": "drop", "id": 1},
    {"type": "snapshot", "number": 1, "position": 2, "sequence": 3, "ms": 1, "chunks": 4, "copied_bytes": 5,
     "live_bytes": 6, "journal_bytes": 7, "objects": 8, "reason": "budget"},
    {"type": "fault", "sequence": 0, "op": "", "error": 700, "text": "x", "t": 1, "after": 3, "until": 9},
    {"type": "phase", "name": "mapped", "t": 1},
    {"type": "phase", "name": "replayed", "t": 1, "records": 2, "compared": 1, "differing": 0,
     "first_difference": None},
    {"type": "program_error", "sequence": 1, "error": 700},
    {"type": "injected", "id": 1},
    {"type": "garbage", "position": 1, "text": "x"},
    {"type": "announce", "job": "0" * 32, "pid": 1, "device": "cpu:0", "client_pid": 1, "generation": 1},
    {"type": "announced"},
    {"type": "paused", "position": 1, "t": 1},
    {"type": "continued", "position": 1, "t": 1},
    {"type": "log", "level": "info", "text": "x"},
    {"type": "bye", "reason": "x"},
    {"type": "round", "number": 1, "snapshot": 2, "total_bytes": 3, "copied_bytes": 2, "settled_bytes": 2,
     "differing_bytes": 1, "ms": 1.5, "loading_ms": 0.5},
    {"type": "round_progress", "number": 1, "copied_bytes": 2},
    {"type": "move_failed", "code": "no_peer", "text": "x"},
    {"type": "handed_over", "snapshot": 2, "position": 1, "t": 3, "drained_t": 2, "snapshot_ms": 1.5},
    {"type": "handover_failed", "text": "x"},
    {"type": "suspend_progress", "done_bytes": 1, "total_bytes": 2},
    {"type": "prepared", "ms": 1.5},
    {"type": "preloaded", "modules": 3, "kernels": 40, "device_bytes": 5},
    {"type": "suspended", "snapshot": 1, "position": 2, "bytes": 3, "t": 4, "ms": 1.5},
    {"type": "suspend_failed", "text": "x"},
    {"type": "resume_failed", "code": "no_room", "text": "x"},
]  # fmt: skip


@pytest.mark.parametrize("message", GOOD, ids=lambda message: message["type"])
def test_every_message_of_the_protocol(message: dict[str, Any]) -> None:
    parsed = m.parse(json.dumps(message).encode())
    assert parsed.type == message["type"]
    for name in [name for name in message if name not in ("type", "name", "records", "compared", "differing",
                                                          "first_difference")]:  # fmt: skip
        for broken in ({k: v for k, v in message.items() if k != name}, message | {name: []}, message | {name: -1}):
            with pytest.raises(ProtocolError):
                m.parse(json.dumps(broken).encode())
    with pytest.raises(ProtocolError):
        m.parse(json.dumps(message | {"more": 1}).encode())


def test_the_protocol_document_names_every_message() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    for message in GOOD:
        assert f"`{message['type']}`" in text
        for name in message:
            assert name == "type" or f"`{name}`" in text, (message["type"], name)


def test_numbers_fit_the_database() -> None:
    with pytest.raises(ProtocolError):
        m.parse(b'{"type":"injected","id":9223372036854775808}')
    with pytest.raises(ProtocolError):
        m.parse(b'{"type":"hello","pid":1,"device":"","warm_ms":NaN}')


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.parse(data)


@given(st.sampled_from(GOOD), st.data())
def test_any_field(message: dict[str, Any], data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(message)))
    with contextlib.suppress(ProtocolError):
        m.parse(json.dumps(message | {name: data.draw(values)}).encode())


def test_assign_is_what_the_server_reads() -> None:
    assign = Assign(1, "recover", Deliver(5, 700), Careful(3, 9), (Injection(1, "copy", "hang", 7, 0),))
    packed = json.loads(
        m.pack_assign(assign, job="j", client_pid=9, stall_bound=0.3, snapshot_cost=0.01, hang_timeout=2.5)
    )
    assert packed == {
        "type": "assign", "job": "j", "mode": "recover", "client_pid": 9, "snapshot_cost": 0.01, "stall_bound": 0.3,
        "hang_timeout": 2.5,
        "deliver": {"sequence": 5, "error": 700}, "careful": {"after": 3, "until": 9},
        "injections": [{"id": 1, "point": "copy", "kind": "hang", "sequence": 7, "error": 0}],
    }  # fmt: skip
    flip = Assign(1, "recover", injections=(Injection(1, "record", "flip", 7, 0, 0x2000),))
    differing = m.Differing(4, {0x1000: 77, 0x2000: 1 << 63})
    packed = json.loads(
        m.pack_assign(flip, job="j", client_pid=9, stall_bound=0.3, snapshot_cost=0.01, differing=differing)
    )
    assert packed["injections"][0]["address"] == 0x2000
    assert packed["differing"] == {"snapshot": 4, "chunks": [[0x1000, 77], [0x2000, 1 << 63]]}
    fresh = m.pack_assign(
        Assign(1, "fresh"), job="j", client_pid=9, stall_bound=1, snapshot_cost=1, differing=differing
    )
    assert "differing" not in json.loads(fresh), "of a recovery only"
    lost = json.loads(
        m.pack_assign(
            Assign(1, "lost", error=46, text="x" * 5000), job="j", client_pid=9, stall_bound=0.2, snapshot_cost=1
        )
    )
    assert (lost["error"], len(lost["text"])) == (46, 1000)


def announce(node: Node, fds: int = 5, **changes: Any) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(str(node.runtime_dir / "control.sock"))
    message = {"type": "announce", "job": "a" * 32, "pid": os.getpid(), "device": "cpu:0", "client_pid": os.getpid(),
               "generation": 1} | changes  # fmt: skip
    socket.send_fds(sock, [json.dumps(message).encode()], [0] * fds)
    return sock


def test_false_announcements(node: Node) -> None:
    with Program(node) as program:
        assert program.welcome()[0] == 0
        process = node.wait_for_standby()
        before = node.descriptors()
        for wrong in (
            {"job": process["id"]}, {"pid": 1}, {"client_pid": 0}, {"job": "x"}, {"job": "../" * 10}, {"fds": 4},
            {"fds": 0}, {"client_pid": 1 << 30},
        ):  # fmt: skip
            with announce(node, **wrong) as sock, contextlib.suppress(ConnectionResetError):
                assert sock.recv(1000) == b""
        assert alive(process["server_pid"])
        assert node.wait_for_standby()["server_pid"] == process["server_pid"]
        node.wait_until_closed(before)


def test_a_server_that_talks_nonsense_is_replaced(node: Node) -> None:
    """Its standby gets the job; the daemon and other jobs do not notice."""

    def state_of(program: Program) -> dict[str, Any]:
        return next(p for p in node.processes(live=True) if p["pid"] == program.pid)

    def faults_of(program: Program) -> int:
        return int(state_of(program)["faults"])

    def more_faults(program: Program, count: int) -> bool:
        return faults_of(program) >= count

    with Program(node) as other, Program(node) as program:
        assert other.welcome()[0] == 0
        assert program.welcome()[0] == 0
        for kinds in (["garbage"], ["fault"]):
            until(lambda: all(p["standby"] == "warm" for p in node.processes(live=True)), "standbys")
            count = faults_of(program)
            node.behave(go=kinds)
            os.kill(state_of(program)["server_pid"], 9)
            until(functools.partial(more_faults, program, count + 2), "a fault in the replay")
            until(lambda: state_of(program)["state"] == "running", "recovered")
        assert node.get("/v1/recoveries", process=state_of(program)["id"])[0]["outcome"] == "resumed"
        assert faults_of(other) == 0
