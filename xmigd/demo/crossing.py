"""`xmigctl demo --nodes`: the training moves to another node and back; the source's daemon is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from xmigd.demo.moving import MIB
from xmigd.demo.nodes import NamespacedNode, pair, wait
from xmigd.demo.training import KERNELS, Training
from xmigd.errors import StartError, XmigError
from xmigd.native import find_native_dir

SETUP = Path(__file__).parents[2] / "packaging" / "setup" / "criu.sh"  # in a source tree
OVER = ("done", "failed", "running", "dropped")
LONGEST = 300.0  # seconds that anything takes
LONG = 12  # times the epochs of the other demos: a program that has ended cannot move


def run(console: Console, epochs: int) -> bool:
    """Did every run have the same results? Raises StartError: there can be no nodes here, XmigError."""
    epochs *= LONG
    with tempfile.TemporaryDirectory(prefix="xmig-demo-") as name, pair(NamespacedNode, criu=criu()) as nodes:
        folder = Path(name)
        one, two = nodes
        console.print("Two nodes, [bold]one[/bold] and [bold]two[/bold], as namespaces of this machine: each with its "
                      "own network, processes, mounts and xmigd")  # fmt: skip
        quiet = finished(nodes, begun(one, folder / "undisturbed.out", epochs), epochs)
        result = quiet.result
        console.print(f"A classifier of handwritten digits ({result['train']} images, {result['steps']} steps), "
                      f"undisturbed: {quiet.seconds:.1f} s, accuracy {result['accuracy']:.2%}")  # fmt: skip
        console.print("The same, moved while it runs:\n")
        output = begun(one, folder / "moved.out", epochs)
        reach(output, epochs // 20)
        show(console, "one to two", moved(one, two))
        reach(output, epochs // 5)
        show(console, "two to one", moved(two, one))
        reach(output, epochs // 3)
        killed(console, one, two)
        other = finished(nodes, output, epochs)
    if other.losses != quiet.losses or other.result["weights"] != quiet.result["weights"]:
        console.print("[bold red]Not identical[/bold red] after the moves.")
        return False
    console.print(f"\n[bold green]Identical:[/bold green] every one of {len(quiet.losses)} losses and the final "
                  f"weights ({quiet.result['weights'][:12]}), to the last bit, on two nodes.")  # fmt: skip
    return True


def criu() -> str:
    """CRIU's path; a source tree installs it. Raises StartError."""
    if not SETUP.exists():
        return "criu"
    done = subprocess.run([SETUP], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(done.stderr.strip() or "there is no CRIU", hint="dnf install criu")
    return done.stdout.strip()


def begun(node: NamespacedNode, output: Path, epochs: int) -> Path:
    kernels = find_native_dir(None) / KERNELS
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "xmigd.demo.train",
        "--kernels",
        kernels,
        "--epochs",
        str(epochs),
    ]
    node.begin(command, output, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    return output


def reach(output: Path, epochs: int) -> None:
    """Wait until the training has done so many."""

    def done() -> bool:
        return output.exists() and len(output.read_text().splitlines()) >= epochs

    wait(done, f"{output} goes no further", LONGEST)


def finished(nodes: list[NamespacedNode], output: Path, epochs: int) -> Training:
    """What it printed."""
    reach(output, epochs + 1)
    wait(lambda: not any(node.lives() for node in nodes), "the training does not end")
    training = Training()
    for line in output.read_text().splitlines():
        training.line(line)
    return training


def moved(source: NamespacedNode, target: NamespacedNode) -> dict[str, Any]:
    """The operation's result. Raises XmigError."""
    operation = source.move(source.lives()[0]["job_id"], target.name)
    while operation["state"] in ("pending", "running"):
        operation = source.client.get(f"/v1/operations/{operation['id']}/wait", timeout=20)
    if operation["state"] != "succeeded":
        raise XmigError(f"the move {operation['state']}: {(operation['error'] or {}).get('detail')}",
                        hint=f"see {source.log}")  # fmt: skip
    return dict(operation["result"])


def show(console: Console, what: str, result: dict[str, Any]) -> None:
    console.print(f"    {what}, {result['device']}: it stood still for {result['downtime_ms'] / 1e3:.2f} s; "
                  f"{result['processed_bytes'] / MIB:.1f} MiB sent in {result['rounds']} rounds")  # fmt: skip


def killed(console: Console, source: NamespacedNode, target: NamespacedNode) -> None:
    """The source's daemon dies while the program is on its way."""
    operation = source.move(source.lives()[0]["job_id"], target.name)
    path = f"/v1/operations/{operation['id']}"

    def handed_over() -> bool:
        now = source.client.get(path)
        if now["state"] not in ("pending", "running"):
            raise XmigError(f"the move {now['state']}: {(now['error'] or {}).get('detail')}", hint=f"see {source.log}")
        return now["phase"] in ("handing_over", "switching")

    wait(handed_over, "it is not handed over", LONGEST)
    source.kill()
    began = time.monotonic()
    source.start()

    def settled() -> bool:
        rows = [node.transfers()[0] for node in (source, target)]
        return all(row["state"] in OVER for row in rows) and len(source.lives()) + len(target.lives()) == 1

    wait(settled, "the nodes do not agree", LONGEST)
    where = source.name if source.lives() else target.name
    console.print(f"    {source.name} to {target.name}, the daemon of {source.name} killed as it handed over: "
                  f"{time.monotonic() - began:.1f} s after that it lives on {where}, and nowhere else")  # fmt: skip
