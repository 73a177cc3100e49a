"""What a start does not need, it does not import and does not do; a start is an upgrade's interruption."""

from __future__ import annotations

import json
import subprocess
import sys

from .conftest import MakeNode

# Which modules are there when the daemon opens its front, and what the collector of garbage has done until then.
CODE = """
import gc, json, os, sys
from xmigd import main

def opened(self, app):
    # After this, the program goes on for days: with a collector that leaves alone what it began with.
    reported = {
        "modules": [name for name, module in sys.modules.items() if module is not None],
        "collections": sum(each["collections"] for each in gc.get_stats()),
        "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
    }
    print(json.dumps(reported), flush=True)
    os._exit(0)

def be_lean():
    before()
    from xmigd.api.front import Front
    Front.open = opened

before, main.be_lean = main.be_lean, be_lean
main.main()
"""
# Alembic: 10 MB, for upgrades only. Rich: tracebacks in colour. The others are of other programs, or of some requests.
HEAVY = {"alembic", "mako", "rich", "typer", "httpx", "jinja2", "pynvml", "xmigd.cli", "xmigd.web"}


def test_a_start(make_node: MakeNode) -> None:
    node = make_node()
    node.start()  # the database is made
    node.kill()
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=node.environment, cwd=node.folder, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout.splitlines()[-1])
    assert HEAVY.intersection(reported["modules"]) == set()
    assert reported["collects"]
    assert reported["frozen"] > 100_000
    assert reported["collections"] < 50  # those of Python's own start
