"""What the tests of the conformance programs share with `make gpu`: which there are, and how they are disturbed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAMS = sorted(p.stem for p in (FOLDER / "programs").glob("*.py") if p.stem not in ("calls", "nodes"))
OF_TWO_DEVICES = ("graph_ground", "node_contexts", "second_device", "two_devices")
# Records at which the server is killed. Programs have from a few dozen records to some thousands.
KILLS = (2, 5, 11, 23, 60, 130, 280, 600, 1300, 3000)
COMPILER = os.environ.get("CC", "cc")
HEADERS = FOLDER.parent.parent / "shim" / "include"


def compile_kernels(folder: Path) -> Path:
    """The image of kernels.c, for cpu devices."""
    image = folder / "kernels.so"
    subprocess.run(
        [COMPILER, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", FOLDER / "kernels.c",
         "-o", image],
        check=True,
    )  # fmt: skip
    return image
