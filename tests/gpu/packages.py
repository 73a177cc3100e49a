"""Programs of other people's packages that train or compute with several ranks, or several devices in one process: the
same results as natively, undisturbed and with kills. A package that is not there is named in the row."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.gpu import collectives
from tests.gpu.bench import Bench, Failed
from tests.gpu.restarts import installed
from xmigd.demo.node import Node
from xmigd.demo.node import Program as Demo
from xmigd.measurements import Row

PATIENCE = 100.0  # seconds for a run
TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--words", "512", "--context", "64", "--batch", "1"]


@dataclass(frozen=True)
class Program:
    """``ranks``: processes. One has both devices; four share them, two each."""

    name: str
    file: str
    package: str
    ranks: int
    tiny: tuple[str, ...] = tuple(TINY)
    folder: bool = False  # it needs one

    @property
    def part(self) -> str:
        return f"packages-{self.package.partition('.')[0]}"


PROGRAMS = [
    Program("Megatron-core, TP 2 × DP 2", "megatron_ranks.py", "megatron.core", 4),
    Program("DeepSpeed, ZeRO-1", "deepspeed_ranks.py", "deepspeed", 2, tuple(collectives.TINY)),
    Program("Transformers' tensor-parallel plan", "plan_ranks.py", "transformers", 2, folder=True),
    Program("JAX, pmap and shard_map", "jax_devices.py", "jax", 1, ("--width", "64", "--batch", "4")),
    Program("CuPy's NCCL", "cupy_devices.py", "cupy", 1, ("--size", "1024")),
]


def measure(bench: Bench, program: Program) -> Iterator[Row]:
    """Raises Failed: the package is not there."""
    site = installed(bench)
    yield one(bench, program, {} if site is None else {"PYTHONPATH": str(site)})


def one(bench: Bench, program: Program, more: dict[str, str]) -> Row:
    tried = subprocess.run([bench.python, "-c", f"import {program.package}"], env=bench.natively(2) | more,
                           cwd=bench.scratch, capture_output=True, text=True, check=False)  # fmt: skip
    if tried.returncode != 0:
        raise Failed(f"not tried, the package cannot be used: {(tried.stderr.strip().splitlines() or ['?'])[-1]}")
    # A null device returns nothing, of which a second step would make something else each time.
    words = ["--deterministic", "--warmup", "0", *(["--steps", "1", *program.tiny] if bench.rehearsal else [])]
    if program.ranks > 1 and (program.ranks > collectives.RANKS or collectives.shares(bench)):
        words.append("--shared")

    def run(node: Node | None, *others: str, disturb: Callable[[Demo], None] | None = None) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=bench.scratch) as folder:
            needed = ["--folder", f"{folder}/model"] if program.folder else []
            return collectives.run(
                bench, node, [*words, *needed, *others], program.file, disturb, program.ranks, more, PATIENCE
            )  # fmt: skip

    native = None if bench.rehearsal else run(None)
    status, killed = bench.scratch / f"{program.file}.status", list[float]()
    with bench.node(devices=",".join(bench.two())) as node:
        plain = run(node)
        disturbed = run(
            node, "--status", str(status),
            disturb=partial(collectives.kill_servers, bench, status, killed, ranks=program.ranks, apart=5),
        )  # fmt: skip
        recovered = [one for one in node.client.get("/v1/recoveries", limit=1000) if one["outcome"] == "resumed"]
    wrong = []
    if native is not None:
        wrong = collectives.different(native, plain, "undisturbed")
        wrong += collectives.different(native, disturbed, "with kills")
    ranks = f"{program.ranks} ranks on two devices" if program.ranks > 1 else "one process with two devices"
    return Row(
        name=f"{program.name}: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{ranks}; {len(killed)} servers killed, {len(recovered)} recoveries of processes; "
        f"different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip
