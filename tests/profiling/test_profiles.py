"""Profiles of real programs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.cli.conftest import ctl
from tests.profiling.conftest import PROGRAMS, RunSteps
from xmigd.client import Refused
from xmigd.demo.node import Node, Program


def profile(program: Program) -> dict[str, Any]:
    """Empty: there is none yet."""
    with contextlib.suppress(Refused):
        return dict(program.node.client.get(f"/v1/jobs/{program.job}/profile"))
    return {}


def has_steps(program: Program) -> bool:
    found = profile(program)
    return bool(found) and found["step_ms"] is not None and all(one["timed"] for one in found["operations"][:5])


def test_operations_steps_and_memory(node: Node, run_steps: RunSteps) -> None:
    program = run_steps()
    harness.wait_until(lambda: has_steps(program), "steps")
    found = profile(program)
    by_shape = {(one["name"], *(one["grid"] or [0])[:1]): one for one in found["operations"]}
    large, narrow, small = (by_shape["mix", blocks] for blocks in (4, 8, 1))
    assert abs(large["calls"] - 3 * narrow["calls"]) <= 3
    assert abs(small["calls"] - narrow["calls"]) <= 1
    assert by_shape["copy host to device", 0]["bytes"] >= 4096 * (narrow["calls"] - 1)
    assert abs(sum(one["share"] for one in found["operations"] if one["share"] is not None) - 1) < 0.01
    assert large["occupancy"] > 0
    for name in ("compute", "bandwidth"):
        assert all(one[name]["estimated"] is True and one[name]["how"] for one in found["operations"])
    assert large["total_ms"] == pytest.approx(large["calls"] * large["mean_us"] / 1e3)
    (process,) = found["processes"]
    assert process["launches_per_step"] == 5
    assert 0 < found["step_ms"] < 60_000
    assert 0 <= process["idle_share"] <= 1
    assert process["peak_bytes"] >= process["live_bytes"] > 0
    assert process["samples"] < sum(one["calls"] for one in found["operations"]) / 8
    harness.wait_until(lambda: has_charted_steps(program), "the step in the series")
    done = ctl(node, "profile", str(program.job))
    assert done.returncode == 0
    assert "a step takes" in done.stdout
    assert "mix" in done.stdout
    plan = node.client.post("/v1/consolidation-plans", {})
    (packed,) = [one for device in plan["before"] for one in device["processes"]]
    assert packed["step_ms"] > 0

    # The server that takes over counts on, and what the one before it had counted stays.
    harness.wait_until(lambda: (program.info() or {})["standby"] == "warm", "a standby")
    calls = calls_of(program)
    harness.kill_server(program)
    harness.wait_until(lambda: calls_of(program) > calls + 100, "more calls")


def calls_of(program: Program) -> int:
    return sum(one["calls"] for one in profile(program).get("operations", []))


def has_charted_steps(program: Program) -> bool:
    info = program.info() or {}
    samples = program.node.client.get(f"/v1/processes/{info['id']}/series")["samples"]
    return any(samples["step_ms"]) and any(samples["peak_bytes"]) and any(samples["host_bytes_per_s"])


def test_across_a_restart_and_after_the_end(native_dir: Path, kernels: Path) -> None:
    with harness.own_node(native_dir, devices="cpu:0", port=-1, profile_every=64) as node:
        program = harness.start(node, PROGRAMS / "steps.py", kernels=kernels)
        harness.go(program)
        harness.wait_until(lambda: calls_of(program) > 0, "a profile")
        operation = node.client.post(f"/v1/jobs/{program.job}/traces", {"seconds": 60})
        node.stop()
        node.start()
        harness.wait_until(lambda: calls_of(program) > 0, "a profile by the next daemon")
        ended = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=30)
        assert (ended["state"], ended["error"]["code"]) == ("failed", "interrupted")
        assert "steps True" in harness.output(program)
        harness.wait_until(lambda: all(one["over"] for one in profile(program)["processes"]), "its last figures")
        assert calls_of(program) > 0


def test_without_profiles(native_dir: Path, kernels: Path) -> None:
    with harness.own_node(native_dir, devices="cpu:0", port=-1, profile_every=0) as node:
        program = harness.start(node, PROGRAMS / "steps.py", kernels=kernels)
        harness.go(program)
        done = ctl(node, "profile", str(program.job))
        assert done.returncode == 4
        assert "profile_every" in done.stderr
        assert "steps True" in harness.output(program)
