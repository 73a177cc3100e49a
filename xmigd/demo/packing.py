"""`xmigctl demo --consolidate`: six trainings on four devices are packed onto two, and spread again, while they run.

All end with the weights of an undisturbed run, to the last bit.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from xmigd.demo.node import Node, Program
from xmigd.demo.training import Training, finish, reach, start
from xmigd.errors import XmigError

DEVICES = "cpu:0,cpu:1,cpu:2,cpu:3"
TRAININGS, OF_A_DEVICE = 6, 3
# Devices that share a processor say nothing of slow-downs: here the bound is off, and nobody is watched.
UNBOUNDED = {"max_slow_down": 100.0, "assumed_busy_share": 0.3}


def run(console: Console, node: Node, epochs: int) -> bool:
    """Did all of them agree in every bit?"""
    console.print(f"[bold]xmigd[/bold] runs with four cpu devices and its database in {node.folder}")
    with console.status("training a classifier of handwritten digits, undisturbed"):
        quiet = finish(node, start(node, "undisturbed", epochs), "undisturbed")
    console.print(
        f"A classifier of handwritten digits ({quiet.result['steps']} steps), undisturbed: {quiet.seconds:.1f} s"
    )
    console.print(f"{TRAININGS} of these at once, scattered over the devices:\n")
    running = [(start(node, f"training-{n}", epochs, followed=True), Training()) for n in range(1, TRAININGS + 1)]
    _go_on(running, 1)
    packed = _apply(console, node, {"objective": "free_devices", "max_jobs_per_device": OF_A_DEVICE})
    _go_on(running, 2)
    console.print("\nAnd out again:\n")
    spread = _apply(console, node, {"objective": "balance"})
    for program, training in running:
        finish(node, program, program_name(program), training)
    console.print()
    return _compare(console, quiet, [training for _, training in running], packed, spread)


def program_name(program: Program) -> str:
    """Its job's: what its output is called."""
    return str(program.node.client.get(f"/v1/jobs/{program.job}")["name"])


def _go_on(running: list[tuple[Program, Training]], epochs: int) -> None:
    """Until all have done so many: they are in the middle of it then."""
    for program, training in running:
        reach(program, training, epochs, time.monotonic())


def _apply(console: Console, node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Plan, show, apply. Returns the plan."""
    plan: dict[str, Any] = node.client.post("/v1/consolidation-plans", UNBOUNDED | request)
    _show(console, plan)
    operation = node.client.start(f"/v1/consolidation-plans/{plan['id']}/apply", {"guard_seconds": 0})
    while operation["state"] in ("pending", "running"):
        operation = node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=20)
    if operation["state"] != "succeeded":
        error = operation["error"] or {}
        raise XmigError(f"the consolidation {operation['state']}: {error.get('detail')}", hint=f"see {node.log}")
    stood = [
        move["downtime_ms"] for move in node.client.get("/v1/migrations", limit=len(plan["moves"]))
        if move["downtime_ms"] is not None
    ]  # fmt: skip
    longest = f"; the longest standstill was {max(stood):.1f} ms" if stood else ""
    console.print(f"\n{operation['result']['moved']} trainings were moved while they ran{longest}")
    return plan


def _show(console: Console, plan: dict[str, Any]) -> None:
    console.print(f"[bold]{'':4}{'device':10}{'before':40}after[/bold]")
    for before, after in zip(plan["before"], plan["after"], strict=True):
        console.print(f"{'':4}{before['device']:10}{_names(before):40}{_names(after)}")


def _names(device: dict[str, Any]) -> str:
    return ", ".join(sorted(one["job_name"] for one in device["processes"])) or "free"


def _compare(
    console: Console, quiet: Training, trainings: list[Training], packed: dict[str, Any], spread: dict[str, Any]
) -> bool:
    console.print(f"[bold]{'':16}{'undisturbed':>14}{'':4}moved[/bold]")
    hashes = "  ".join(training.result["weights"][:12] for training in trainings)
    console.print(f"{'weights':16}{quiet.result['weights'][:12]:>14}{'':4}{hashes}")
    problems = []
    different = sum(
        training.losses != quiet.losses or training.result["weights"] != quiet.result["weights"]
        for training in trainings
    )
    if different:
        problems.append(f"{different} of {len(trainings)} trainings differ")
    used = sum(bool(device["processes"]) for device in packed["after"])
    if used != TRAININGS // OF_A_DEVICE:
        problems.append(f"they were packed onto {used} devices")
    if not all(device["processes"] for device in spread["after"]):
        problems.append("they were not spread over all devices")
    if problems:
        console.print(f"[bold red]Not identical, or not packed:[/bold red] {'; '.join(problems)}.")
        return False
    console.print(f"[bold green]Identical:[/bold green] every one of {len(trainings)} × {len(quiet.losses)} losses and "
                  "all final weights, to the last bit, packed and spread.")  # fmt: skip
    return True
