"""Moves through a real daemon whose servers only speak the protocol: what reaches whom, and who is left at the end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import Node, Program, alive, until
from tests.daemon.test_supervision import started, wait_for_recoveries
from tests.harness import stop

OVER = ("succeeded", "failed", "cancelled")


def post(node: Node, path: str, body: dict[str, Any], expect: int = 202) -> Any:
    with node.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == expect, answer.text
        return answer.json()


def ended(node: Node, operation: dict[str, Any]) -> dict[str, Any]:
    """The operation once it is over."""

    def over() -> dict[str, Any] | None:
        found: dict[str, Any] = node.get(f"/v1/operations/{operation['id']}")
        return found if found["state"] in OVER else None

    return until(over, f"the end of {operation['kind']}")


def in_phase(node: Node, operation: dict[str, Any], phase: str) -> None:
    def reached() -> bool:
        now = node.get(f"/v1/operations/{operation['id']}")
        assert now["state"] not in OVER, now
        return bool(now["phase"] == phase)

    until(reached, f"phase {phase}", closely=True)


def move(node: Node, process: dict[str, Any], target: str = "cpu:1") -> dict[str, Any]:
    found: dict[str, Any] = post(node, "/v1/migrations", {"process": process["id"], "target": target})
    return found


def suspend(node: Node, process: dict[str, Any], to: str = "host") -> dict[str, Any]:
    return ended(node, post(node, f"/v1/processes/{process['id']}:suspend", {"to": to}))


def resume(node: Node, process: dict[str, Any], device: str | None = None) -> dict[str, Any]:
    return ended(node, post(node, f"/v1/processes/{process['id']}:resume", {"device": device}))


def now(node: Node, process: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = node.get(f"/v1/processes/{process['id']}")
    return found


def test_a_migration_is_there_as_soon_as_its_operation(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(round="hang")
        operation = move(node, process)
        (record,) = node.get("/v1/migrations")
        assert (record["operation_id"], record["state"], record["process_location"]) == (
            operation["id"], "running", "source",
        )  # fmt: skip


@pytest.mark.parametrize("external_id", ["slurm:4711", "k8s:train/digits-0/5b1f0c1e-27d5-4e4d-9a55-3a0c8e7a1d11"])
def test_a_job_leaves_its_allocation_only_by_request(node: Node, external_id: str) -> None:
    """Its scheduler may give the other device to somebody else. A drain is the word of who decides about the device."""
    with Program(node) as program:
        process = started(node, program)
        job = f"/v1/jobs/{process['job_id']}"
        with node.http() as http:
            tag = http.get(job).headers["etag"]
            assert http.patch(job, json={"external_id": external_id}, headers={"If-Match": tag}).status_code == 200
        body = {"process": process["id"]}
        problem = post(node, "/v1/migrations", body | {"target": "cpu:1"}, expect=409)
        assert problem["code"] == "scheduled"
        assert "5b1f0c1e" not in problem["detail"]  # the pod's uid says nothing to people

        def reasons(**fields: Any) -> list[str]:
            plan = post(node, "/v1/migration-plans", body | fields, expect=200)
            (target,) = (one for one in plan["targets"] if one["device"] == "cpu:1")
            return [reason["code"] for reason in target["reasons"]]

        assert (reasons(), reasons(leave_allocation=True)) == (["scheduled"], [])
        plan = post(node, "/v1/consolidation-plans", {"assumed_busy_share": 0.0}, expect=200)
        assert [refusal["code"] for refusal in plan["refusals"]] == ["scheduled"]
        operation = post(node, "/v1/migrations", body | {"target": "cpu:1", "leave_allocation": True})
        assert ended(node, operation)["state"] == "succeeded"
        assert now(node, process)["device"] == "cpu:1"
        assert ended(node, post(node, "/v1/devices/cpu:1:drain", {}))["state"] == "succeeded"
        assert now(node, process)["device"] == "cpu:0"


@pytest.mark.parametrize("of", ["processes", "jobs"])
def test_it_goes_on_in_its_allocation(node: Node, of: str) -> None:
    """One that is suspended, unless somebody wants it elsewhere all the same."""
    with Program(node) as program:
        process = started(node, program)
        whom = f"/v1/{of}/{process['id' if of == 'processes' else 'job_id']}"
        job = f"/v1/jobs/{process['job_id']}"
        with node.http() as http:
            tag = http.get(job).headers["etag"]
            assert http.patch(job, json={"external_id": "slurm:7"}, headers={"If-Match": tag}).status_code == 200
        for fields, on in (({}, "cpu:0"), ({"device": "cpu:1", "leave_allocation": True}, "cpu:1")):
            assert ended(node, post(node, f"{whom}:suspend", {"to": "host"}))["state"] == "succeeded"
            problem = post(node, f"{whom}:resume", {"device": "cpu:1"}, expect=409)
            assert (problem["code"], now(node, process)["state"]) == ("scheduled", "suspended")
            plan = post(node, "/v1/migration-plans", {"process": process["id"]}, expect=200)
            reasons = {target["device"]: [reason["code"] for reason in target["reasons"]] for target in plan["targets"]}
            assert (reasons["cpu:0"], reasons["cpu:1"]) == ([], ["scheduled"])
            assert ended(node, post(node, f"{whom}:resume", fields))["state"] == "succeeded"
            assert now(node, process)["device"] == on


def test_a_move_and_back(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        before = node.descriptors()
        for target in ("cpu:1", "cpu:0"):
            operation = ended(node, move(node, process, target))
            assert operation["state"] == "succeeded", operation
            moved = node.wait_for_standby(after=process["server_pid"])
            assert (moved["device"], moved["state"], moved["location"]) == (target, "running", "device")
            assert operation["result"]["downtime_ms"] is not None
            process = moved
        migrations = node.get("/v1/migrations")
        assert [(m["source"], m["target"], m["state"]) for m in migrations] == [
            ("cpu:1", "cpu:0", "done"), ("cpu:0", "cpu:1", "done"),
        ]  # fmt: skip
        first = migrations[-1]
        assert [phase["name"] for phase in first["phases"]] == [
            "preparing", "copying", "committing", "handing_over", "taking", "mapped", "restored", "replayed", "resumed",
            "over",
        ]  # fmt: skip
        assert first["iterations"][0]["copied_bytes"] == 2 << 20
        assert (first["process_location"], first["operation_id"] is not None) == ("target", True)
        assert first["expected_downtime_ms"] is not None
        assert "last round" in first["expected_downtime_basis"]
        plan = post(node, "/v1/migration-plans", {"process": process["id"]}, 200)
        targets = {target["device"]: target for target in plan["targets"]}
        assert "earlier move" in targets["cpu:1"]["expected_downtime_basis"]
        assert (targets["cpu:1"]["expected_downtime_ms"] > 0, targets["cpu:0"]["expected_downtime_ms"]) == (True, None)
        until(lambda: len(node.servers()) == 2, "sources are gone")
        node.wait_until_closed(before)
        # It can be recovered there: the target's memory is what the next server gets.
        os.kill(process["server_pid"], signal.SIGKILL)
        wait_for_recoveries(node, 1)
    until(lambda: not node.servers(), "servers end with their program")


@pytest.mark.parametrize(
    ("point", "what", "code"),
    [
        ("round", "exit", "target_lost"), ("round", "refuse", "no_room"), ("round", "garbage", "target_lost"),
        ("handover", "refuse", "source_refused"), ("take", "exit", "target_lost"), ("take", "fault", "target_fault"),
    ],
)  # fmt: skip
def test_a_target_that_fails_leaves_the_program_where_it_was(node: Node, point: str, what: str, code: str) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(**{point: what})
        operation = ended(node, move(node, process))
        assert (operation["state"], operation["error"]["code"]) == ("failed", code), operation
        assert operation["error"]["process_location"] == "source"
        after = now(node, process)
        assert (after["device"], after["state"], after["server_pid"]) == ("cpu:0", "running", process["server_pid"])
        node.behave()
        assert ended(node, move(node, process))["state"] == "succeeded"
        assert not node.get("/v1/recoveries")


def test_a_target_out_of_reach_is_reached_through_the_host(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(foreign="no_peer")
        operation = ended(node, move(node, process))
        assert (operation["state"], operation["result"]["path"]) == ("succeeded", "host"), operation
        (migration,) = node.get("/v1/migrations")
        names = [phase["name"] for phase in migration["phases"]]
        assert names[:5] == ["preparing", "copying", "preparing", "copying", "committing"]
        assert (migration["path"], migration["state"]) == ("host", "done")
        until(lambda: len(node.servers()) == 2, "one server and its standby")
        # What the source kept on its device is not needed: a recovery here works without.
        os.kill(now(node, process)["server_pid"], signal.SIGKILL)
        wait_for_recoveries(node, 1)


@pytest.mark.parametrize(("behaviour", "text"), [
    ({"foreign": "no_peer", "host": "refuse"}, "nor can it go through the host"),
    ({"foreign": "no_peer", "round": "no_peer"}, "no way to it"),
])  # fmt: skip
def test_no_way_through_the_host_either(node: Node, behaviour: dict[str, str], text: str) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(**behaviour)
        operation = ended(node, move(node, process))
        assert (operation["error"]["code"], operation["error"]["process_location"]) == ("no_peer", "source")
        assert text in operation["error"]["detail"]
        after = now(node, process)
        assert (after["device"], after["state"], after["server_pid"]) == ("cpu:0", "running", process["server_pid"])
        until(lambda: now(node, process)["shadow_bytes"], "its shadow is on its device again")
        node.behave()
        operation = ended(node, move(node, process))
        assert operation["result"]["path"] == "peer"


@pytest.mark.parametrize("point", ["handover", "handed_over"])
def test_the_source_dies(node: Node, point: str) -> None:
    """Before it has handed over: recovered where it was. After that: the target has everything."""
    with Program(node) as program:
        process = started(node, program)
        node.behave(**{point: "exit"})
        operation = ended(node, move(node, process))
        if point == "handover":
            assert operation["error"]["code"] == "source_lost"
            wait_for_recoveries(node, 1)
            assert now(node, process)["device"] == "cpu:0"
        else:
            assert operation["state"] == "succeeded"
            assert now(node, process)["device"] == "cpu:1"
            assert not node.get("/v1/recoveries")


@pytest.mark.parametrize("point", ["round", "handover", "take"])
def test_cancelling(node: Node, point: str) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(**{point: "hang"})
        operation = move(node, process)
        in_phase(node, operation, {"round": "copying", "handover": "handing_over", "take": "taking"}[point])
        with node.http() as http:
            assert http.delete(f"/v1/operations/{operation['id']}").status_code == 202
        if point == "handover":  # the source hangs: nobody knows whether it has stopped, until it is gone
            in_phase(node, operation, "rolling_back")
            os.kill(process["server_pid"], signal.SIGKILL)
        after = ended(node, operation)
        assert (after["state"], after["error"]["process_location"]) == ("cancelled", "source")
        until(lambda: now(node, process)["state"] == "running", "it runs")
        assert now(node, process)["device"] == "cpu:0"


def test_a_cancelled_move_does_not_wait_for_a_stopped_source_for_ever(make_node: MakeNode) -> None:
    """Nobody knows whether it has handed over: it is killed when its time is up, and recovered where it was."""
    node = make_node(XMIG_RECOVERY_TIMEOUT="8")
    node.start()
    with Program(node) as program:
        process = started(node, program)
        node.behave(handover="hang")
        operation = move(node, process)
        in_phase(node, operation, "handing_over")
        stop(process["server_pid"])
        with node.http() as http:
            assert http.delete(f"/v1/operations/{operation['id']}").status_code == 202
        after = ended(node, operation)
        assert (after["state"], after["error"]["process_location"]) == ("cancelled", "source")
        until(lambda: now(node, process)["state"] == "running", "it is recovered")
        assert now(node, process)["device"] == "cpu:0"
        assert not alive(process["server_pid"])


@pytest.mark.parametrize("to", ["host", "file"])
def test_suspend_and_resume(node: Node, to: str) -> None:
    with Program(node) as program:
        process = started(node, program)
        operation = suspend(node, process, to)
        assert operation["state"] == "succeeded", operation
        asleep = now(node, process)
        assert (asleep["state"], asleep["location"], asleep["suspended"]) == ("suspended", to, True)
        assert asleep["held_bytes"] == 2 * (2 << 20)
        until(lambda: len(node.servers()) == 1, "only the holder is left")
        folder = node.database.parent / "suspended" / process["id"]
        assert folder.exists() == (to == "file")
        refused = post(node, "/v1/migrations", {"process": process["id"], "target": "cpu:1"}, 409)
        assert (refused["code"], refused["process_location"]) == ("suspended", to)
        assert refused["hint"].startswith("xmigctl resume ")
        operation = resume(node, process, "cpu:1")
        assert operation["state"] == "succeeded", operation
        awake = node.wait_for_standby()
        assert (awake["device"], awake["location"], awake["suspended"]) == ("cpu:1", "device", False)
        until(lambda: len(node.servers()) == 2, "the holder is gone")
        assert [m["kind"] for m in node.get("/v1/migrations")] == ["resume", "suspend"]
    until(lambda: not node.servers(), "servers end with their program")
    until(lambda: not folder.exists(), "files are removed")


@pytest.mark.parametrize("point", ["prepare", "suspend"])
def test_a_suspension_that_fails(node: Node, point: str) -> None:
    with Program(node) as program:
        process = started(node, program)
        node.behave(**{point: "refuse"})
        operation = suspend(node, process, "file")
        assert (operation["error"]["code"], operation["error"]["process_location"]) == ("source_refused", "source")
        assert (now(node, process)["state"], now(node, process)["location"]) == ("running", "device")
        assert not (node.database.parent / "suspended" / process["id"]).exists()


def test_a_resumption_without_room_leaves_it_suspended(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        suspend(node, process)
        node.behave(take="refuse")
        operation = resume(node, process)
        assert (operation["error"]["code"], operation["error"]["process_location"]) == ("no_room", "host")
        assert now(node, process)["state"] == "suspended"
        node.behave()
        assert resume(node, process)["state"] == "succeeded"


def test_a_suspended_process_survives_the_daemon(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        suspend(node, process)
        for number in (signal.SIGKILL, signal.SIGTERM):
            node.kill(number)
            node.start()
            until(lambda: now(node, process)["held_bytes"], "it is found")
            assert now(node, process)["state"] == "suspended"
        assert resume(node, process, "cpu:1")["state"] == "succeeded"
        assert node.wait_for_standby()["device"] == "cpu:1"
    until(lambda: not node.servers(), "servers end with their program")


def test_a_holder_that_is_killed_is_replaced(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        suspend(node, process)
        holder = now(node, process)["server_pid"]
        os.kill(holder, signal.SIGKILL)
        until(lambda: now(node, process)["server_pid"] not in (None, holder), "another holder")
        node.kill()
        node.start()
        until(lambda: now(node, process)["held_bytes"], "it is found")
        assert resume(node, process)["state"] == "succeeded"


def test_a_program_that_exits_while_it_is_suspended(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        suspend(node, process, "file")
    until(lambda: not node.servers(), "the holder is gone")
    assert until(lambda: now(node, process)["state"] == "ended", "the process ended")
    assert not (node.database.parent / "suspended" / process["id"]).exists()


@pytest.mark.parametrize("point", ["round", "handed_over", "take", "resumed"])
def test_the_daemon_dies_in_the_middle(node: Node, point: str) -> None:
    """The next one finds exactly one server with the process, and the operation has come to an end."""
    with Program(node) as program:
        process = started(node, program)
        node.behave(**{point: "kill"})
        operation = move(node, process)
        assert node.daemon is not None
        node.daemon.wait(60)
        node.start()
        after = ended(node, operation)
        moved = point in ("take", "resumed")
        assert after["state"] == ("succeeded" if moved else "failed"), after
        settled = node.wait_for_standby()
        assert settled["device"] == ("cpu:1" if moved else "cpu:0")
        assert (settled["server_pid"] == process["server_pid"]) == (not moved)
        until(lambda: len(node.servers()) == 2, "one server and its standby")
        node.behave()
        assert ended(node, move(node, process, "cpu:0" if moved else "cpu:1"))["state"] == "succeeded"
        assert alive(program.pid)


def test_a_target_that_has_the_program_need_not_wait_for_its_source(node: Node) -> None:
    """The source is in the middle of its announcement when the target comes: it is ended, and not the target."""
    with Program(node) as program:
        process = started(node, program)
        node.behave(took="kill")  # before it can say so: else the daemon might have ended the source
        operation = move(node, process)
        assert node.daemon is not None
        node.daemon.wait(60)
        node.behave(announced="source_first")
        node.start()
        assert ended(node, operation)["state"] == "succeeded"
        settled = node.wait_for_standby()
        assert settled["device"] == "cpu:1"
        assert settled["server_pid"] != process["server_pid"]
        until(lambda: not alive(process["server_pid"]), "the source is gone")


def test_the_daemon_dies_in_the_middle_of_a_suspension(node: Node) -> None:
    """The server is there and has everything: it goes on, and a holder gives way."""
    with Program(node) as program:
        process = started(node, program)
        node.behave(suspended="kill")
        operation = post(node, f"/v1/processes/{process['id']}:suspend", {"to": "host"})
        assert node.daemon is not None
        node.daemon.wait(60)
        node.start()
        assert ended(node, operation)["error"]["code"] == "interrupted"
        settled = node.wait_for_standby()
        assert (settled["server_pid"], settled["location"]) == (process["server_pid"], "device")
        until(lambda: len(node.servers()) == 2, "one server and its standby")
        assert suspend(node, process)["state"] == "succeeded"


def test_plans_and_refusals(node: Node) -> None:
    with Program(node) as program:
        process = started(node, program)
        plan = post(node, "/v1/migration-plans", {"process": process["id"]}, 200)
        assert (plan["source"], plan["held_bytes"]) == ("cpu:0", 2 * (2 << 20))
        targets = {target["device"]: target for target in plan["targets"]}
        assert (targets["cpu:1"]["allowed"], targets["cpu:1"]["reasons"]) == (True, [])
        assert [reason["code"] for reason in targets["cpu:0"]["reasons"]] == ["same_device"]
        for target, status, code in (
            ("cpu:0", 409, "same_device"), ("cpu:7", 404, "no_such_device"), ("null:0", 409, "other_kind"),
            ("cpu:0,1", 409, "wrong_number"),
        ):  # fmt: skip
            refused = post(node, "/v1/migrations", {"process": process["id"], "target": target}, status)
            assert refused["code"] == code, refused
            if status == 409:
                assert (refused["process_location"], refused["phase"]) == ("source", "planning")
        driver = {"process": process["id"], "target": "cpu:1", "engine": "driver"}
        assert post(node, "/v1/migrations", driver, 409)["code"] == "engine_not_possible"
        assert post(node, f"/v1/processes/{process['id']}:resume", {}, 409)["code"] == "not_running"
        node.behave(round="hang")
        operation = move(node, process)
        in_phase(node, operation, "copying")
        again = post(node, "/v1/migrations", {"process": process["id"], "target": "cpu:1"}, 409)
        assert again["code"] == "already_moving"
        assert not node.get("/v1/migrations", state="done")


def test_lines_in_the_log_name_the_operation_that_they_are_about(node: Node) -> None:
    """And no other one: a server that one operation has started outlives it."""
    with Program(node) as program:
        process = started(node, program)
        suspension, resumption = suspend(node, process), resume(node, process)
        assert (suspension["state"], resumption["state"]) == ("succeeded", "succeeded")
        node.wait_for_standby()
        post(node, f"/v1/jobs/{process['job_id']}/faults:inject", {"kind": "kill"})
        wait_for_recoveries(node, 1)
    lines = node.log.read_text().splitlines()

    def operation(event: str) -> str | None:
        (line,) = (line for line in lines if f"] {event} " in line)
        return line.partition(" operation=")[2].partition(" ")[0] or None

    assert operation("process suspended") == operation("suspend done") == suspension["id"]
    assert operation("resume done") == resumption["id"]
    assert (operation("process recovering"), operation("recovery resumed")) == (None, None)
