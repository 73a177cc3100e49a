"""`make gpu` itself, without a GPU: what it says, what it compares, and a rehearsal of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import forked
from tests.gpu import conformance, memory, moves, speeds, stalls, steps
from tests.gpu.__main__ import find_gpu
from tests.gpu.bench import Bench, Failed, Outcome
from tests.gpu.cases import (
    ASKS,
    COUNTERS,
    FILES,
    HELD,
    INFERRED,
    KILLED,
    MOVED,
    PAIR,
    PROGRAMS,
    RECOVERED,
    RESULTS,
    SMALL_MOVED,
    TIMED,
    TRAINED,
    WARM,
    Case,
)
from tests.gpu.compare import differences, distance, spread
from tests.gpu.faults import lost
from tests.gpu.injections import Injection
from tests.gpu.parts import PARTS, chosen
from tests.gpu.results import compared
from tests.harness import ROOT
from xmigd import measurements

LONG = 780.0  # seconds, on a machine that runs other tests beside
CASES = [*TIMED, *RESULTS, *KILLED, RECOVERED, COUNTERS, FILES, PAIR, MOVED, SMALL_MOVED, TRAINED, INFERRED, HELD, WARM,
         ASKS]  # fmt: skip
pytestmark = pytest.mark.timeout(800)


def test_on_a_gpu() -> None:
    """Stands in the summary of `make test` for everything that needs one."""
    if find_gpu(0) is None:
        pytest.skip(f"no GPU: the {len(PARTS)} parts of `make gpu` are not run")


def test_says_that_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing is found that could know of one
    done = run("--out", tmp_path)
    assert done.returncode == 0
    assert f"no GPU here: {len(PARTS)} parts skipped" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_refused() -> None:
    done = run("--only", "gpt2,gpt3")
    assert done.returncode == 2
    assert "there is no part gpt3" in done.stderr


def test_parts_are_chosen_by_name_and_by_group() -> None:
    assert chosen(None) == PARTS
    assert [part.name for part in chosen("kills, profile")] == [
        "kills-training", "kills-graphs", "kills-default", "counters", "profile",
    ]  # fmt: skip
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_its_program(case: Case) -> None:
    for tiny in (True, False):
        command = case.command("python", tiny=tiny)
        assert all(Path(word).exists() for word in command if word.endswith(".py"))
        assert str(PROGRAMS / f"{case.program}.py") in command


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"losses": [1.0, 2.0]}, {"losses": [1.0, 2.0]}, []),
        ({"losses": [1.0, 2.0]}, {"losses": [1.0, 2.0000000000000004]}, ["losses[1]"]),
        ({"losses": [1.0]}, {"losses": [1.0, 2.0]}, ["losses[1]"]),
        ({"losses": [float("nan")]}, {"losses": [float("nan")]}, []),
        ({"losses": [0.0]}, {"losses": [-0.0]}, ["losses[0]"]),
        ({"losses": [1.0]}, {}, ["losses"]),
        ({"sha256": "a", "step_s": 1.0}, {"sha256": "b", "step_s": 2.0}, ["sha256"]),
        ({"digests": {"qr": "a"}}, {"digests": {"qr": "b", "svd": "c"}}, ["digests: qr", "digests: svd"]),
        ({"reported": ["error 710"]}, {"reported": ["error 719"]}, ["reported[0]"]),
    ],
)
def test_differences(one: dict[str, Any], other: dict[str, Any], expected: list[str]) -> None:
    assert differences(one, other) == expected


def test_distance() -> None:
    assert distance({"losses": [1.0, 4.0]}, {"losses": [2.0, 4.0]}) == 0.25
    with pytest.raises(ValueError, match="longer"):
        distance({"losses": [1.0]}, {"losses": [1.0, 2.0]})


def test_spread() -> None:
    """Against the two native runs that are farthest apart, from the nearest."""
    native = [Outcome({"losses": [loss]}, [], [], []) for loss in (0.5, 1.0, 0.75)]
    near = spread(WARM, native, Outcome({"losses": [1.0]}, [], [], []), "reported")
    assert (near.value, near.unit, near.target) == (0, "× native spread", 2)
    assert near.conditions.endswith("; reported")
    far = spread(WARM, native, Outcome({"losses": [4.0]}, [], [], []))
    assert far.value == 1.5
    assert far.reached  # it is not far enough
    alike = [native[0]] * 2
    assert spread(WARM, alike, native[1]).reached is False
    assert spread(WARM, alike, native[0]).reached


class Native:
    """In place of a Bench: native runs whose results are given."""

    def __init__(self, *results: dict[str, Any]) -> None:
        self.runs = [Outcome(result, [], [], []) for result in results]

    def native(self, case: Case) -> Outcome:
        return self.runs.pop(0)


@pytest.mark.parametrize(
    ("more", "value", "reported", "left"),
    [
        ([{"digests": {"qr": "a", "sparse": "3"}}], 0, "not compared, since two native runs differ in it: ", 0),
        ([{"digests": {"qr": "a", "sparse": "1"}}, {"digests": {"qr": "a", "sparse": "4"}}, {}], 0, "not compared", 1),
        ([{"digests": {"qr": "a", "sparse": "1"}}] * 3, 1, "different: digests: sparse", 0),
    ],
)
def test_what_native_runs_do_not_share_is_not_compared(
    more: list[dict[str, Any]], value: int, reported: str, left: int
) -> None:
    native = Outcome({"digests": {"qr": "a", "sparse": "1"}}, [], [], [])
    xmig = Outcome({"digests": {"qr": "a", "sparse": "2"}}, [], [], [])
    others = Native(*more)
    row = compared(cast(Bench, others), RESULTS[0], native, [xmig])
    assert row.value == value
    assert reported in row.conditions
    assert len(others.runs) == left


@pytest.mark.parametrize(
    ("xmig", "again"),
    [
        ([10.9], 0),
        ([11.1, 10.0], 1),  # near the target: once more, and the median counts
        ([11.5, 11.5], 1),
    ],
)
def test_starts_are_repeated_where_there_is_doubt(
    monkeypatch: pytest.MonkeyPatch, xmig: list[float], again: int
) -> None:
    run = {"losses": [1.0], "step_s": 1.0, "lower_s": 0.99, "upper_s": 1.01, "first_step_s": 10.0}
    run["laps_s"] = {"imported": 6.0}
    snapshots = [{"ms": 7.0, "live_bytes": 100}, {"ms": 1.0, "live_bytes": 10}]
    left = [Outcome(run | {"first_step_s": start}, [], snapshots, []) for start in xmig]
    native = Outcome(run, [], [], [])
    memory = SimpleNamespace(row=lambda _: "what it weighs")
    monkeypatch.setattr(steps, "in_turn", lambda *_: (native, left.pop(0), memory))

    def started(*_: Any) -> contextlib.AbstractContextManager[Any]:
        ended = (native, left.pop(0))
        return contextlib.nullcontext([SimpleNamespace(go=bool, finish=lambda it=it: it) for it in ended])

    bench = SimpleNamespace(both=started, context_s=0.2, native=lambda *_: native)
    step, row, _, different = steps.measure(cast(Bench, bench), TIMED[1])
    assert step.conditions.endswith("; 2 snapshots, 1 of them with all of its memory, 7.0 ms each")
    assert row.value == pytest.approx(sum(xmig) / len(xmig) / 10)
    assert "of the first 6000 and 6000 ms until all was imported" in row.conditions
    assert row.target == 1.12
    assert ("native 1e+04, 1e+04 ms" in row.conditions) == bool(again)
    assert ("; 2 snapshots in the second, of 8 ms in all;" in row.conditions) == bool(again)
    assert not left
    assert different.value == 0


def test_what_snapshots_cost_is_reported_of_all_that_preserve_what_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one in the middle of a step had much more of it; and not of the time in which another program ran."""
    snapshots = [{"number": 1, "live_bytes": 1e8, "copied_bytes": 0, "ms": 1.0, "at": 0.0}]  # at the start
    snapshots += [
        {"number": 2 + i, "live_bytes": live, "copied_bytes": 1e9, "ms": 2.0, "at": 1 + 0.2 * i + 5 * (i > 9)}
        for i, live in enumerate([2e9, 9e9] + 18 * [2e9])
    ]  # fmt: skip
    result = {"step_s": 1.0, "lower_s": 1.0, "upper_s": 1.0, "blocks_s": [1.0]}
    both = Outcome(result, [], [], []), Outcome(result, [], snapshots[::-1], [])
    monkeypatch.setattr(stalls, "in_turn", lambda *_: (*both, None))
    bench = SimpleNamespace(rehearsal=False, can=lambda _: {"copy_and_hash_gb_s": 1000, "hash_gb_s": 2000})
    _, cost, floor = stalls.snapshots(cast(Bench, bench), TIMED[1])
    assert cost.value == 1.0
    assert cost.conditions.split("; ")[1].startswith("17 snapshots of 2.0 ms")
    assert floor.value == 1.0


