"""`xmigctl demo --ranks N`: the training by several processes, each on a device, which average their gradients.

The GPU server of one rank after the other is killed. All ranks recover together, and end with the weights of an
undisturbed run, to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

from rich.console import Console
from rich.markup import escape

from xmigd.demo.node import Node, Program
from xmigd.demo.training import Training, finish, milliseconds, reach, start
from xmigd.timeline import draw

WIDTH = 110  # characters of the time line


def devices(ranks: int) -> str:
    """One for each, and one that replaces another."""
    return ",".join(f"cpu:{number}" for number in range(ranks + 1))


def run(console: Console, node: Node, chance: random.Random, ranks: int, kills: int, epochs: int) -> bool:
    """Did all of them agree in every bit?"""
    console.print(f"[bold]xmigd[/bold] runs with {ranks + 1} cpu devices and its database in {node.folder}")
    with console.status(f"{ranks} ranks train a classifier of handwritten digits, undisturbed"):
        quiet = finish(node, start(node, "undisturbed", epochs, ranks=ranks), "undisturbed")
    console.print(f"{ranks} ranks train a classifier of handwritten digits ({quiet.result['steps']} steps, gradients "
                  f"averaged by NCCL), undisturbed: {quiet.seconds:.1f} s, "
                  f"accuracy {quiet.result['accuracy']:.2%}")  # fmt: skip
    console.print(f"The same, {kills} times the GPU server of a rank killed; time since the kill:\n")
    program, training = start(node, "disturbed", epochs, followed=True, ranks=ranks), Training()
    recoveries = disturb(console, program, training, chance, ranks, kills, epochs)
    moves = move_all(console, program, training, ranks)
    finish(node, program, "disturbed", training)
    console.print()
    for line in draw(seen(program, spans=1000)["ranks"], WIDTH, time.time()):
        console.print(escape(line))
    return compare(console, quiet, training, recoveries, kills, ranks) and moves


def seen(program: Program, **which: int) -> dict[str, Any]:
    """The ranks of its job."""
    return dict(program.node.client.get(f"/v1/jobs/{program.job}/ranks", **which))


def disturb(
    console: Console, program: Program, training: Training, chance: random.Random, ranks: int, kills: int, epochs: int
) -> list[dict[str, Any]]:  # fmt: skip
    """Kill servers at random moments of the training. The recoveries, each of which is printed as it is over."""
    began = time.monotonic()
    # Of 30 epochs the pipe has room for seven, and then ranks are moved.
    moments = sorted(chance.uniform(0.05, 0.4) * epochs for _ in range(kills))
    console.print(f"[bold]{'':4}{'killed':8}{'all ended':>12}{'all run':>12}{'':4}each rank runs again after[/bold]")
    recoveries: list[dict[str, Any]] = []
    for number, moment in enumerate(moments, 1):
        reach(program, training, max(moment, 1.0), began)
        found = seen(program)["ranks"]
        if program.process.poll() is not None or len(found) < ranks:
            break
        victim = chance.choice(found)
        kill(program.node, victim["process_id"])
        recovery = recovered(program, training, number)
        if recovery is None:
            break
        recoveries.append(recovery)
        each = ", ".join(milliseconds(one["resumed_ms"]).strip() for one in recovery["of_ranks"])
        console.print(f"{number:>3} rank {victim['rank']:<3}{milliseconds(recovery['together_ms']):>12}"
                      f"{milliseconds(recovery['resumed_ms']):>12}    {each}")  # fmt: skip
    return recoveries


def move_all(console: Console, program: Program, training: Training, ranks: int) -> bool:
    """A device is replaced for good; then the ranks are packed onto half of the devices, and brought back. Did they all
    move?"""
    client = program.node.client
    console.print(f"\n[bold]{'':4}{'moved while all train':58}{'stood still':>12}[/bold]")
    found = seen(program)["ranks"]
    before = {one["process_id"]: one["device"] for one in found}
    spare = next(name for name in devices(ranks).split(",") if name not in before.values())
    first = found[0]
    plan = [(first, spare, "its device is replaced for good")]
    half = found[ranks // 2 :]
    plan += [(one, found[place % (ranks // 2)]["device"], "packed") for place, one in enumerate(half)]
    plan += [(one, before[one["process_id"]], "and back") for one in half]
    for rank, target, why in plan:
        target = spare if target == first["device"] else target
        operation = client.post("/v1/migrations", {"process": rank["process_id"], "target": target})
        while operation["state"] in ("pending", "running"):
            training.follow(program, 0.01)  # ranks that wait for their reader do not come to where all can stand still
            operation = client.get(f"/v1/operations/{operation['id']}")
        if operation["state"] != "succeeded":
            detail = escape(str((operation["error"] or {}).get("detail")))
            console.print(f"[red]{'':4}rank {rank['rank']} stays: {detail}[/red]")
            return False
        migration = client.get(f"/v1/migrations/{operation['result']['migration']}")
        words = f"rank {rank['rank']}: {migration['source']} to {migration['target']}, {why}"
        console.print(f"{'':4}{words:58}{milliseconds(migration['downtime_ms']):>12}")
    return True


def kill(node: Node, process: str) -> None:
    """The server that has it now."""
    server = node.client.get(f"/v1/processes/{process}")["server_pid"]
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def recovered(program: Program, training: Training, count: int) -> dict[str, Any] | None:
    """Wait until so many recoveries of all ranks are over; the last of them. None: the program has ended before."""
    while program.process.poll() is None:
        over = [one for one in seen(program, together=100)["recoveries"] if one["outcome"] != "running"]
        running = all(one["state"] == "running" for one in seen(program)["ranks"])
        if len(over) >= count and running:
            return dict(over[0])
        training.follow(program, 0.01)
    return None


def compare(
    console: Console, quiet: Training, other: Training, recoveries: list[dict[str, Any]], kills: int, ranks: int
) -> bool:  # fmt: skip
    problems = []
    if quiet.losses != other.losses:
        problems.append("losses differ")
    if len({*quiet.weights.values(), *other.weights.values()}) != 1 or len(other.weights) != ranks:
        problems.append("weights differ")
    resumed = sum(one["outcome"] == "resumed" for one in recoveries)
    if resumed < kills:
        problems.append(f"{resumed} recoveries after {kills} kills")
    console.print()
    if problems:
        console.print(f"[bold red]Not identical:[/bold red] {'; '.join(problems)}.")
        return False
    weights = quiet.result["weights"][:12]
    console.print(f"[bold green]Identical:[/bold green] every one of {len(quiet.losses)} losses and the weights of all "
                  f"{ranks} ranks ({weights}), to the last bit, through {resumed} recoveries.")  # fmt: skip
    return True
