"""What `make checks` does, with a tree whose targets are done at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import checks
from xmigd import measurements

MAKEFILE = """
check:
\t@test ! -e $$HOME/left || echo "the same home"
\t@touch built; echo "== 5 passed in 0.1s =="
test:
\t@test "$$PIP_EXTRA_INDEX_URL" = here && test -z "$$CMAKE_CXX_COMPILER_LAUNCHER"
\t@test ! -e built && test ! -e $$HOME/left && touch $$HOME/left
\t@echo "== 7 passed in 0.1s =="
"""


def git(*words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    monkeypatch.chdir(tree)
    (tree / "Makefile").write_text(MAKEFILE)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "a tree")
    return tree


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["checks", *words])
    return checks.main()


def test_both_are_measured(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / ".git" / "info" / "exclude").write_text("/build/\n/docs/\n")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "here")
    monkeypatch.setenv("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
    for _ in range(2):  # what one run leaves is not there for the next
        assert run(monkeypatch) == 0
    written = measurements.read(tree / "docs/measurements/checks.json")
    assert [(row.name, row.target, row.unit) for row in written.rows] == [
        ("check, clean clone", 900, "s"), ("check, built tree", 480, "s"), ("test, clean clone", 2100, "s"),
    ]  # fmt: skip
    assert [row.conditions.rpartition("; ")[2] for row in written.rows] == [
        "5 passed in 0.1s", "5 passed in 0.1s", "7 passed in 0.1s",
    ]  # fmt: skip
    assert (tree / "docs/measurements/checks.md").exists()


def test_what_fails_is_not_measured(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "Makefile").write_text("check:\n\t@echo no; exit 1\n")
    assert run(monkeypatch, "--only", "check") == 1
    assert "there are changes" in capsys.readouterr().err
    git("commit", "--all", "--quiet", "--message", "a failure")
    assert run(monkeypatch, "--only", "check") == 1
    assert "make check failed: build/checks/check-clean-clone.log" in capsys.readouterr().err
    assert not (tree / "docs").exists()
