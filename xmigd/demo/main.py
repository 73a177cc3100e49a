"""`xmigctl demo`: the same training in peace, with its GPU server killed again and again, and moved between devices."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from xmigd.demo import crossing, moving, packing, ranks
from xmigd.demo.node import Node, Program
from xmigd.demo.training import Training, finish, milliseconds, reach, recovered, start
from xmigd.errors import XmigError

PHASES = ("detected", "standby_ready", "mapped", "restored", "replayed", "resumed")
CUDA_ERROR_LAUNCH_FAILED = 719


def inject(program: Program, kind: str) -> None:
    """Kill the server from outside, or make its device fault in the next kernel."""
    if kind == "fault":
        program.inject("fault", point="kernel", error=CUDA_ERROR_LAUNCH_FAILED)
        return
    info = program.info()
    if info is not None and info["server_pid"] is not None:
        os.kill(info["server_pid"], signal.SIGKILL)


def disturbed(console: Console, node: Node, chance: random.Random, faults: int, epochs: int
              ) -> tuple[Training, list[dict[str, Any]]]:  # fmt: skip
    """The training with `faults` faults at random moments; each recovery is printed as it is over."""
    program, training = start(node, "disturbed", epochs, followed=True), Training()
    program.until("running", "ended")
    began = time.monotonic()
    # Of 30 epochs the pipe has room for seven, and there is one more to do.
    moments = sorted(chance.uniform(0.02, 0.7) * epochs for _ in range(faults))
    kinds = ["kill", "fault", *chance.choices(["kill", "fault"], k=faults)][:faults]
    console.print(f"[bold]{'':4}{'':7}{'expected':>10}{'detected':>10}{'standby':>10}{'memory':>10}{'snapshot':>10}{'replay':>10}"
                  f"{'resumed':>10}{'':>10}[/bold]")  # fmt: skip
    console.print(f"[dim]{'':4}{'fault':7}{'stall':>10}{'':10}{'ready':>10}{'mapped':>10}{'restored':>10}{'done':>10}{'':10}"
                  f"{'records':>10}   replies[/dim]")  # fmt: skip
    recoveries: list[dict[str, Any]] = []
    for number, (moment, kind) in enumerate(zip(moments, kinds, strict=True), 1):
        reach(program, training, moment, began)
        if program.process.poll() is not None:
            break
        inject(program, kind)
        recovery = recovered(program, number, training)
        if recovery is None:
            break
        recoveries.append(recovery)
        times = [recovery["expected_ms"], *(recovery[f"{phase}_ms"] for phase in PHASES)]
        console.print(f"{number:>3} {kind:7}" + "".join(milliseconds(each) for each in times)
                      + f"{recovery['records'] or 0:>10}   {verdict(recovery)}")  # fmt: skip
    return finish(node, program, "disturbed", training), recoveries


def verdict(recovery: dict[str, Any]) -> str:
    """What the comparison of replies reported."""
    if recovery["outcome"] != "resumed":
        return f"[red]{recovery['outcome']}[/red]"
    if recovery["exact"]:
        return f"{recovery['compared']} the same"
    return f"[red]{recovery['differing']} of {recovery['compared']} differ[/red]"


def compare(console: Console, quiet: Training, other: Training, recoveries: list[dict[str, Any]], faults: int) -> bool:
    """Print both results side by side. Do they agree in every bit, after as many recoveries as faults?"""
    console.print()
    console.print(f"[bold]{'':16}{'undisturbed':>14}{'disturbed':>14}[/bold]")
    console.print(f"{'steps':16}{quiet.result['steps']:>14}{other.result['steps']:>14}")
    console.print(f"{'time':16}{quiet.seconds:>12.1f} s{other.seconds:>12.1f} s")
    console.print(f"{'last loss':16}{quiet.last_loss:>14.6f}{other.last_loss:>14.6f}")
    accuracies = f"{quiet.result['accuracy']:>14.2%}{other.result['accuracy']:>14.2%}"
    console.print(f"{'test accuracy':16}{accuracies}   on {quiet.result['test']} images never trained on")
    console.print(f"{'weights':16}{quiet.result['weights'][:12]:>14}{other.result['weights'][:12]:>14}   SHA-256")
    console.print()
    different = sum(a != b for a, b in zip(quiet.losses, other.losses, strict=False))
    different += abs(len(quiet.losses) - len(other.losses))
    problems = []
    if different:
        problems.append(f"{different} losses differ")
    if quiet.result["weights"] != other.result["weights"]:
        problems.append("the final weights differ")
    if quiet.result["accuracy"] != other.result["accuracy"]:
        problems.append("the accuracy differs")
    resumed = sum(r["outcome"] == "resumed" for r in recoveries)
    if resumed < faults:
        problems.append(f"{resumed} recoveries after {faults} faults")
    inexact = sum(not r["exact"] for r in recoveries)
    if inexact:
        problems.append(f"{inexact} recoveries were not exact")
    if problems:
        console.print(f"[bold red]Not identical:[/bold red] {'; '.join(problems)}.")
        return False
    console.print(f"[bold green]Identical:[/bold green] every one of {len(quiet.losses)} losses and the final weights, "
                  f"to the last bit, through {resumed} recoveries.")  # fmt: skip
    return True


def moved(console: Console, node: Node, quiet: Training, epochs: int) -> bool:
    """The training once more, moved to the other device in the middle of it. Does it agree in every bit?"""
    program, training = start(node, "moved", epochs, followed=True), Training()
    reach(program, training, epochs // 3, time.monotonic())
    migration = moving.move(node, program)
    finish(node, program, "moved", training)
    console.print(f"\nThe same, moved from {migration['source']} to {migration['target']} while it ran:\n")
    moving.show(console, migration)
    console.print()
    if training.losses != quiet.losses or training.result["weights"] != quiet.result["weights"]:
        console.print("[bold red]Not identical[/bold red] after the move.")
        return False
    console.print(f"[bold green]Identical:[/bold green] every one of {len(quiet.losses)} losses and the final weights, "
                  "to the last bit, across a live migration.")  # fmt: skip
    return True


def serve(console: Console, node: Node) -> None:
    """Leave the daemon running and say how to look at it."""
    assert node.process is not None
    folder = shlex.quote(str(node.folder))
    console.print()
    console.print("The daemon keeps running. To look at it:", style="bold")
    console.print(escape(f"  curl --unix-socket {folder}/api.sock http://localhost/v1/processes"), highlight=False)
    console.print(escape(f"  XMIG_RUNTIME_DIR={folder} {sys.executable} -m xmigd.cli ps --all"), highlight=False)
    console.print(escape(f"To end it:  kill {node.process.pid} && rm -r {folder}"), highlight=False)


def run(arguments: Sequence[str] = ()) -> int:
    """The demo. Returns its exit code: 0 if both runs agree in every bit."""
    parser = argparse.ArgumentParser(prog="xmigctl demo", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("--serve", action="store_true", help="leave the daemon running")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that train together, each on a device (default 1)"
    )
    parser.add_argument("--consolidate", action="store_true", help="pack six trainings onto fewer devices and back")
    parser.add_argument("--nodes", action="store_true", help="move the training between two nodes, which root can make")
    parser.add_argument("--faults", type=int, default=8, help="kills and faults during the training (default 8)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of training (default 30)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another one each time")
    options = parser.parse_args(list(arguments))
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    console = Console(highlight=False, soft_wrap=True)
    if options.nodes:
        try:
            return 0 if crossing.run(console, options.epochs) else 1
        except XmigError as error:
            console.print(f"[red]demo:[/red] {escape(str(error))}")
            return 1
    folder = Path(tempfile.mkdtemp(prefix="xmig-demo-"))
    used = packing.DEVICES if options.consolidate else ranks.devices(options.ranks) if options.ranks > 1 else None
    node = Node(folder) if used is None else Node(folder, devices=used)
    keep = False
    try:
        node.start()
        if options.consolidate:
            identical = packing.run(console, node, options.epochs)
            keep = options.serve or not identical
            if options.serve:
                serve(console, node)
            return 0 if identical else 1
        if options.ranks > 1:
            identical = ranks.run(console, node, random.Random(seed), options.ranks, options.faults, options.epochs)
            keep = options.serve or not identical
            if options.serve:
                serve(console, node)
            return 0 if identical else 1
        console.print(f"[bold]xmigd[/bold] runs with two cpu devices and its database in {folder}")
        with console.status("training a classifier of handwritten digits, undisturbed"):
            quiet = finish(node, start(node, "undisturbed", options.epochs), "undisturbed")
        result = quiet.result
        console.print(f"A classifier of handwritten digits ({result['train']} images, {result['steps']} steps), "
                      f"undisturbed: {quiet.seconds:.1f} s, accuracy {result['accuracy']:.2%}")  # fmt: skip
        console.print(f"The same, its GPU server killed or made to fault {options.faults} times (seed {seed}); "
                      "time since the fault:\n")  # fmt: skip
        other, recoveries = disturbed(console, node, random.Random(seed), options.faults, options.epochs)
        identical = compare(console, quiet, other, recoveries, options.faults)
        identical = moved(console, node, quiet, options.epochs) and identical
        if options.serve:
            keep = True
            serve(console, node)
        keep = keep or not identical
        return 0 if identical else 1
    except XmigError as error:
        console.print(f"[red]demo:[/red] {escape(str(error))}")
        keep = True
        return 1
    finally:
        if not options.serve or not keep:
            node.stop()
        node.client.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
