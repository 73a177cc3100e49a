"""What the tests with real programs share: kernels built on the spot, both libcudarts, programs to be armed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmigd.demo.node import Node, Program

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance" / "programs"
COMPILER = os.environ.get("CC", "cc")


def compile_kernels(folder: Path) -> Path:
    """The image of tests/conformance/kernels.c."""
    image = folder / "kernels.so"
    source = ROOT / "tests" / "conformance" / "kernels.c"
    subprocess.run(
        [COMPILER, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'shim' / 'include'}", source,
         "-o", image],
        check=True,
    )  # fmt: skip
    return image


@functools.cache
def cudart(version: str) -> Path:
    """The libcudart of the PyPI package for CUDA 12 or 13, as it was installed."""
    package = {"12": "nvidia-cuda-runtime-cu12", "13": "nvidia-cuda-runtime"}[version]
    files = importlib.metadata.files(package) or []
    return Path(next(f for f in files if f.name == f"libcudart.so.{version}").locate()).resolve()


def start(
    node: Node,
    program: Path,
    *arguments: object,
    kernels: Path,
    runtime: str = "13",
    device: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Program:
    """Start a program; it has shaken hands and waits for `go`, so that faults can be armed at any record of it."""
    variables = {"CUDART": str(cudart(runtime)), "KERNELS": str(kernels), "PYTHONPATH": str(CONFORMANCE)}
    command = [sys.executable, CONFORMANCE.parent / "start.py", program, *map(str, arguments)]
    options = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    started = node.program(
        command, name=program.stem, device=device, environment=variables | dict(environment or {}), **options
    )
    assert started.process.stdout is not None
    if started.process.stdout.readline() != "ready\n":
        _, said = started.process.communicate()
        raise AssertionError(f"{program.name} did not start: {said}")
    started.until("running")
    return started


def go(program: Program) -> None:
    """Let it begin."""
    assert program.process.stdin is not None
    program.process.stdin.write("go\n")
    program.process.stdin.flush()


def output(program: Program, timeout: float = 120) -> str:
    """What it printed. Fails with what it said when it did not end well."""
    try:
        out, err = program.process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        program.process.kill()
        out, err = program.process.communicate()
        raise AssertionError(f"it hangs; so far: {out[-500:]} {err[-2000:]} {program.info()}") from None
    assert program.process.returncode == 0, f"exit code {program.process.returncode}: {out[-500:]} {err[-3000:]}"
    return out


def run(node: Node, program: Path, *arguments: object, **options: Any) -> str:
    """Start, go, output."""
    started = start(node, program, *arguments, **options)
    go(started)
    return output(started)


def have(tool: str) -> bool:
    """Is there such a program?"""
    return shutil.which(tool) is not None