def test_a_pair_leaves_nothing_on_the_device(bench: Bench) -> None:
    mlp = next(case for case in TIMED if case.name == "mlp")
    with bench.ahead([mlp]):
        with bench.both(mlp) as (_, xmig):
            xmig.go()
            xmig.turn(1)
            assert xmig.program is not None
            server = (xmig.program.info() or {})["server_pid"]
            assert Path(f"/proc/{server}").exists()
        assert not Path(f"/proc/{server}").exists()


def test_what_did_not_inject_is_known_by_its_kind() -> None:
    plan = [Injection("kill", 0, "copy", 5), Injection("fault", 700, "record", 6), Injection("hang", 0, "kernel", 7),
            Injection("fault", 700, "kernel", 9)]  # fmt: skip
    injected: list[dict[str, Any]] = [{"error": 702}, {"error": None}, {"error": 700}]
    assert lost(plan, injected) == [plan[3]]
    assert lost(plan, injected[:1]) == [plan[0], plan[1], plan[3]]


def test_the_gpu_that_is_named_is_the_one(tmp_path: Path) -> None:
    """On both sides, and for what needs two none is hidden."""
    bench = Bench(tmp_path, tmp_path, python="/usr/bin/env", rehearsal=False, end=0, gpu=1)
    seen = bench.natively()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert bench.natively(2) == dict(os.environ)
    with bench.node() as node:
        assert node.environment["XMIG_DEVICES"] == "cuda:1"


def test_what_a_program_reported_is_in_the_reason(bench: Bench) -> None:
    with bench.node() as node, pytest.raises(Failed, match=r"exit code 2: .*--nonsense"):
        bench.under(node, WARM, "--nonsense")


@pytest.fixture
def bench(frameworks: Path, native_dir: Path, tmp_path: Path) -> Bench:
    end = time.monotonic() + LONG
    return Bench(tmp_path, tmp_path, python=str(frameworks), rehearsal=True, end=end, make_node=forked.Node)


def test_rehearsal_of_mps(frameworks: Path, native_dir: Path, tmp_path: Path) -> None:
    """With a stand-in for NVIDIA's control daemon."""
    done = run("--rehearse", "--only", "mps-faults", "--python", frameworks,
               "--out", tmp_path / "out", "--work", tmp_path / "work")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.name: row for row in measurements.read(tmp_path / "out" / "mps.json").rows}
    assert not [name for name in rows if "failed" in name], rows
    for act in ("a server killed", "an illegal address", "the MPS server killed"):
        for who in ("it", "its neighbour"):
            assert rows[f"MPS, {act}: differences of {who}"].value == 0
            assert "1 recoveries, 0 not exact" in rows[f"MPS, {act}: differences of {who}"].conditions


def test_rehearsal(frameworks: Path, native_dir: Path, tmp_path: Path) -> None:
    done = run("--rehearse", "--only", "cupy,kills-training,counters,mlp", "--python", frameworks,
               "--out", tmp_path / "out", "--work", tmp_path / "work")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    files = [measurements.read(tmp_path / "out" / f"{topic}.json") for topic in ("gpu", "recoveries")]
    rows = {row.name: row for file in files for row in file.rows}
    assert [file.missing for file in files] == [[], []]
    for name in ("cupy", "kills-training", "counters", "mlp"):
        assert rows[f"{name}: differences"].value == 0
    assert "8 kills, 4 illegal addresses, 3 suspensions" in rows["counters: differences"].conditions
    assert "8 recoveries, 0 not exact" in rows["kills-training: differences"].conditions


def test_conformance_on_cpu_devices(tmp_path: Path, native_dir: Path) -> None:
    """The part as it is, with a Python that has no framework: only the native side is missing."""
    done = run("--rehearse", "--only", "conformance", "--python", sys.executable, "--out", tmp_path, "--work", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.name: row for row in measurements.read(tmp_path / "conformance.json").rows}
    assert rows["conformance: differences"].value == 0, rows
    assert re.search(r": [1-9]\d+ recoveries, 0 not exact", rows["conformance: differences"].conditions)
    assert rows["conformance: programs"].value == len(conformance.REHEARSED)
    reported = rows["conformance: programs"].conditions
    assert "not run: attributes, " in reported
    assert "captures: the driver captures copies of pageable memory" in reported
    assert "device_queries: attributes that promise" in reported


