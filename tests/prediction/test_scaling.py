"""Steps on other numbers of devices: the model without a daemon, and a real daemon with jobs of real processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.api.callers import become
from tests.bench.prediction import leave_out, read_scaling
from tests.cli.conftest import ctl
from tests.daemon.node import until
from tests.harness import CONFORMANCE, cudart, needs_root
from tests.profiling.conftest import PROGRAMS as STEPS
from tests.recovery.conftest import kernels
from xmigd.cli.exits import Exit
from xmigd.client import Client, Refused
from xmigd.demo.node import Node, Program
from xmigd.prediction.scaling import LEAST_COUNTS, NOISE, WIDEST, Measured, kind_of, scale

__all__ = ["kernels"]

SEVERAL = Path(__file__).parent / "programs/several.py"


def steps(of: dict[int, float]) -> list[Measured]:
    return [Measured(devices=devices, step_ms=step) for devices, step in of.items()]


class TestModel:
    def test_shared_work_gets_shorter_and_the_rest_does_not(self) -> None:
        """20 ms that stay and 80 ms that are shared: more devices help less and less."""
        (eight,) = scale(steps({count: 20 + 80 / count for count in (1, 2, 4)}), [8])
        assert eight.step_ms == pytest.approx(30, rel=0.02)
        assert eight.least_ms is not None
        assert eight.most_ms is not None
        assert eight.least_ms <= 30 <= eight.most_ms <= WIDEST * eight.least_ms

    def test_a_batch_for_each_device_stays_as_long(self) -> None:
        (eight,) = scale(steps({1: 100, 2: 101, 4: 102}), [8])
        assert eight.step_ms == pytest.approx(102.5, rel=0.02)

    def test_more_devices_may_be_slower(self) -> None:
        (eight,) = scale(steps({count: 10 + 90 / count + 4 * (count - 1) for count in (1, 2, 4, 16)}), [8])
        assert eight.step_ms == pytest.approx(10 + 90 / 8 + 28, rel=0.05)

    def test_what_is_far_is_unknown(self) -> None:
        near, far = scale(steps({1: 100, 2: 60}), [2, 64])
        assert near.step_ms == pytest.approx(60, rel=NOISE)
        assert "differ too much" in far.unknown
        assert (far.step_ms, far.least_ms, far.most_ms) == (None, None, None)

    def test_one_number_of_devices_is_too_little(self) -> None:
        (found,) = scale(steps({4: 10}), [8])
        assert found.unknown == f"steps were measured on 1 numbers of devices; {LEAST_COUNTS} are needed"

    def test_time_in_collectives_makes_the_range_narrower(self) -> None:
        """Without it, the last devices may have brought as much communication as they took work away."""
        at = {1: 100.0, 4: 30.0}
        (blind,) = scale(steps(at), [8])
        (seen,) = scale([Measured(devices=each, step_ms=step, collectives=0.0) for each, step in at.items()], [8])
        assert blind.most_ms is not None
        assert seen.most_ms is not None
        assert seen.step_ms == pytest.approx(18.3, rel=0.1)
        assert seen.most_ms < 0.8 * blind.most_ms

    def test_jobs_that_differ_make_it_wider(self) -> None:
        alike = scale([*steps({1: 100, 2: 55}), *steps({1: 101, 2: 56})], [2])[0]
        apart = scale([*steps({1: 100, 2: 55}), *steps({1: 100, 2: 66})], [2])[0]
        assert alike.most_ms is not None
        assert apart.most_ms is not None
        assert apart.least_ms is not None
        assert apart.most_ms > alike.most_ms
        assert apart.least_ms <= 55 < 66 <= apart.most_ms * 1.001

    def test_what_differs_in_a_command_is_only_the_number_of_devices(self) -> None:
        of = kind_of("train-1", "torchrun --nproc-per-node 2 train.py --batch 64", 2)
        assert of == kind_of("train-9", "torchrun --nproc-per-node 4 train.py --batch 64", 4)
        assert of != kind_of("train-1", "torchrun --nproc-per-node 4 train.py --batch 32", 4)
        assert of != kind_of("other", "torchrun --nproc-per-node 2 train.py --batch 64", 2)


def test_tables_that_were_measured_on_gpus() -> None:
    """It is nearer than linear scaling in most cases in which it is known, and its range is rarely wrong."""
    left = [leave_out(series, devices) for series in read_scaling()["total"] for devices in series]
    known = [each for each in left if each.model.step_ms is not None]
    assert len(known) >= 10
    better = [abs((each.model.step_ms or 0) - each.real) < abs(each.linear - each.real) for each in known]
    inside = [(each.model.least_ms or 0) <= each.real <= (each.model.most_ms or 0) for each in known]
    assert sum(better) > 0.7 * len(known)
    assert sum(inside) > 0.8 * len(known)


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, profile_every=64) as node:
        yield node


def start(node: Node, kernels: Path, ranks: int, program: Path = STEPS / "steps.py") -> Program:
    environment = {"CUDART": str(cudart("13")), "KERNELS": str(kernels), "PYTHONPATH": str(CONFORMANCE)}
    return node.program(
        [sys.executable, SEVERAL, str(ranks), program], name=f"steps-{ranks}", device=f"cpu:{'0,1'[: 2 * ranks - 1]}",
        environment=environment, stdin=subprocess.PIPE,
    )  # fmt: skip


def scaling(node: Node, program: Program) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"/v1/jobs/{program.job}/scaling", devices=[1, 2])
    return found


def counts(found: dict[str, Any]) -> dict[int, int]:
    return {each["devices"]: each["jobs"] for each in found["measured"]}


@needs_root
def test_jobs_on_one_and_two_devices(node: Node, kernels: Path) -> None:
    one = start(node, kernels, 1)
    found = until(lambda: each if (each := scaling(node, one))["measured"] else None, "its steps are known", 120)
    assert counts(found) == {1: 1}
    assert all("1 numbers of devices" in each["unknown"] for each in found["steps"])
    one.process.communicate(timeout=60)

    two = start(node, kernels, 2)
    found = until(lambda: each if 2 in counts(each := scaling(node, two)) else None, "theirs are known", 120)
    assert counts(found) == {1: 1, 2: 1}
    for measured, step in zip(found["measured"], found["steps"], strict=True):
        assert step["unknown"] == ""
        assert step["least_ms"] <= step["step_ms"] <= step["most_ms"]
        assert step["step_ms"] == pytest.approx(measured["step_ms"], rel=2 * NOISE)
    # It is known of a job that is over, too, and only to those who see it.
    assert scaling(node, one)["steps"][0]["unknown"] == ""
    shown = ctl(node, "scaling", str(two.job), "--devices", "2", "-o", "json")
    assert (shown.returncode, [each["devices"] for each in json.loads(shown.stdout)["steps"]]) == (Exit.OK, [2])
    table = ctl(node, "scaling", str(two.job))
    assert (table.returncode, "differ too much" in table.stdout or " ms to " in table.stdout) == (Exit.OK, True)
    assert ctl(node, "scaling", str(two.job), "--devices", "two").returncode == Exit.USAGE
    node.folder.chmod(0o755)
    with become(60_010, ()), contextlib.closing(Client(node.settings)) as client, pytest.raises(Refused) as refused:
        client.get(f"/v1/jobs/{two.job}/scaling")
    assert refused.value.code == "not_found"
    two.process.communicate(timeout=60)
