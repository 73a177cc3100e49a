"""What kernels print is in their job's log, and in the daemon's under the name of the job."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import harness
from tests.harness import COMPILER, ROOT
from xmigd.demo.node import Node

HERE = Path(__file__).parent


def test_kernels_print_line_by_line(daemon: Node, tmp_path: Path) -> None:
    image = tmp_path / "prints.so"
    subprocess.run(
        [COMPILER, "-O1", "-shared", "-fPIC", f"-I{ROOT / 'shim' / 'include'}", HERE / "prints.c", "-o", image],
        check=True,
    )  # fmt: skip
    program = harness.start(daemon, HERE / "programs" / "stepwise.py", kernels=image)
    process = program.until("running")
    harness.go(program)
    harness.steps(program, 3)

    def printed() -> list[str]:
        return [line for line in daemon.log.read_text().splitlines() if "a kernel prints 1" in line]

    harness.wait_until(lambda: bool(printed()), "the line is in the log while the server lives")
    assert all(f"process={process['id'][:12]}" in line for line in printed())
    # Natively it goes to the program's standard output: its owner finds it in the job's log.
    harness.wait_until(lambda: "printed: a kernel prints 1" in program.lines("server"), "and in the job's")
    assert "a kernel prints" not in harness.output(program)
