"""docs/errors.md: every code that a problem document, or an error of the command line, can have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

from tests.docs.markdown import MADE, table
from tests.harness import ROOT
from xmigd.ipc.messages import MoveFailed
from xmigd.problems import PROBLEMS


def page() -> str:
    rows = [(f"`{code}`", meaning, what) for code, (meaning, what) in sorted(PROBLEMS.items())]
    return f"""{MADE}
# Errors

A request that is refused changes nothing. The answer is a problem document (RFC 9457,
`application/problem+json`) with `status`, `code` (below: stable, for programs), `detail` (what and why, for
people), `hint` (what to do), and where they apply `phase` and `operation`, and `process_location`: where the
process lives now (`source`, `target`, `host`, `file`, `checkpoint` or `lost`). `xmigctl` prints the same on
standard error, as it is with `-o json`, and ends with [an exit code](reference-cli.md#exit-codes).

{table(("code", "what it means", "what to do"), rows)}"""


def codes_in_source() -> set[str]:
    """Every literal that is given as a code: `code="..."`, a class's `code`, the second argument of problem(), the
    first of Reason() and _fail(); and those of the servers."""
    found = {code for path in (ROOT / "xmigd").rglob("*.py") for code in _codes(ast.parse(path.read_text()))}
    return found | set(get_args(MoveFailed.model_fields["code"].annotation))


def _codes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if name == "problem" and len(node.args) > 1:
                given.append(node.args[1])
            if name in ("Reason", "_fail") and node.args:  # of plans, and of moves that fail
                given.append(node.args[0])
        elif isinstance(node, ast.ClassDef):
            given = [
                statement.value for statement in node.body
                if isinstance(statement, ast.Assign) and any(getattr(t, "id", "") == "code" for t in statement.targets)
            ]  # fmt: skip
        else:
            continue
        for value in given:
            options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            yield from (
                part.value for part in options if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
