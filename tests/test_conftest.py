"""What all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT

# Whenever garbage is looked for, there is some that reads a source.
FAILS = """
import ast
import gc
import pytest

class Left:
    def __init__(self):
        self.own = self

    def __del__(self):
        ast.parse("a + b")
        Left()

@pytest.fixture
def seldom():
    usual = gc.get_threshold()
    yield
    gc.set_threshold(*usual)  # what is imported afterwards is none of this

def test_it(seldom):
    Left()
    gc.set_threshold(20)
    assert 1 == 2
"""
MORE = "def more(a, b):\n    return {a: [b, (a, {b: [a, (b, a, [[[a + b]]])]})]}\n\n"  # deep


def test_a_failed_test_is_shown_whatever_is_collected_meanwhile(tmp_path: Path) -> None:
    program = tmp_path / "test_it.py"
    program.write_text(FAILS + 50 * MORE)
    # Plain: what pytest imports only then is not rewritten, for which it would be read, too.
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", "--assert=plain"]
    done = subprocess.run([*command, program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, "assert 1 == 2" in done.stdout) == (1, True), done.stdout + done.stderr
    assert "AST constructor" not in done.stdout


SAMPLED = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(2))
def test_many(first, second):
    pass

def test_one():
    pass
"""


def test_a_sample_is_the_same_everywhere_and_another_one_at_each_commit(tmp_path: Path) -> None:
    program = tmp_path / "test_it.py"
    program.write_text(SAMPLED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sampled: of its parameters\n")

    def chosen(chance: str, *options: str) -> set[str]:
        patch = f"import tests.conftest, sys, pytest; tests.conftest.commit = lambda: {chance!r}; "
        options = ("-p", "tests.conftest", "-c", str(tmp_path / "pytest.ini"), "--collect-only", "-q", *options)
        command = [sys.executable, "-c", patch + "sys.exit(pytest.main(sys.argv[1:]))", *options]
        # With options of somebody else's, its list looks different.
        plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True, timeout=300)
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    samples = [chosen(chance, str(program)) for chance in ("a", "a", "b")]
    assert [len(each) for each in samples] == [4, 4, 4]  # a third of eight, and what is not sampled
    assert all("test_one" in each for each in samples)
    assert samples[0] == samples[1] != samples[2]
    assert len(chosen("a", "--thorough", str(program))) == 9
    assert len(chosen("a", f"{program}::test_many")) == 8
