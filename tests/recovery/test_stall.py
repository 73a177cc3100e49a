"""The expected stall: reported while a program runs, kept below its bound, and kept beside each recovery."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forked import Node
from tests.harness import wait_until
from xmigd.cli.output import cell
from xmigd.demo import training as demo

EPOCHS = 100_000  # it is ended before


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    return Node(tmp_path, stall_bound=0.15, snapshot_cost=0.05)


def test_reported_kept_and_shown(node: Node) -> None:
    with node:
        program = demo.start(node, "training", EPOCHS)
        process = program.until("running")["id"]
        path = f"/v1/processes/{process}"
        wait_until(lambda: len(node.client.get(f"{path}/segments", limit=20)) >= 10, "ten snapshots")
        reported = node.client.get(path)
        assert reported["stall_bound_ms"] == 150
        assert reported["snapshots_ms"] > 0
        # The constant part is 40 ms before any recovery; whatever else this machine does, it is no minute.
        assert 40 <= reported["expected_stall_ms"] < 60_000
        assert node.client.get(f"/v1/jobs/{program.job}")["expected_stall_ms"] >= 40

        wait_until(lambda: node.client.get(path)["standby"] == "warm", "a standby")
        reported = node.client.get(path)
        os.kill(reported["server_pid"], signal.SIGKILL)
        recovery = demo.recovered(program, 1)
        assert recovery is not None
        assert recovery["outcome"] == "resumed"
        assert recovery["expected_ms"] >= 40
        after = node.client.get(path)
        assert after["snapshots_ms"] >= reported["snapshots_ms"]  # the next server goes on counting

        def samples() -> dict[str, list[float | None]]:
            return dict(node.client.get(f"{path}/series")["samples"])

        wait_until(lambda: any(samples()["expected_stall_ms"]), "a sample")
        assert set(samples()["stall_bound_ms"]) <= {150, None}
        metrics = node.client.get_text("/metrics")
        for name in ("xmigd_expected_stall_seconds", "xmigd_stall_bound_seconds", "xmigd_snapshot_seconds_total"):
            assert f'{name}{{job="{program.job}",process="{process}"}}' in metrics


def test_snapshots_say_what_their_time_went_into(node: Node) -> None:
    with node:
        program = demo.start(node, "training", EPOCHS)
        process = program.until("running")["id"]

        def some() -> list[dict[str, float]]:
            return list(node.client.get(f"/v1/processes/{process}/segments", limit=20)[:10])

        wait_until(lambda: len(some()) == 10, "ten snapshots")
        for each in some():
            assert 0 <= each["hash_ms"] + each["copy_ms"] <= each["ms"] + 0.001
            assert each["hashed_bytes"] + each["copied_bytes"] >= each["live_bytes"]
            assert each["waited_ms"] >= 0


@pytest.mark.parametrize(("ms", "text"), [(None, "-"), (0.2, "0.2 ms"), (182.4, "182 ms"), (4265.0, "4.3 s")])
def test_as_people_read_it(ms: float | None, text: str) -> None:
    assert cell("expected_stall_ms", ms) == text
