"""The contract where something lives: programs compute on cpu devices while what Schemathesis makes up moves, suspends,
resumes, drains, pauses, faults and stops them; first each with a process that it fits, then in any order. Whatever is
requested, no program ever reads a wrong value."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.api.contract import CHECKS, TIMES, examples, schema
from tests.forked import Node
from tests.harness import wait_until
from tests.web.front import PATIENCE, start_calm
from xmigd.demo.node import Program

pytestmark = pytest.mark.timeout(180 * TIMES)
OVER = ("succeeded", "failed", "cancelled")
LONGEST_WAIT = 2.0  # seconds that a made-up request may wait for an operation
# So many faults in a row lose no process.
SETTINGS = {"device_memory": 1 << 30, "max_attempts": 1000, "request_rate": 0}

# The fields that only this test can know.
AIMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "plan_migration": lambda it: {"process": it["id"], "engine": "proxy"},
    "start_migration": lambda it: {
        "process": it["id"], "engine": "proxy", "target": "cpu:1" if it["device"] == "cpu:0" else "cpu:0",
    },
    "resume_process": lambda it: {"device": it["device"]},
    "inject_fault": lambda it: {"process": it["id"]},
}  # fmt: skip
# With what has to be done to a process before. Armed faults may be injected at any time from then on, so they come
# late.
ACTIONS = {
    "start_migration": "", "plan_migration": "", "suspend_process": "", "resume_process": "suspend", "drain_device": "",
    "pause_process": "", "continue_process": "pause", "inject_fault": "", "stop_job": "",
}  # fmt: skip
BESIDES = (
    "cancel_operation", "change_device", "change_policy", "wait_for_operation", "get_device", "get_job",
    "get_operation", "get_process",
)  # fmt: skip


def known_of(pid: int | None) -> str:
    """What the kernel tells of a process and of what each of its threads waits for."""
    found = ""
    for folder in [Path(f"/proc/{pid}"), *Path(f"/proc/{pid}/task").glob("*")]:
        for name in ("status", "wchan", "stack"):
            with contextlib.suppress(OSError):
                found += f"{folder / name}: {(folder / name).read_text()}\n"
    return found or "it is gone"


class Living:
    """A node on which two programs run, and a caller who may do everything there."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.programs: list[Program] = []
        self.stopped: set[str] = set()  # processes that were instructed to end, and may not have done so yet
        transport = httpx.HTTPTransport(uds=str(node.settings.api_socket), verify=False)
        self.http = httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE)
        self.address = node.client.get("/v1/node")["tcp_address"]
        token = node.client.post("/v1/tokens", {"name": "contract", "scope": "admin"})["token"]
        self.headers = {"Authorization": f"Bearer {token}"}

    def settle(self) -> None:
        """Undo what requests have left behind: two programs run, and nothing prevents any request."""
        for policy in self.node.client.get("/v1/policies"):
            self._change(f"/v1/policies/{policy['name']}", dict.fromkeys(policy["settings"]))
        for device in self.node.client.get("/v1/devices"):
            self._change(f"/v1/devices/{device['id']}", {"cordoned": False})
        self.node.client.post("/v1/circuit-breaker:reset")
        self._quiet()
        for process in self.processes():
            self.http.post(f"/v1/processes/{process['id']}:continue")
            if process["state"] == "suspended":
                self.http.post(f"/v1/processes/{process['id']}:resume", json={})
        self._until(
            lambda: not self.stopped & {process["id"] for process in self.processes()}, "the stopped ones' ends"
        )
        while len(self.processes()) < 2:
            self.programs.append(start_calm(self.node, f"calm-{len(self.programs)}", mebibytes=4))
        self._quiet()
        self._until(lambda: all(process["state"] == "running" for process in self.processes()), "that all run")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails with what is to be known of the processes, and with the daemon's log."""
        try:
            wait_until(condition, what)
        except AssertionError:
            for process in self.processes():
                print(process)
                for name in ("pid", "server_pid"):
                    print(name, known_of(process[name]))
            print(self.node.log.read_text(errors="replace"))
            raise

    def _change(self, path: str, change: dict[str, Any]) -> None:
        answer = self.http.patch(path, json=change, headers={"if-match": "*"})
        assert answer.is_success, answer.text

    def _quiet(self) -> None:
        def quiet() -> bool:
            return not any(self.node.client.get("/v1/operations", state=state) for state in ("pending", "running"))

        self._until(quiet, "the operations' ends")

    def processes(self) -> list[dict[str, Any]]:
        found = self.node.client.get("/v1/processes", live=True)
        return [process for process in found if process["state"] not in ("ended", "lost")]

    def ask(self, case: schemathesis.Case, it: dict[str, Any]) -> Any:
        """The answer, which is as the document says, to what was made up, but about this process."""
        operations = self.node.client.get("/v1/operations", limit=1)
        known = {
            "process": it["id"], "job": it["job_id"], "device": it["device"],
            "operation": operations[0]["id"] if operations else "none",
            "name": "circuit-breaker",
        }  # fmt: skip
        case.path_parameters = {field: known[field] for field in case.path_parameters or {}}
        name = case.operation.definition.raw["operationId"]
        aim = AIMS.get(name)
        if aim is not None:
            case.body |= aim(it)
        if aim is not None and case.body.get("kind") == "hang":
            case.body["kind"] = "kill"  # a server that hangs, and not its device, does so until somebody kills it
        if name == "plan_migration":
            case.body.pop("node", None)  # there is no other one
        if "timeout" in (case.query or {}):
            case.query["timeout"] = LONGEST_WAIT
        # Without the Idempotency-Key, which is made up to be the same again and again.
        case.headers = {"if-match": "*"} if case.operation.method == "patch" else None
        answer = case.call_and_validate(base_url=self.address, headers=self.headers, checks=CHECKS)
        if name == "stop_job" and answer.status_code == 202:
            self.stopped.add(it["id"])
        return answer

    def over(self, answer: Any) -> None:
        """What the request began has come to its end."""
        location = "".join(answer.headers.get("location", ""))  # Schemathesis has a list of them
        if location.startswith("/v1/operations/"):
            self._until(lambda: self.node.client.get(location)["state"] in OVER, f"the end of {location}")

    def finish(self) -> None:
        """Every program that still can ends well, and none of them has read a wrong value."""
        self.settle()
        for program in self.programs:
            out, err = program.process.communicate("\n", timeout=PATIENCE)
            assert out.startswith("exact") or program.process.returncode < 0 or err.startswith("CUDA: "), (out, err)
        assert sum(program.process.returncode == 0 for program in self.programs) >= 2


