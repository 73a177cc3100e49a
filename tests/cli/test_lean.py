"""A command loads what it needs: what is slow to load is what the daemon needs, and what a few commands need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from xmigd.cli.app import MODULES, make_app

from .conftest import Scripted, ctl, ctl_process

HEAVY = ("alembic", "asyncio", "fastapi", "httpx", "jeepney", "pydantic", "sqlalchemy", "starlette", "structlog",
         "uvicorn")  # fmt: skip
LOADED = f"""
import sys
from xmigd.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print([name for name in {HEAVY} if name in sys.modules], end.code or 0)
"""
COMMANDS = ("ps", "job list", "device list", "fault list", "recoveries", "token list", "ps -a --limit 5", "events",
            "op list", "audit")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_heavy_is_loaded(scripted: Scripted, command: str) -> None:
    scripted.answer = lambda *_: (200, [])
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *command.split()], env=scripted.environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr


def test_every_command_is_found_alone() -> None:
    """The table of modules says what each registers: a command that it lacks would not be found."""
    for module, commands in MODULES.items():
        found = get_command(make_app([module]))
        assert set(found.commands) == set(commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [("--url", "ps", "-h"), ("--help",), ()])
def test_help_has_every_command(scripted: Scripted, arguments: tuple[str, ...]) -> None:
    shown = ctl(scripted, *arguments)
    for commands in MODULES.values():
        for command in commands:
            assert f" {command} " in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("ps", "--limit", "0"), "greater than or equal to 1"),
        (("ps", "--limit", "many"), "valid integer"), (("ps", "-o", "xml"), "xml"),
        (("fault", "inject", "j", "--kind", "bite"), "bite"), (("fault", "ack", "-1"), "-1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_as_before(scripted: Scripted, arguments: tuple[str, ...], reported: str) -> None:
    done = ctl_process(scripted, *arguments)
    assert (done.returncode, reported in done.stderr) == (2, True), done.stderr
    assert scripted.requests == []
