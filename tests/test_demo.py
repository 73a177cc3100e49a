"""The demo, as everybody who tries xMIG runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmigd.demo import main
from xmigd.demo.node import Node, Program


def test_on_a_machine_that_is_busy_in_the_beginning_only(
    native_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All strikes fall into the second training, even if it is much faster than the first one was."""
    finish = main.finish

    def slow_at_first(node: Node, program: Program, name: str) -> main.Training:
        training = finish(node, program, name)
        if name == "undisturbed":
            training.result["seconds"] *= 4
        return training

    monkeypatch.setattr(main, "finish", slow_at_first)
    code = main.run()
    said = capsys.readouterr().out
    assert code == 0, said
    assert "through 8 recoveries" in said
    assert "across a live migration" in said
