"""What is refused before anything is touched, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xmigd.driver_checkpoint.machine import Kind
from xmigd.driver_checkpoint.node import Gpu, Gpus, Program
from xmigd.driver_checkpoint.plan import Known, against, against_target, device_map, make_plan

GIB = 1 << 30
PROGRAM = Program(pid=7, start_time=1, uid=1000, gid=1000, command="train", uvm_bytes=4 << 20, shares_memory=False,
                  shim=False)  # fmt: skip


def gpu(number: int, **more: object) -> Gpu:
    made = Gpu(
        device=f"cuda:{number}", uuid=f"GPU-{number}", name="NVIDIA H200", total_bytes=141 * GIB, free_bytes=100 * GIB,
        mig=False, exclusive=False, used_by={7: 8 * GIB} if number == 0 else {}, under_mps=frozenset(),
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def gpus(*changed: Gpu, driver: int = 580) -> Gpus:
    known = {made.device: made for made in (gpu(0), gpu(1), *changed)}
    return Gpus((driver, 65), list(known.values()))


def codes(
    found: Gpus | None = None, *, program: Program = PROGRAM, host: int = 64 * GIB, known: Known | None = None,
    kind: Kind = "move",
) -> list[str]:  # fmt: skip
    return [reason.code for reason in against(program, found or gpus(), host, known or Known(), kind)]


def test_nothing_uses_against_it() -> None:
    assert codes() == []
    plan = make_plan(PROGRAM, gpus(), 64 * GIB, Known())
    assert [(target.device, target.allowed) for target in plan.targets] == [("cuda:0", False), ("cuda:1", True)]
    assert (plan.source, plan.held_bytes, plan.live_bytes) == ("cuda:0", 8 * GIB, None)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (codes(gpus(driver=560)), "driver_too_old"),
        (codes(gpus(driver=575)), "driver_too_old"),
        (codes(gpus(gpu(0, used_by={}))), "no_cuda"),
        (codes(gpus(gpu(1, used_by={7: GIB}))), "several_gpus"),
        (codes(gpus(gpu(0, under_mps=frozenset({7})))), "mps"),
        (codes(gpus(gpu(0, mig=True))), "mig"),
        (codes(program=replace(PROGRAM, uvm_bytes=GIB)), "managed_memory"),
        (codes(program=replace(PROGRAM, shares_memory=True)), "ipc"),
        (codes(program=replace(PROGRAM, shim=True)), "engine_not_possible"),
        (codes(known=Known(managed=[7])), "engine_not_possible"),
        (codes(host=GIB), "no_host_memory"),
    ],
)
def test_programs_that_are_refused(found: list[str], expected: str) -> None:
    assert found == [expected]


def test_what_newer_drivers_can_do() -> None:
    assert codes(gpus(driver=575), kind="suspend") == []
    assert codes(gpus(driver=610), program=replace(PROGRAM, shares_memory=True)) == []


@pytest.mark.parametrize(
    ("target", "known", "expected"),
    [
        (gpu(1), Known(), []),
        (gpu(0), Known(), ["same_device"]),
        (gpu(1), Known(cordoned={"cuda:1": "fan"}), ["cordoned"]),
        (gpu(1), Known(failing={"cuda:1": "Xid 79"}), ["failing"]),
        (gpu(1, name="NVIDIA A100"), Known(), ["other_kind"]),
        (gpu(1, mig=True), Known(), ["mig"]),
        (gpu(1, exclusive=True), Known(), ["exclusive"]),
        (gpu(1, free_bytes=GIB), Known(), ["no_room"]),
    ],
)
def test_targets_that_are_refused(target: Gpu, known: Known, expected: list[str]) -> None:
    reasons = against_target(PROGRAM, gpus(target), target, known)
    assert [reason.code for reason in reasons] == expected
    assert all(reason.text for reason in reasons)


def test_the_map_names_every_gpu_once() -> None:
    found = gpus(gpu(2), gpu(3))
    pairs = device_map(found, "GPU-0", "GPU-2")
    assert pairs == [("GPU-0", "GPU-2"), ("GPU-1", "GPU-1"), ("GPU-2", "GPU-0"), ("GPU-3", "GPU-3")]
