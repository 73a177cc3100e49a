"""Servers as clients of MPS: who is one, what becomes of all when one has a fault, and when MPS itself ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import harness
from tests.migration.moves import begin, ended, moved
from tests.mps.conftest import Starter, clients_of, environment, mps_of, sharing
from tests.recovery.conftest import PROGRAMS
from xmigd.demo.node import Node, Program
from xmigd.ipc import pidfd as pidfds
from xmigd.settings import Settings

STEPS = 400


def expected(node: Node, kernels: Path, name: str, *arguments: object) -> str:
    """What it prints on a device that is not shared."""
    return harness.run(node, PROGRAMS / f"{name}.py", *arguments, kernels=kernels, device="cpu:1")


def held(start: Starter, **options: Any) -> Program:
    """A training that waits in the middle, with a warm standby."""
    program = start("training", STEPS, 0, STEPS // 2, **options)
    harness.go(program)
    harness.wait_until(lambda: (program.info() or {}).get("standby") == "warm", "it has a standby")
    return program


def released(program: Program) -> str:
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    return harness.output(program)


def control_of(node: Node, number: int) -> int:
    (identity,) = (node.folder / "mps").glob(f"*.{number}.json")
    return int(next(iter(json.loads(identity.read_text()))))


def mps_server_of(node: Node, number: int) -> int:
    control = control_of(node, number)
    (server,) = Path(f"/proc/{control}/task/{control}/children").read_text().split()
    return int(server)


def recovered(program: Program, times: int = 1) -> list[dict[str, Any]]:
    harness.wait_until(
        lambda: [r["outcome"] for r in program.recoveries()] == ["resumed"] * times, f"it is recovered {times} times"
    )
    return program.recoveries()


def test_servers_and_standbys_have_one_each(node: Node, start: Starter) -> None:
    shared, other = held(start), held(start, device="cpu:1")
    assert mps_of(shared) == 1
    assert mps_of(other) is None
    assert sharing(shared)["mps"] is True
    assert sharing(other)["mps"] is False
    assert "not shared through MPS" in sharing(other)["without_mps"]
    assert sorted(clients_of(node)) == [1, 2]
    folder = clients_of(node)[1]
    assert [each.stat().st_mode & 0o777 for each in (folder / "pipe", folder / "log")] == [0o700] * 2
    seen = dict(line.split("=", 1) for line in (folder / "pipe" / "environ").read_text().splitlines())
    assert seen["CUDA_VISIBLE_DEVICES"] == "0"
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
    states = {each["id"]: each["mps"] for each in node.client.get("/v1/devices")}
    assert states == {"cpu:0": "on", "cpu:1": "off"}
    for program in (shared, other):
        released(program)


def test_a_share_of_the_multiprocessors(node: Node, start: Starter, kernels: Path) -> None:
    program = held(start, request={"sm_share": 40})
    variable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    assert environment(program.until("running")["server_pid"])[variable] == "40"
    harness.kill_server(program)
    recovered(program)
    assert environment(program.until("running")["server_pid"])[variable] == "40"
    assert node.client.get(f"/v1/jobs/{program.job}")["sm_share"] == 40
    assert released(program) == expected(node, kernels, "training", STEPS, 0, STEPS // 2)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"sm_share": 0}, 422, "invalid"),
        ({"sm_share": 101}, 422, "invalid"),
        ({"sm_share": 40, "device": "cpu:1"}, 422, "no_mps"),
        ({"sm_share": 40, "device": "cpu:0,1"}, 422, "no_mps"),
        ({"sm_share": 40, "device": "cpu:0"}, 201, None),
        ({"sm_share": 100}, 201, None),
    ],
)
def test_shares_that_are_requested(node: Node, fields: dict[str, Any], status: int, code: str | None) -> None:
    transport = httpx.HTTPTransport(uds=str(node.settings.api_socket))
    with httpx.Client(transport=transport, base_url="http://localhost") as http:
        found = http.post("/v1/jobs", json={"name": "job", **fields})
    assert (found.status_code, found.json().get("code")) == (status, code), found.text


def test_a_job_with_a_share_gets_a_shared_device(start: Starter) -> None:
    """cpu:0 has a process, and cpu:1 none."""
    first = held(start)
    second = held(start, device=None, request={"sm_share": 30})
    assert second.until("running")["device"] == "cpu:0"
    for program in (first, second):
        released(program)


def test_a_killed_server_condemns_its_mps(node: Node, start: Starter, kernels: Path) -> None:
    """The neighbour goes to where the standbys were, too: nothing is promised of an MPS whose client was killed."""
    first, second = held(start), held(start)
    harness.kill_server(first)
    for program in (first, second):
        (recovery,) = recovered(program)
        assert recovery["exact"]
        assert mps_of(program) == 2
    assert [fault["kind"] for fault in second.faults()] == ["server"]
    harness.wait_until(lambda: sorted(clients_of(node)) == [2, 3], "the first has ended, and standbys have a new one")
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(program) for program in (first, second)] == [alone, alone]


@pytest.mark.parametrize(("which", "error"), [("store", 700), ("assert", 710)])
def test_a_program_gets_its_own_fault_and_the_neighbour_none(
    node: Node, start: Starter, kernels: Path, which: str, error: int
) -> None:
    neighbour = held(start)
    program = start("own_fault", which)
    harness.go(program)
    output = harness.output(program)
    assert f"error {error}" in output
    assert "after a reset" in output
    program.until("ended")
    # Beside the neighbour it was nobody's; apart it came back twice, the second time at its record.
    assert [f["kind"] for f in program.faults()][:3] == ["device", "device", "device"]
    (recovery,) = recovered(neighbour)  # once, however often the other's has come back
    assert recovery["exact"]
    assert [fault["kind"] for fault in neighbour.faults()] == ["server"]
    assert mps_of(neighbour) == 2
    assert any("without MPS" in line for line in program.lines())
    assert released(neighbour) == expected(node, kernels, "training", STEPS, 0, STEPS // 2)


def test_alone_a_fault_is_its_own(start: Starter) -> None:
    program = start("own_fault", "trap")
    harness.go(program)
    assert "error 719" in harness.output(program)
    program.until("ended")
    assert not any("without MPS" in line for line in program.lines())


@pytest.mark.parametrize("which", ["server", "control daemon"])
def test_mps_ends(node: Node, start: Starter, kernels: Path, which: str) -> None:
    first, second = held(start), held(start)
    os.kill(mps_server_of(node, 1) if which == "server" else control_of(node, 1), signal.SIGKILL)
    for program in (first, second):
        (recovery,) = recovered(program)
        assert recovery["exact"]
        assert f"the MPS {which} of cpu:0" in recovery["cause"]
        assert mps_of(program) == 2
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(program) for program in (first, second)] == [alone, alone]


def test_the_mps_of_the_standbys_ends(node: Node, start: Starter) -> None:
    """Nobody stands still; the standbys are replaced."""
    program = held(start)
    os.kill(mps_server_of(node, 2), signal.SIGKILL)
    harness.wait_until(lambda: sorted(clients_of(node)) == [1, 3], "standbys have another one")
    harness.wait_until(lambda: (program.info() or {}).get("standby") == "warm", "it has a standby")
    assert program.recoveries() == []
    assert mps_of(program) == 1
    released(program)


def test_an_mps_that_ends_again_and_again_is_not_used_for_a_while(node: Node, start: Starter) -> None:
    program = held(start)
    for number in (1, 2, 3):
        os.kill(mps_server_of(node, number), signal.SIGKILL)
        recovered(program, number)
        if number < 3:
            harness.wait_until(lambda: (program.info() or {}).get("standby") == "warm", "it has a standby")
    device = node.client.get("/v1/devices/cpu:0")
    assert device["mps"] == "failed"
    assert "3 times within" in device["mps_why"]
    later = held(start)
    assert mps_of(later) is None
    assert "3 times within" in sharing(later)["without_mps"]
    for one in (program, later):
        released(one)


@pytest.mark.parametrize(
    ("mode", "why"), [("fails", "MPS cannot be used on this machine"), ("silent", "it does not start")]
)
def test_without_a_usable_mps_jobs_run_without(node: Node, start: Starter, mode: str, why: str) -> None:
    (node.folder / "mps-standin").write_text(mode)
    program = held(start)
    assert mps_of(program) is None
    device = node.client.get("/v1/devices/cpu:0")
    assert device["mps"] == "failed"
    assert "cannot be used" in device["mps_why"]
    assert mode != "fails" or why in device["mps_why"]
    harness.wait_until(lambda: not list((node.folder / "mps").glob("*")), "nothing of it is left")
    released(program)


def test_a_move_leaves_and_enters(node: Node, start: Starter, kernels: Path) -> None:
    neighbour, program = held(start), held(start)
    for device, number in (("cpu:1", None), ("cpu:0", 1)):
        moved(program, device)
        assert mps_of(program) == number
    assert neighbour.recoveries() == []
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(one) for one in (program, neighbour)] == [alone, alone]


def test_the_next_daemon_takes_it_over(node: Node, start: Starter, kernels: Path) -> None:
    first, second = held(start), held(start)
    server = mps_server_of(node, 1)
    node.kill()
    node.start()
    for program in (first, second):
        assert program.until("running")["server_pid"]
        assert mps_of(program) == 1
    harness.kill_server(first)
    for program in (first, second):
        recovered(program)
        assert (mps_of(program) or 0) > 1
    harness.wait_until(lambda: not pidfds.program(server), "what is condemned has ended")
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(program) for program in (first, second)] == [alone, alone]


def test_it_ends_while_no_daemon_is_there(node: Node, start: Starter, kernels: Path) -> None:
    program = held(start)
    node.kill()
    for number in (1, 2):
        os.kill(control_of(node, number), signal.SIGKILL)
    node.start()
    recovered(program)
    assert (mps_of(program) or 0) > 2
    assert released(program) == expected(node, kernels, "training", STEPS, 0, STEPS // 2)


def test_it_ends_when_nothing_has_used_it_for_a_while(node: Node, start: Starter) -> None:
    program = held(start)
    released(program)
    assert sorted(clients_of(node)) == [1, 2]
    harness.wait_until(lambda: not list((node.folder / "mps").iterdir()), "nothing of it is left")
    again = held(start)
    assert mps_of(again) == 3
    released(again)


def test_what_was_condemned_is_known_to_the_next_daemon(node: Node, start: Starter, kernels: Path) -> None:
    program = held(start)
    server, old = mps_server_of(node, 1), program.until("running")["server_pid"]
    harness.stop(old)  # it does not say itself that it has lost its MPS
    os.kill(server, signal.SIGKILL)
    harness.wait_until(lambda: list((node.folder / "mps").glob("*.1.condemned")) != [], "the first is condemned",
                       closely=True)  # fmt: skip
    harness.wait_until(lambda: "killing a server" in node.log.read_text(), "so is its client", closely=True)
    node.kill()
    node.start()
    # By this daemon, or by the last one in its last moment, of which there is no record then.
    harness.wait_until(lambda: (program.info() or {}).get("server_pid") not in (None, old), "another server has it")
    assert (mps_of(program) or 0) > 1
    harness.wait_until(lambda: not list((node.folder / "mps").glob("*.1*")), "nothing of it is left")
    assert released(program) == expected(node, kernels, "training", STEPS, 0, STEPS // 2)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a device"):
        Settings(mps_devices="gpu0")


def test_a_control_daemon_that_hangs(node: Node, start: Starter, kernels: Path) -> None:
    """Nobody waits for it who is a client already; what begins later begins without."""
    first = held(start)
    (node.folder / "mps-standin").write_text("hangs")
    harness.kill_server(first)
    recovered(first)
    assert mps_of(first) == 2  # that one has started before
    harness.wait_until(lambda: node.client.get("/v1/devices/cpu:0")["mps"] == "failed", "the next one is given up")
    second = held(start)
    assert mps_of(second) is None
    assert "has not answered" in sharing(second)["without_mps"]
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(program) for program in (first, second)] == [alone, alone]


@pytest.mark.parametrize("killed", [False, True], ids=["exits", "is killed"])
def test_a_program_that_ends_disturbs_nobody(start: Starter, killed: bool) -> None:
    neighbour, program = held(start), held(start)
    if killed:
        program.process.kill()
        program.process.wait()
    else:
        released(program)
    program.until("ended")
    harness.wait_until(lambda: sharing(neighbour)["mps"], "it is where it was")
    assert mps_of(neighbour) == 1
    assert neighbour.recoveries() == []
    released(neighbour)


def test_a_server_whose_kernel_does_not_end_is_not_trusted(node: Node, start: Starter) -> None:
    """It is killed after the grace, and nothing is promised of the others then."""
    neighbour, program = held(start), held(start)
    program.inject("hang", point="record")
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    harness.injected(program)
    program.process.kill()
    program.process.wait()
    recovered(neighbour)
    assert (mps_of(neighbour) or 0) > 1
    released(neighbour)


def test_a_move_that_is_given_up_disturbs_nobody(node: Node, start: Starter) -> None:
    """Its target has copied there, and what it copied was over when it ended."""
    neighbour, program = held(start), held(start, device="cpu:1")
    operation = ended(node, begin(program, "cpu:0", max_downtime_ms=1e-6))
    assert operation["error"]["code"] == "downtime"
    assert "killing a server" in node.log.read_text()
    released(program)
    harness.wait_until(lambda: len(harness.server_pids(node)) == 2, "its target has ended")
    assert mps_of(neighbour) == 1
    assert neighbour.recoveries() == []
    released(neighbour)


def test_a_server_that_ends_while_no_daemon_is_there_condemns_its_mps(
    node: Node, start: Starter, kernels: Path
) -> None:
    """Nobody has seen how: perhaps its kernels ran."""
    first, second = held(start), held(start)
    server = first.until("running")["server_pid"]
    node.kill()
    os.kill(server, signal.SIGKILL)
    node.start()
    for program in (first, second):
        (recovery,) = recovered(program)
        assert recovery["exact"]
        assert (mps_of(program) or 0) > 1
    alone = expected(node, kernels, "training", STEPS, 0, STEPS // 2)
    assert [released(program) for program in (first, second)] == [alone, alone]
