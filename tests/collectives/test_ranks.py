"""What is to be seen of a job's ranks: what each does, waits for, and did."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests import harness
from tests.collectives.conftest import Launch, enough, lines_of
from xmigd.demo.node import Node, Program
from xmigd.process.limits import Limits

RANKS = 4
DONE = [f"{rank}: done" for rank in range(RANKS)]


def seen(node: Node, program: Program, **which: int) -> dict[str, Any]:
    return dict(node.client.get(f"/v1/jobs/{program.job}/ranks", **which))


def begun(folder: Path) -> None:
    harness.wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(RANKS)), "all have begun")


def test_of_four_ranks(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    harness.wait_until(
        lambda: any(one["outcome"] == "taken" for one in seen(node, program)["snapshots"]), "a snapshot of all ranks"
    )
    before = seen(node, program)
    assert [one["rank"] for one in before["ranks"]] == list(range(RANKS))
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(RANKS)]
    assert [one["pid"] for one in before["ranks"]] == pids
    assert {one["device"] for one in before["ranks"]} == {"cpu:0", "cpu:1"}
    world, *others = before["communicators"]
    assert (world["size"], world["joined"], world["state"]) == (RANKS, RANKS, "whole")
    assert {one["size"] for one in others} <= {2, RANKS}
    assert all({"communicator": world["name"], "rank": one["rank"]} in one["communicators"] for one in before["ranks"])
    taken = next(one for one in before["snapshots"] if one["outcome"] == "taken")
    assert taken["ranks"] == RANKS
    assert 0 <= taken["fitted_ms"] <= taken["decided_ms"]

    victim = before["ranks"][2]
    server = node.client.get(f"/v1/processes/{victim['process_id']}")["server_pid"]
    os.kill(server, signal.SIGKILL)

    def recovered() -> bool:
        return [one["outcome"] for one in seen(node, program)["recoveries"]] == ["resumed"]

    harness.wait_until(recovered, "all have been recovered")
    after = seen(node, program, spans=1000)
    (recovery,) = after["recoveries"]
    assert (recovery["ranks"], recovery["attempts"]) == (RANKS, 1)
    assert [(one["rank"], one["cause"]) for one in recovery["lost"]] == [
        (2, "the server was lost: killed by SIGKILL")
    ]  # fmt: skip
    assert {one["rank"] for one in recovery["of_ranks"]} == set(range(RANKS))
    assert all(one["given_ms"] <= recovery["together_ms"] for one in recovery["of_ranks"])
    assert recovery["resumed_ms"] == max(one["resumed_ms"] for one in recovery["of_ranks"])
    for one in after["ranks"]:
        spans = [span["activity"] for span in one["timeline"]]
        at = spans.index("ending")
        rest = [span for span in spans[at:] if span != "joining"]
        assert rest[:3] == ["ending", "waiting", "restoring"], spans
        assert "replaying" in spans[at:]
    waited = [span for one in after["ranks"] for span in one["timeline"] if span["activity"] == "stopped"]
    assert {span["waited_for"] for span in waited} - {None} <= set(range(RANKS))
    assert any(span["waited_for"] is not None for span in waited)
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    # It is over, and is known for a while.
    over = seen(node, program)
    assert {one["activity"] for one in over["ranks"]} == {"ended"}
    assert {one["state"] for one in over["communicators"]} == {"ended"}
    assert over["recoveries"] == after["recoveries"]


def test_a_rank_that_does_not_come_is_waited_for(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("faults", 3, "meets")

    def waits() -> list[str | None]:
        return [one["waits_for"] for one in seen(node, program)["ranks"]]

    harness.wait_until(lambda: waits() == ["rank 2 of a communicator"] * 2, "two look for the third")
    # A round may begin while they wait: it is given up.
    harness.wait_until(
        lambda: [one["activity"] for one in seen(node, program)["ranks"]] == ["joining"] * 2, "both are joining"
    )
    (tmp_path / "come").touch()
    assert lines_of(program, timeout=60) == [f"{rank}: went on" for rank in range(3)]


def test_standbys_wait_until_communicators_are_made(node: Node, launch: Launch, tmp_path: Path) -> None:
    """What starts would hold up in the driver who makes one. Whoever makes none gets another at once."""
    program = launch("faults", 3, "meets")

    def standbys() -> dict[int, str | None]:
        return {one["pid"]: one["standby"] for one in node.client.get("/v1/processes", job=program.job)}

    harness.wait_until(lambda: [*standbys().values()] == ["warm"] * 3, "all have one")
    ranks = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(3)]
    harness.wait_until(
        lambda: [one["activity"] for one in seen(node, program)["ranks"]] == ["joining"] * 2, "two look for the third"
    )
    servers = {one["server_pid"] for one in node.client.get("/v1/processes", job=program.job)}
    for pid in set(harness.server_pids(node)) - servers:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    harness.wait_until(lambda: standbys()[ranks[2]] == "warm", "a standby of the one that makes none")
    others = [standbys()[rank] for rank in ranks[:2]]
    assert others == [None] * 2 or time.monotonic() - killed > Limits().join_patience
    harness.wait_until(lambda: None not in standbys().values(), "standbys in spite of that")
    assert time.monotonic() - killed > Limits().join_patience
    (tmp_path / "come").touch()
    assert lines_of(program, timeout=60) == [f"{rank}: went on" for rank in range(3)]


def test_a_daemon_that_comes_later_learns_who_they_are(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", RANKS, 0)
    begun(tmp_path)
    before = [(one["rank"], one["process_id"]) for one in seen(node, program)["ranks"]]
    node.kill()
    node.start()
    harness.found_again(node)

    def found() -> bool:
        there = seen(node, program)
        return [(one["rank"], one["process_id"]) for one in there["ranks"]] == before and {
            one["state"] for one in there["communicators"] if one["size"] == RANKS
        } >= {"whole"}

    harness.wait_until(found, "its ranks")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
