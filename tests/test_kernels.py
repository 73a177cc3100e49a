"""The cuda device's own kernels are what their sources say: rebuilt by the compiler that made them, and compared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "shim" / "device" / "cuda"
LOCK = ROOT / "packaging" / "locks" / "frameworks.txt"


def locked() -> str:
    """The compiler's version."""
    found = re.search(r"^nvidia-cuda-nvcc==(\S+)$", LOCK.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def compiler() -> Path:
    """Of that version: PyPI's, as .venv-frameworks has it, or the machine's own."""
    places = [str(path) for path in (ROOT / ".venv-frameworks").glob("lib/python*/site-packages/nvidia/cu13/bin")]
    found = shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", os.defpath)]))
    if found is None:
        pytest.skip("there is no nvcc: packaging/setup/frameworks.sh installs one")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if f"V{locked()}" not in said:
        pytest.skip(f"{found} is not version {locked()}, which packaging/locks asks for")
    return Path(found)


@pytest.mark.parametrize("name", ["hash", "faults"])
def test_the_version_is_the_locked_one(name: str) -> None:
    assert f"V{locked()}" in (KERNELS / f"{name}.ptx").read_text(), "rebuild it: shim/device/cuda/build.sh"


def test_rebuilt_kernels_are_the_same(tmp_path: Path) -> None:
    nvcc = compiler()
    for file in ("build.sh", "hash.cu", "faults.cu"):
        shutil.copy(KERNELS / file, tmp_path)
    path = f"{nvcc.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run([tmp_path / "build.sh"], env=os.environ | {"PATH": path}, check=True)
    for name in ("hash", "faults"):
        assert (tmp_path / f"{name}.ptx").read_text() == (KERNELS / f"{name}.ptx").read_text(), name
