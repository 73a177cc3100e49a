"""Kernels and expected outputs of the recovery programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from xmigd.demo.node import Node, Program

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.compile_kernels(tmp_path_factory.mktemp("kernels"))


Starter = Callable[..., Program]


@pytest.fixture
def start(daemon: Node, kernels: Path) -> Starter:
    """Start a program of ``programs`` by name; it waits for ``harness.go``."""

    def starter(name: str, *arguments: object, **options: Any) -> Program:
        return harness.start(daemon, PROGRAMS / f"{name}.py", *arguments, kernels=kernels, **options)

    return starter


@pytest.fixture(scope="session")
def outputs() -> dict[tuple[object, ...], str]:
    return {}


@pytest.fixture
def undisturbed(daemon: Node, kernels: Path, outputs: dict[tuple[object, ...], str]) -> Callable[..., str]:
    """What a program prints when nothing happens to it. It is run once per session."""

    def run(name: str, *arguments: object, **options: Any) -> str:
        if (name, *arguments) not in outputs:
            path = PROGRAMS / f"{name}.py"
            outputs[name, *arguments] = harness.run(daemon, path, *arguments, kernels=kernels, **options)
        return outputs[name, *arguments]

    return run
