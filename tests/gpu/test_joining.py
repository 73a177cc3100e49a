"""The part `init`: its guesses, with what two GPUs would report in place of them, and a rehearsal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import forked
from tests.gpu import joining
from tests.gpu.bench import Bench
from tests.gpu.joining import Variant
from xmigd.measurements import Row

LONG = 300.0  # seconds, on a machine that runs other tests beside
LOG = """\
[2026-11-29 20:00:00.000001] host:7:9 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 - Init START
[2026-11-29 20:00:00.570002] host:7:9 [0] NCCL INFO Init timings - ncclCommInitRank: rank 0 nranks 2 total 0.57 \
(kernels 0.17, alloc 0.10, bootstrap 0.01, allgathers 0.00, topo 0.05, graphs 0.00, connections 0.23, rest 0.01)
host:7:9 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 0 nranks 1 total 0.02 (kernels 0.01, rest 0.01)
host:7:9 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 1 nranks 2 total 0.12 (kernels 0.02, rest 0.10)
"""


def test_what_nccl_accounts_for() -> None:
    first, second = joining.timings(LOG)
    assert (first["total"], first["kernels"], first["connections"], first["rest"]) == (0.57, 0.17, 0.23, 0.01)
    assert second == {"total": 0.12, "kernels": 0.02, "rest": 0.1}
    assert joining.timings("NCCL INFO nothing of that kind") == []


def variant(first: float, second: float, *, kernels: float = 0.1, processors: int = 32) -> Variant:
    """Of two runs, of which rank 1 is the slower rank."""
    runs = [
        [
            {"rank": rank, "first_s": first - 0.01 + rank / 100, "second_s": second, "processors": 32}
            for rank in range(2)
        ]
    ] * 2
    phases = [{"total": first, "kernels": kernels}] * 4
    return Variant(runs, (phases, phases), ["574 ms to make it"] * 2, {processors})


def test_each_guess_explains_so_many_milliseconds() -> None:
    native = {
        "plain": variant(0.3, 0.1), "settings": variant(0.35, 0.1), "own": variant(0.29, 0.1),
        "everywhere": variant(0.33, 0.1),
    }  # fmt: skip
    xmig = {
        "plain": variant(0.6, 0.2), "later": variant(0.5, 0.2), "own": variant(0.45, 0.2),
        "no standbys": variant(0.4, 0.15, kernels=0.18, processors=24),
    }  # fmt: skip
    found = {row.name.removeprefix("init: "): row for row in joining.rows("two GPUs", native, xmig)}
    assert {name: row.value for name, row in found.items() if not name.startswith("NCCL")} == {
        "beyond native": 300, "standbys that start meanwhile": 200, "first in its process, beyond native": 50,
        "settings of servers": 50, "connections with the communicator": 100, "more GPUs visible than used": 140,
        "contexts on GPUs that are not used": 30, "processors that servers lack": 0,
    }  # fmt: skip
    assert found["NCCL, first, kernels"].value == pytest.approx(80)
    assert "600 ms, natively 300; servers report: 574 ms to make it" in found["beyond native"].conditions


def test_rehearsal(frameworks: Path, native_dir: Path, tmp_path: Path) -> None:
    """Under xMIG, with the program as it is, on null devices."""
    bench = Bench(
        tmp_path, tmp_path, python=str(frameworks), rehearsal=True, end=time.monotonic() + LONG,
        make_node=forked.Node,
    )  # fmt: skip
    rows: dict[str, Row] = {row.name: row for row in joining.measure(bench)}
    assert set(rows) == {
        f"init: {name}"
        for name in (
            "beyond native", "standbys that start meanwhile", "more GPUs visible than used",
            "processors that servers lack",
        )
    }  # fmt: skip
    assert rows["init: beyond native"].value > 0
    assert rows["init: processors that servers lack"].value == 0
    assert "an unknown number" not in rows["init: processors that servers lack"].conditions
