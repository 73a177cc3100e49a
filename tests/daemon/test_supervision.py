"""A real daemon and real processes; the servers are peers that speak the control protocol and do no work."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from typing import Any

import pytest

from tests import harness

from .conftest import MakeNode
from .node import Node, NotAnswered, Program, alive, until


def started(node: Node, program: Program) -> dict[str, Any]:
    status, fds, _, message = program.welcome()
    assert (status, fds) == (0, 3), message
    return node.wait_for_standby()


def wait_for_recoveries(node: Node, count: int) -> list[dict[str, Any]]:
    """The recoveries, newest first, once so many programs have been resumed."""

    def resumed() -> list[dict[str, Any]] | None:
        found = [recovery for recovery in node.get("/v1/recoveries") if recovery["outcome"] == "resumed"]
        return found if len(found) >= count else None

    return until(resumed, f"{count} recoveries")


def test_a_program_gets_a_server_and_a_standby_and_leaves_nothing(node: Node) -> None:
    before = node.descriptors()
    with Program(node) as program:
        process = started(node, program)
        assert process["pid"] == program.pid
        assert process["held_bytes"] == 4 * (2 << 20)
        assert len(node.servers()) == 2
    until(lambda: not node.servers(), "servers end with their program")
    assert until(lambda: [p for p in node.processes() if p["state"] == "ended"], "the process ended")
    node.wait_until_closed(before)


def test_a_killed_server_is_replaced_by_its_standby(node: Node) -> None:
    with Program(node) as program:
        took = []
        for round_ in range(3):
            process = started(node, program) if round_ == 0 else node.wait_for_standby()
            (standby,) = set(node.servers()) - {process["server_pid"]}
            os.kill(process["server_pid"], signal.SIGKILL)
            took.append(wait_for_recoveries(node, round_ + 1)[0]["resumed_ms"])
            assert node.processes(live=True)[0]["server_pid"] == standby
        recoveries = node.get("/v1/recoveries")
        assert [r["number"] for r in recoveries] == [3, 2, 1]
        for recovery in recoveries:
            assert recovery["standby"] == "warm"
            assert recovery["exact"] is True
            phases = [recovery[f"{name}_ms"] for name in
                      ("detected", "standby_ready", "mapped", "restored", "replayed", "resumed")]  # fmt: skip
            assert phases == sorted(phases)
        assert min(took) < 500  # nothing is waited for; this machine stands still now and then, but not each time
        faults = node.get("/v1/faults")
        assert [f["text"] for f in faults] == ["the server was lost: killed by SIGKILL"] * 3


def test_a_server_whose_exit_takes_long(node: Node) -> None:
    """Its connection is closed long before its pidfd says anything, as with a GPU to give back."""
    with Program(node) as program:
        process = started(node, program)
        node.behave(inject="linger")
        with node.http() as http:
            http.post(f"/v1/jobs/{process['job_id']}/faults:inject", json={"kind": "kill"})
        recovery = wait_for_recoveries(node, 1)[0]
        assert recovery["attempts"] == 1
        (fault,) = node.get("/v1/faults")
        assert (fault["kind"], fault["text"]) == ("server", "the server was lost: killed by SIGKILL")


def test_a_server_that_closes_its_connection_and_lives(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(inject="close")
        with node.http() as http:
            http.post(f"/v1/jobs/{process['job_id']}/faults:inject", json={"kind": "kill"})
        wait_for_recoveries(node, 1)
        assert [fault["kind"] for fault in node.get("/v1/faults")] == ["protocol"]


def test_server_and_standby_killed_together(node: Node) -> None:
    with Program(node) as program:
        started(node, program)
        for pid in node.servers():
            os.kill(pid, signal.SIGKILL)
        node.wait_for_standby()
        recovery = wait_for_recoveries(node, 1)[0]
        assert recovery["outcome"] == "resumed"


def test_a_repeated_fault_is_delivered(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(go=["fault", "fault"])
        os.kill(process["server_pid"], signal.SIGKILL)
        recovery = wait_for_recoveries(node, 1)[0]
        assert (recovery["delivered_sequence"], recovery["delivered_error"]) == (7, 700)
        assert [f["kind"] for f in node.get("/v1/faults")] == ["program", "device", "device", "server"]


def test_a_process_without_progress_is_lost(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(go="exit")
        os.kill(process["server_pid"], signal.SIGKILL)
        until(lambda: node.get(f"/v1/processes/{process['id']}")["state"] == "lost", "lost", 60)
        # The kill came from outside and does not count; then come five that are tried again, and the last. Each is a
        # process that has to start, and the later ones follow after a pause.
        assert len([f for f in node.get("/v1/faults") if f["kind"] == "server"]) == 7
        status, _, _, message = program.reattach(process["id"])
        assert status == 46
        assert "no progress" in message
        assert alive(program.pid)
    until(lambda: not node.servers(), "servers are gone")


@pytest.mark.parametrize("how", ["exit", "garbage"])
def test_a_server_that_cannot_start_is_an_error_for_the_program(node: Node, how: str) -> None:
    node.behave(hello=how) if how == "exit" else node.behave(assign=how)
    with Program(node) as program:
        status, fds, _, message = program.welcome()
        assert (status, fds) == (802, 0)
        assert "exit code 3" in message or "schema" in message
    until(lambda: not node.servers(), "servers are gone")


def test_a_server_that_cannot_start_at_first_is_tried_again(node: Node) -> None:
    node.behave(hello=2)
    with Program(node) as program:
        started(node, program)


def test_a_device_that_cannot_be_used(node: Node) -> None:
    """The program receives what it would receive natively, and the log says why, once."""
    node.behave(hello="unavailable")
    with Program(node) as program:
        status, _, _, message = program.welcome()
        assert (status, message) == (46, "another process has the device")
    lines = [line for line in node.log.read_text().splitlines() if "another process has the device" in line]
    assert len([line for line in lines if "program refused" in line]) == 1, lines


def test_a_program_that_dies_in_its_handshake(node: Node) -> None:
    before = node.descriptors()
    node.behave(hello="hang")
    with Program(node):
        until(lambda: node.servers(), "a server is starting")
    until(lambda: not node.servers(), "it is stopped")
    node.wait_until_closed(before)


def test_a_server_that_is_lost_while_it_is_to_pause(node: Node) -> None:
    """Nothing is wrong with the daemon: the process recovers, and may be queried again."""
    with Program(node) as program, node.http() as http:
        process = started(node, program)
        node.behave(pause=["exit"])
        answer = http.post(f"/v1/processes/{process['id']}:pause")
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict"), answer.text
        assert "the server was lost: exit code 3" in answer.json()["detail"]
        wait_for_recoveries(node, 1)
        assert http.post(f"/v1/processes/{process['id']}:pause").json() == {"position": 100}


@pytest.mark.parametrize("order", ["pause, stop", "stop, pause"])
def test_a_paused_program_that_is_stopped(node: Node, order: str) -> None:
    """Its exit is its end, which that of a paused one is not otherwise."""
    before = node.descriptors()
    with Program(node) as program, node.http() as http:
        process = started(node, program)
        harness.stop(program.pid)  # SIGTERM waits
        for request in order.split(", "):
            if request == "pause":
                assert http.post(f"/v1/processes/{process['id']}:pause").json() == {"position": 100}
            else:
                assert http.delete(f"/v1/jobs/{process['job_id']}").json()["signalled"] == 1
        os.kill(program.pid, signal.SIGCONT)
        until(lambda: node.processes(live=True)[0]["state"] == "draining", "its exit is its end")
        os.kill(process["server_pid"], signal.SIGKILL)  # it would be given time to finish, and stands still
        until(lambda: not node.processes(live=True), "the process ended")
    until(lambda: not node.servers(), "its servers end")
    node.wait_until_closed(before)


def test_injected_faults_do_not_count(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        for count in range(1, 8):
            with node.http() as http:
                answer = http.post(f"/v1/jobs/{process['job_id']}/faults:inject", json={"kind": "kill"})
                assert answer.status_code == 202, answer.text
            wait_for_recoveries(node, count)
            node.wait_for_standby()
        assert all(f["kind"] == "injected" for f in node.get("/v1/faults"))


def test_the_daemon_is_killed_and_finds_its_servers_again(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        server = process["server_pid"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            node.kill(number)
            assert alive(server)
            node.start()
            again = node.wait_for_standby()
            assert (again["id"], again["server_pid"], again["held_bytes"]) == (process["id"], server, 8 << 20)
            until(lambda: len(node.servers()) == 2, "the old standby is gone")
        os.kill(server, signal.SIGKILL)
        recovery = wait_for_recoveries(node, 1)[0]
        assert recovery["number"] == 1
    until(lambda: not node.servers(), "servers end with their program")
    until(lambda: not node.processes(live=True), "the process ended")


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
def test_a_recovery_in_whose_middle_the_daemon_is_killed_has_a_record(node: Node, written: bool) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(go="kill" if written else "hold")
        os.kill(process["server_pid"], signal.SIGKILL)
        if not written:
            until(lambda: len(node.servers()) == 1, "its server has ended")
            until(lambda: node.get("/v1/recoveries"), "it is begun")
        else:
            until(lambda: node.daemon is not None and node.daemon.poll() is not None, "the daemon has ended")
        node.kill()
        if not written:
            with contextlib.closing(sqlite3.connect(node.database)) as database:
                database.execute("DELETE FROM recoveries")
                database.execute("UPDATE processes SET state = 'running', server_pid = ?", (process["server_pid"],))
                database.commit()
        node.behave()
        node.start()
        again = node.wait_for_standby()
        assert again["id"] == process["id"]
        (record,) = node.get("/v1/recoveries")
        assert (record["number"], record["outcome"], record["process_id"]) == (1, "interrupted", process["id"])
        assert (
            record["story"][-1] == "xmigd ended during this recovery: its server outlived that and has announced itself"
        )
        assert abs(record["at"] - time.time()) < 600
        os.kill(again["server_pid"], signal.SIGKILL)
        assert wait_for_recoveries(node, 1)[0]["number"] == 2


def test_daemon_and_server_are_killed(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.kill()
        os.kill(process["server_pid"], signal.SIGKILL)
        node.start()
        status, _, _, message = program.reattach(process["id"])
        assert status == 46
        assert "lost" in message
        until(lambda: node.get(f"/v1/processes/{process['id']}")["state"] == "lost", "lost")


def test_a_lost_database_costs_no_program(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.kill()
        for file in node.database.parent.iterdir():
            file.unlink()
        node.start()
        again = node.wait_for_standby()
        assert (again["id"], again["server_pid"]) == (process["id"], process["server_pid"])
        assert program.reattach(process["id"])[0] == 0


def test_stopping_a_job(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        with node.http() as http:
            assert http.delete(f"/v1/jobs/{process['job_id']}").json()["signalled"] == 1
        assert program.wait() == -signal.SIGTERM
    until(lambda: node.get(f"/v1/jobs/{process['job_id']}")["state"] == "stopped", "stopped")


def test_many_programs_at_once(make_node: MakeNode) -> None:
    node = make_node(XMIG_STANDBY="false")
    node.start()
    before = node.descriptors()
    programs = [Program(node) for _ in range(12)]
    try:
        for program in programs:
            assert program.welcome()[0] == 0
        assert {p["device"] for p in node.processes(live=True)} == {"cpu:0", "cpu:1"}
        assert {d["id"]: d["processes"] for d in node.get("/v1/devices")} == {"cpu:0": 6, "cpu:1": 6}
    finally:
        for program in programs:
            program.kill()
    until(lambda: not node.servers(), "servers end with their programs")
    node.wait_until_closed(before)


def test_no_descriptors_left(make_node: MakeNode) -> None:
    node = make_node()
    node.start("prlimit", "--nofile=44:44")
    before = node.descriptors()
    programs: list[Program] = []
    try:
        refused = ""
        while not refused:
            assert len(programs) < 12
            programs.append(Program(node))
            try:
                status, _, _, message = programs[-1].welcome()
                if status != 0:
                    refused = message
            except NotAnswered:  # there was not even one for its connection
                refused = "a connection cannot be taken"
                assert refused in node.log.read_text()
        assert refused
        assert node.get("/healthz")["status"] == "ok"
        for program in programs:
            program.kill()
        until(lambda: not node.servers(), "servers end with their programs")
        node.wait_until_closed(before)
        with Program(node) as program:
            assert program.welcome()[0] == 0
    finally:
        for program in programs:
            program.kill()
