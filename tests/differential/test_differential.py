"""Random programs of the driver's calls on cpu devices, against what they mean: undisturbed, and with servers killed,
programs moved, suspended and resumed at random moments. And the test itself: that it sees what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.differential.batch import Outcome, run
from tests.differential.generator import FEATURES, generate
from tests.differential.interpreter import interpret
from tests.differential.model import valid
from tests.differential.program import WORK, Op, Program
from tests.differential.runs import HERE, Place, Process, Runs, compile_kernels
from tests.differential.shrink import shrink
from xmigd.errors import XmigError

UNDISTURBED = {1: 700, 2: 900}  # programs, by devices
DISTURBED = {1: 250, 2: 150}
OUT = harness.ROOT / "build" / "differential"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


def check(outcome: Outcome, devices: int, count: int, more: str = "") -> None:
    """No difference. Otherwise where the programs are, and how they are run again."""
    reported = []
    for found in outcome.differences:
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"seed-{found.program.seed}.json"
        path.write_text(found.program.text())
        again = f"python -m tests.differential --devices {devices}{more}"
        reported.append(
            f"{found}\n  again: {again} --replay {path}\n  shrunk: {again} --seed {found.program.seed} --count 1"
        )
    assert not reported, "\n".join(reported)
    assert outcome.programs == count
    assert outcome.inexact == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", UNDISTURBED)
def test_undisturbed(native_dir: Path, kernels: Path, devices: int) -> None:
    count = UNDISTURBED[devices]
    with harness.own_node(native_dir, port=-1) as node:
        place = Place(kernels, node, "cpu:0" if devices == 1 else "cpu:0,1")
        ((_, outcome),) = run([place], 0, count, devices)
    check(outcome, devices, count)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", DISTURBED)
def test_disturbed(native_dir: Path, kernels: Path, devices: int) -> None:
    count = DISTURBED[devices]
    moves = ("cpu:0", "cpu:1") if devices == 1 else ("cpu:0,1", "cpu:2,3")
    kinds = ("kill", "snapshot", "move", "suspend")
    names = "cpu:0,cpu:1,cpu:2,cpu:3"
    with harness.own_node(native_dir, port=-1, devices=names, snapshot_cost=0.5) as node:
        place = Place(kernels, node, moves[0])
        ((_, outcome),) = run([place], 100_000, count, devices, kinds=kinds, moves=moves)
    check(outcome, devices, count, f" --disturb {','.join(kinds)}")
    assert sum(outcome.disturbed.values()) >= count // 50, (outcome.disturbed, outcome.slowest)


# --- the test itself


def test_a_seed_is_a_program() -> None:
    """The same in every process, and every call of it valid: also where launches in several streams are not ordered by
    themselves."""
    for seed in range(40):
        features = FEATURES if seed % 2 else FEATURES - {"launch-order"}
        program = generate(seed, 2, features)
        assert program.line() == generate(seed, 2, features).line()
        assert program.launch_order == bool(seed % 2)
        assert valid(program, program.ops) == program.ops
        assert Program.read(program.text()).line() == program.line()


def without_order(program: Program) -> Program:
    """Nothing is waited for any more."""
    ordering = {"wait", "sync_stream", "query_stream", "sync_event", "query_event", "sync_ctx"}
    return Program(program.seed, program.contexts, [op for op in program.ops if op["op"] not in ordering])


def test_what_is_not_ordered_is_not_valid() -> None:
    """Of most programs something has to go when nothing is waited for."""
    programs = [without_order(generate(seed, 1)) for seed in range(30)]
    assert sum(valid(p, p.ops) != p.ops for p in programs) > 25


def test_copies_that_the_legacy_stream_orders_can_be_left_out() -> None:
    """A copy of page-locked memory after what writes that in another stream: ordered by the legacy stream alone, or by
    what the program asks for."""
    start: list[Op] = [
        {"op": "stream", "name": "s0", "ctx": 0, "flags": 0, "priority": 0},
        {"op": "alloc", "name": "b0", "kind": "mem", "ctx": 0, "size": 64},
        {"op": "set", "to": ["b0", 0], "bits": 8, "value": 1, "pitch": 0, "width": 64, "height": 1, "ctx": 0,
         "stream": "s0"},
        {"op": "alloc", "name": "h0", "kind": "pinned", "ctx": 0, "size": 64, "flags": 0},
        copy("b0", "h0", "s0"),
    ]  # fmt: skip
    event: list[Op] = [
        {"op": "make_event", "name": "e0", "ctx": 0, "flags": 2},
        {"op": "record", "event": "e0", "stream": "s0", "ctx": 0},
        {"op": "wait", "event": "e0", "stream": "0", "ctx": 0},
    ]
    early, late = [*start, copy("h0", "b0", "0")], [*start, copy("h0", "b0", "s0")]
    waited = [*start, {"op": "sync_stream", "stream": "s0", "ctx": 0}, copy("h0", "b0", "0")]
    for ops, kept in ((early, False), (late, True), ([*start, *event, copy("h0", "b0", "0")], True), (waited, True)):
        assert valid(Program(1, [(0, True)], ops), ops) == ops
        assert (valid(Program(1, [(0, True)], ops, legacy_order=False), ops) == ops) == kept
    for seed in range(20):
        program = generate(seed, 2, FEATURES - {"legacy-order"})
        assert not program.legacy_order
        assert valid(program, program.ops) == program.ops
        assert not Program.read(program.text()).legacy_order


def copy(source: str, to: str, stream: str) -> Op:
    extent = [64, 1, 1]
    return {"op": "copy", "via": "cuMemcpyAsync", "from": {"at": [source, 0]}, "to": {"at": [to, 0]}, "extent": extent,
            "ctx": 0, "stream": stream}  # fmt: skip


def test_the_interpreter_sees_every_call() -> None:
    """What a program reads depends on nearly all of its work: leaving out one call is seen."""
    seen = tried = 0
    for seed in range(20):
        program = generate(seed, 1)
        expected = interpret(program)
        for number, op in enumerate(program.ops):
            if op["op"] in WORK:
                tried += 1
                ops = program.ops[:number] + program.ops[number + 1 :]
                seen += interpret(Program(seed, program.contexts, ops)) != expected
    assert seen / tried > 0.6, f"{seen} of {tried}"


def test_shrinks_to_what_it_takes(native_dir: Path, kernels: Path) -> None:
    """A program whose kernel is claimed to be another one: what is left is that kernel, its memory and a read."""

    def corrupted(program: Program) -> Program:
        ops = [op | {"name": "scatter"} if op.get("name") == "fold" else op for op in program.ops]
        return Program(program.seed, program.contexts, ops)

    with harness.own_node(native_dir, port=-1) as node, Runs(Place(kernels, node, "cpu:0")) as runs:

        def fails(program: Program) -> bool:
            return runs.one(program, interpret(corrupted(program))) is not None

        program = next(p for seed in range(100) if fails(p := generate(seed, 1)))
        small = shrink(program, fails)
    assert fails is not None
    kinds = [op["op"] for op in small.ops]
    assert {"alloc", "read"} <= set(kinds)
    assert len(kinds) < len(program.ops) / 2
    assert len(kinds) <= 12, small.text()
    assert any(
        op.get("name") == "fold" or any(node.get("name") == "fold" for node in op.get("nodes", [])) for op in small.ops
    )


def test_a_runner_that_does_not_start_is_reported() -> None:
    """As whatever else goes wrong in a part of `make gpu`: the others go on."""
    with pytest.raises(XmigError, match="the runner did not start: exit code 1"):
        Process(Place(HERE / "kernels.ptx", python="false"))


def test_a_kept_program_is_run_again(native_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(generate(3, 1).text())
    command = [sys.executable, "-m", "tests.differential", "--replay", str(path), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "under xMIG: no difference\n"), done.stderr


def test_kernels_for_gpus_are_those_of_their_source() -> None:
    """Rebuilding is tests/test_kernels.py's; here: every kernel of the one is in the other."""
    names = {line.split("(")[1].split(",")[0] for line in (HERE / "kernels.c").read_text().splitlines()
             if line.startswith("XMIG_KERNEL(")}  # fmt: skip
    text = (HERE / "kernels.ptx").read_text()
    assert names == {line.split()[2].strip("(") for line in text.splitlines() if line.startswith(".visible .entry")}
