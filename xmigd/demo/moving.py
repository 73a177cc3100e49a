"""The demo's end: the same training once more, moved to the other device while it runs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError

MIB = 1 << 20
PHASES = ("preparing", "copying", "committing", "handing_over", "taking")


def move(node: Node, program: Program) -> dict[str, Any]:
    """Move it to the other device while it runs, and return the migration's record."""
    info = program.until("running")
    target = next(device for device in ("cpu:0", "cpu:1") if device != info["device"])
    operation = node.client.post("/v1/migrations", {"process": info["id"], "target": target})
    while operation["state"] in ("pending", "running"):
        operation = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=20)
    if operation["state"] != "succeeded":
        error = operation["error"] or {}
        raise XmigError(f"the migration {operation['state']}: {error.get('detail')}", hint=f"see {node.log}")
    found: dict[str, Any] = node.client.get(f"/v1/migrations/{operation['result']['migration']}")
    return found


def show(console: Console, migration: dict[str, Any]) -> None:
    """Its phases, rounds and figures. What is not known is a dash."""
    reached = {phase["name"]: phase["at"] for phase in migration["phases"]}
    names = [name for name in PHASES if name in reached]
    console.print(f"[bold]{'':4}{'phase':16}{'took':>10}[/bold]")
    for name, following in zip(names, [*names[1:], "resumed"], strict=True):
        console.print(f"{'':4}{name.replace('_', ' '):16}{_ms((reached[following] - reached[name]) * 1e3)}")
    for each in migration["iterations"]:
        console.print(f"{'':4}round {each['n']}: {_mib(each['copied_bytes'])} copied in {each['ms']:.1f} ms, "
                      f"{_mib(each['dirty_bytes'])} changed meanwhile")  # fmt: skip
    live, still = _mib(migration["total_bytes"]), _ms(migration["downtime_ms"]).strip()
    expected = _ms(migration["expected_downtime_ms"]).strip()
    console.print(f"{'':4}{live} live; it stood still for {still}, expected were {expected}")


def _ms(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>7.1f} ms"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f} MiB"
