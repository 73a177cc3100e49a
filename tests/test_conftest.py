"""What all tests share."""

from __future__ import annotations

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
