"""The module that `xmigctl run --lossy-optimizer-state` loads into programs, with real optimizers of PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from xmigd.cli.starting import name_optimizer_state

HERE = Path(__file__).parent


def environment(folder: Path, entries: str) -> dict[str, str]:
    """Of a program, with a sitecustomize of its own."""
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text("import os\nos.environ['CHAINED'] = '1'\n")
    found = os.environ | {"PYTHONPATH": str(folder / "own")}
    name_optimizer_state(found, entries)
    before = dict(found)
    name_optimizer_state(found, entries)  # by a launcher that the program is
    assert found == before
    return found


def test_the_state_of_all_optimizers_is_named(frameworks: Path, tmp_path: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", HERE / "shim.c"], check=True)
    variables = environment(tmp_path, "exp_avg,exp_avg_sq,momentum_buffer")
    variables["LD_LIBRARY_PATH"] = str(tmp_path)
    command = [frameworks, HERE / "optimizers.py", tmp_path / "report"]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert run.stderr == "xMIG: optimizer state is not named any more: ZeroDivisionError: division by zero\n"


def test_other_programs_notice_nothing(tmp_path: Path) -> None:
    """Their own sitecustomize is found, and nothing is imported that they did not import."""
    shown = "os.environ['CHAINED'], 'torch' in sys.modules, sys.modules['sitecustomize'].__file__"
    program = f"import os, sys; print({shown})"
    variables = environment(tmp_path, "exp_avg")
    run = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert run.stdout.split()[:2] == ["1", "False"]
    assert run.stdout.split()[2] == str(tmp_path / "own" / "sitecustomize.py")
    assert run.stderr == ""
