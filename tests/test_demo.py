"""The demo, as everybody who tries xMIG runs it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from xmigd.demo import main, moving, packing, ranks
from xmigd.demo import training as trainings
from xmigd.demo.node import Node, Program

LATE = 4.0  # seconds, in which a training that does not wait is over


def test_on_a_machine_that_is_busy_in_the_beginning_only(
    native_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All injections fall into the second training, even if it is much faster than the first one was, and also those
    that come so late that it would be over. So does the move into the third one."""
    finish, inject, move = trainings.finish, main.inject, moving.move
    injected = 0

    def slow_at_first(node: Node, program: Program, name: str, *rest: Any) -> trainings.Training:
        training = finish(node, program, name, *rest)
        if name == "undisturbed":
            training.result["seconds"] *= 4
        return training

    def late_at_last(program: Program, kind: str) -> None:
        nonlocal injected
        injected += 1
        if injected > 7:
            time.sleep(LATE)
        inject(program, kind)

    def late(node: Node, program: Program) -> dict[str, Any]:
        time.sleep(LATE)
        return move(node, program)

    monkeypatch.setattr(main, "finish", slow_at_first)
    monkeypatch.setattr(main, "inject", late_at_last)
    monkeypatch.setattr(moving, "move", late)
    code = main.run()
    reported = capsys.readouterr().out
    assert code == 0, reported
    assert "through 8 recoveries" in reported
    assert "across a live migration" in reported
    # What README shows of it has the same columns.
    shown = (ROOT / "README.md").read_text().partition("<!-- demo -->")[2].partition("<!-- /demo -->")[0]
    heads = [
        line.rstrip()
        for line in reported.splitlines()
        if line.split()[:2] in (["expected", "detected"], ["fault", "stall"])
    ]
    assert len(heads) == 2
    assert all(head in shown for head in heads), heads


def test_of_four_ranks(native_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Where several fall into one column, the most urgent is shown: each replay is to have columns of its own.
    monkeypatch.setattr(ranks, "WIDTH", 20_000)
    code = main.run(["--ranks", "4", "--faults", "3"])
    reported = capsys.readouterr().out
    assert code == 0, reported
    assert "the weights of all 4 ranks" in reported
    assert "through 3 recoveries" in reported
    assert reported.count(", packed") == reported.count(", and back") == 2
    assert "replaced for good" in reported
    lanes = [line for line in reported.splitlines() if line.startswith("rank ")]
    assert len(lanes) == 4
    assert all("X" in lane and "p" in lane and "s" in lane for lane in lanes), reported


def test_trainings_are_packed_and_spread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of them: what takes time is to start them."""
    monkeypatch.setattr(packing, "DEVICES", "cpu:0,cpu:1")
    monkeypatch.setattr(packing, "TRAININGS", 3)
    code = main.run(["--consolidate", "--epochs", "12"])
    reported = capsys.readouterr().out
    assert code == 0, reported
    assert "packed and spread" in reported