@pytest.fixture(scope="module")
def living(native_dir: Path) -> Iterator[Living]:
    with (
        tempfile.TemporaryDirectory(prefix="xmig-") as folder,
        Node(Path(folder), native_dir=native_dir, **SETTINGS) as node,
    ):
        living = Living(node)
        with living.http:
            yield living
            living.finish()
        assert "failed inside xmigd" not in node.log.read_text()


@pytest.mark.parametrize("name", ACTIONS)
def test_it_is_done_to_a_process_that_lives(living: Living, name: str) -> None:
    @examples(3)
    @given(case=schema.find_operation_by_id(name).as_strategy())
    def act(case: schemathesis.Case) -> None:
        living.settle()
        it = living.processes()[0]
        if ACTIONS[name]:
            living.over(living.http.post(f"/v1/processes/{it['id']}:{ACTIONS[name]}", json={}))
        answer = living.ask(case, it)
        assert answer.status_code in (200, 202), answer.text
        living.over(answer)

    act()


def test_whatever_follows_upon_what(living: Living) -> None:
    requested = st.sampled_from([*ACTIONS, *BESIDES]).flatmap(
        lambda name: schema.find_operation_by_id(name).as_strategy()
    )

    class AmongTheLiving(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            living.settle()

        @rule(case=requested, which=st.integers(0, 1))
        def ask(self, case: schemathesis.Case, which: int) -> None:
            if found := living.processes():
                living.ask(case, found[which % len(found)])

    run_state_machine_as_test(AmongTheLiving, settings=examples(12, stateful_step_count=12))
