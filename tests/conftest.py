"""Fixtures for every test that needs the real thing: the native programs, and a daemon of the test's own."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import harness
from tests.harness import ROOT
from xmigd.demo.node import Node
from xmigd.native import find_native_dir

# How long an example takes says something of the machine only: a process that is stopped for a moment is no defect.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A run in a shell's background is born with SIGINT ignored, and so would be the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# In this order workers take the files of these folders, before all others: those that last longest. So no worker still
# has one of them when the others have nothing left to do.
LONGEST_FIRST = (
    "frameworks", "gpu", "conformance", "migration", "packages", "recovery", "crash", "transfers", "slurm", "daemon",
    "criu", "collectives", "fleet", "differential", "web", "cli", "api", "peers", "consolidation", "names", "sharing",
    "store", "connections", "test_demo.py",
)  # fmt: skip

LOG_LINES = 200  # of a daemon, with a failed test

# Programs import numpy, whose library would start a thread for each processor: a quarter of what the import takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What is collected stays. Looking through it again and again while it grows is a third of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="write docs/screenshots again")
    parser.addoption("--thorough", action="store_true", help="all parameters of the tests that are marked `sampled`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as `brought` what `make check` leaves out, leaves out what is not in the sample, and sorts what workers
    take."""
    if not config.getoption("--thorough") and not any("::" in word for word in config.args):
        left_out = not_sampled(items, commit())
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: min(places.get(path, len(places)) for path in (item.path, *item.path.parents)))
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & {"frameworks", "chromium"} or item.path.is_relative_to(ROOT / "tests" / "packages"):
            item.add_marker(pytest.mark.brought)


def not_sampled(items: list[pytest.Item], chance: str) -> set[pytest.Item]:
    """Of each test that is marked `sampled(N)`, all parameters but one in N. Which ones that are is by chance, the same
    for all workers, and other ones for the next commit (docs/decisions/0098)."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for parameters in tests.values():
        marker = parameters[0].get_closest_marker("sampled")
        assert marker is not None
        parameters.sort(key=lambda item: hashlib.sha256(f"{chance} {item.nodeid}".encode()).digest())
        left_out.update(parameters[-(-len(parameters) // marker.args[0]) :])
    return left_out


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:  # fmt: skip
    """With a failed test comes what its daemons wrote last: what fails once in a hundred runs cannot be looked at
    again. It is rendered without the garbage collector: Python 3.11 cannot read a source while it reads another one,
    and what is collected may leave a traceback, for which one is read."""
    gc.disable()
    try:
        report = yield
    finally:
        gc.enable()
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            log = getattr(value, "log", None)
            if isinstance(log, Path) and log.exists():
                last = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                report.sections.append((f"log of {name}", "\n".join(last)))
    return report


@pytest.fixture(scope="session")
def native_dir() -> Path:
    """The folder with xmig-server and libcuda.so.1; `make build` puts it there, XMIG_NATIVE_DIR names another."""
    return find_native_dir(None)


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """The Python with PyTorch, CuPy, JAX and Triton. A test without it is skipped and says why."""
    environment = ROOT / ".venv-frameworks"
    if not (environment / "stamp").exists():
        why = ROOT / ".cache" / "frameworks"
        reported = why.read_text().strip() if why.exists() else "they are not installed"
        pytest.skip(f"{reported} (packaging/setup/frameworks.sh)")
    return environment / "bin" / "python"


@pytest.fixture
def daemon(native_dir: Path) -> Iterator[Node]:
    """A real xmigd with two cpu devices, and nothing left of it afterwards."""
    with harness.own_node(native_dir) as node:
        yield node
