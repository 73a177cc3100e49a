"""Files that are made from the code: `make docs` writes them, test_docs.py compares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.docs import api, cli, errors, settings
from tests.harness import ROOT
from xmigd.cli.completion import Shell, script

DOCS = ROOT / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings.page,
    "docs/errors.md": errors.page,
    "docs/reference-cli.md": cli.page,
    "docs/reference-api.md": api.page,
    # What packages install.
    "packaging/completion/xmigctl.bash": partial(script, Shell.bash),
    "packaging/completion/_xmigctl": partial(script, Shell.zsh),
    "packaging/completion/xmigctl.fish": partial(script, Shell.fish),
}