def test_what_conformance_programs_print_is_compared() -> None:
    native = conformance.Ran("0", ["one", "left out: this", "two"], "")
    same = conformance.Ran("0", ["one", "two"], "")
    assert conformance.differences("any", {"natively": native, "under xMIG": same}) == []
    other = conformance.Ran("0", ["one", "left out: this", "2", "three"], "")
    assert conformance.differences("any", {"natively": native, "under xMIG": other}) == [
        "under xMIG: 2 of 3 lines, the first is 2: 'two' natively, here '2'"
    ]
    wrong = conformance.Ran("0", ["not as expected: one"], "")
    assert conformance.differences("any", {"natively": wrong, "under xMIG": wrong}) == [
        "natively: not as expected: one"
    ]
    crashed = conformance.Ran("-11", ["one"], "what it\nreported")
    found = conformance.differences("any", {"natively": crashed, "under xMIG": same})
    assert found[0] == "natively: ended with -11 after 1 lines, 'one': what it reported"
    ways = {"natively": crashed, "under xMIG": same, "with kills": other}
    assert conformance.differences("any", ways)[1:] == [
        "with kills: 2 of 3 lines, the first is 2: 'two' under xMIG, here '2'"
    ]
    refused = conformance.Ran("0", ["attribute 89 1", "attribute 10 32"], "")
    denied = conformance.Ran("0", ["attribute 89 0", "attribute 10 32"], "")
    both = {"natively": refused, "under xMIG": denied}
    assert conformance.differences("device_queries", both) == []
    assert len(conformance.differences("attributes", both)) == 1


def test_a_part_that_fails_is_a_row(tmp_path: Path, native_dir: Path) -> None:
    """Here every program fails: this Python has no framework. The daemon's own part goes through."""
    done = run(
        "--rehearse", "--only", "files,profile", "--python", sys.executable, "--out", tmp_path, "--work", tmp_path
    )
    assert done.returncode == 1
    assert "files: failed: " in done.stdout


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONG)


def test_moves_and_suspension_small_on_cpu_devices(tmp_path: Path) -> None:
    """The parts for two GPUs, as they are, where there is none: so that nothing in them is new to the first GPU."""
    bench = Bench(
        tmp_path / "logs", tmp_path, python=sys.executable, rehearsal=True, end=time.monotonic() + LONG,
        make_node=forked.Node,
    )  # fmt: skip
    bench.kind = "cpu"
    rows = {row.name: row for part in (moves.forty, moves.suspension) for row in part(bench)}
    bench.downtimes["driver-40GB"] = 80 * bench.downtimes["move-40GB"]
    row = moves.against_driver(bench, "driver-40GB", "move-40GB")
    assert (row.value, row.reached) == (0.0125, True)
    assert rows["move-40GB: differences"].value == rows["suspend-40GB: differences"].value == 0
    assert {
        "move-16MB: downtime", "move-40GB: downtime", "move-40GB: downtime against its floor", "move-40GB: whole move",
        "suspend-40GB", "resume-40GB", "suspend-40GB, no pool",
    } <= rows.keys()  # fmt: skip


def test_what_a_program_that_only_asks_takes(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path / "logs", tmp_path, python=sys.executable, rehearsal=True, end=time.monotonic() + LONG,
        make_node=forked.Node,
    )  # fmt: skip
    row, opened = memory.asking(bench)
    assert (row.value, row.reached) == (0, True)
    assert "1 server, no standby" in row.conditions
    assert "answers as natively" in row.conditions
    assert opened.name == "cuinit, then a context: device memory of xMIG"


def test_speeds_of_a_device_and_its_buses(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "logs", tmp_path, python=sys.executable, rehearsal=True, end=time.monotonic() + LONG)
    bench.kind = "cpu"
    rows = {row.name: row.value for row in speeds.measure(bench)}
    start = "a server's driver and context"  # the cpu device has them at once
    hashing = {"content hash", "content copied and hashed"}
    assert set(rows) == {start, *hashing, *(text for text, _ in speeds.WAYS.values())}
    assert all(value > 0 for name, value in rows.items() if name != start)
    bench.kind = "nothing"
    with pytest.raises(Failed, match=r"xmig-server: .*nothing"):
        list(speeds.measure(bench))
