"""Two daemons with a GPU each, as two nodes of one machine: ranks of one job on both, and jobs that move between them.

Each node has its own network, processes and mounts (xmigd/demo/nodes.py). Root only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives, kills
from tests.gpu.bench import Bench, Failed, wait_until
from tests.gpu.cases import PROGRAMS, TINY_GPT
from tests.gpu.checkpoints import MIB, PATIENCE, criu, done
from xmigd.demo.node import Program
from xmigd.demo.nodes import NamespacedNode, pair
from xmigd.measurements import Row

APART = 8  # steps between two disturbances
OUTAGE = 3.0  # seconds
PORT = 29520
MOVES = 2
KINDS = ("kill", "kill both", "illegal address", "daemon that leads", "daemon that follows", "outage")
WHERE = "two daemons with a GPU each in network namespaces of one machine, NCCL's sockets between them"


@contextlib.contextmanager
def two_nodes(
    bench: Bench, *, of_each: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> Iterator[list[NamespacedNode]]:  # fmt: skip
    """They know each other. `of_each`: settings of each; None: a device each. Raises Failed where there are not two
    GPUs, StartError where no networks can be made."""
    first, second = bench.two()
    apart = {"one": {"devices": first}, "two": {"devices": second}}
    with pair(NamespacedNode, of_each=of_each or apart, **settings) as nodes:
        try:
            yield list(nodes)
        finally:
            for node in nodes:
                bench.keep_log(node.log)


class Ranks:
    """One of torchrun's on each node."""

    def __init__(
        self, bench: Bench, nodes: Sequence[NamespacedNode], words: list[str], how: str, ahead: int = 0
    ) -> None:  # fmt: skip
        """`how`: "natively" is without xMIG. `ahead`: communicators that its standby is to have made before a rank is
        disturbed."""
        self.nodes = nodes
        self.ahead = ahead
        self.programs: list[Program] = []
        self.processes: list[subprocess.Popen[Any]] = []
        self._outputs = [bench.logs / f"nodes-{how}-{number}.out" for number in range(len(nodes))]
        variables = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        for number, node in enumerate(nodes):
            command = [
                bench.python, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--nproc-per-node", "1",
                "--node-rank", str(number), "--master-addr", nodes[0].network.address, "--master-port", str(PORT),
                str(PROGRAMS / "ddp.py"), *words,
            ]  # fmt: skip
            own = variables | {"NCCL_HOSTID": node.name}
            if how == "natively":
                own |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(number)}
                with self._outputs[number].open("w") as out:
                    options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                    self.processes.append(node.entering(command, {**os.environ, **own}, **options))
                continue
            request = {"name": "ranks", "nodes": [each.name for each in nodes]}
            program = node.begin(command, self._outputs[number], request=request, **{**bench.environment, **own})
            self.programs.append(program)
            self.processes.append(program.process)

    def run(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def ready(self) -> list[dict[str, Any]]:
        """The process of each rank, if all run, each with a warm standby. Otherwise none."""
        found = []
        for program in self.programs:
            rows = program.node.client.get("/v1/processes", job=program.job)
            warm = [row for row in rows if row["state"] == "running" and row["standby"] == "warm"]
            found += [row for row in warm if row["standby_communicators"] >= self.ahead]
        return found if len(found) == len(self.nodes) else []

    def recoveries(self) -> int:
        rows = [row for node in self.nodes for row in node.client.get("/v1/recoveries", limit=1000)]
        return sum(row["outcome"] == "resumed" for row in rows)

    def results(self, patience: float = collectives.PATIENCE) -> list[dict[str, Any]]:
        """What each rank has printed at its end. Raises Failed."""
        end = time.monotonic() + patience
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise Failed(f"ranks take longer than {patience:.0f} s; see {self._outputs[0]}") from None
        lines = [line for out in self._outputs for line in out.read_text().splitlines() if line.startswith("{")]
        found = sorted((json.loads(line) for line in lines if '"rank"' in line), key=lambda line: int(line["rank"]))
        if any(codes) or len(found) != len(self.nodes):
            raise Failed(f"ranks ended with {codes}, and {len(found)} have results; see {self._outputs[0]}")
        return found


def ranks(bench: Bench) -> Iterator[Row]:
    """GPT-2 with DDP over both nodes: as natively, undisturbed, with kills of servers, and with all that can happen."""
    steps = 1 if bench.rehearsal else 120
    words = ["--deterministic", "--warmup", "0", "--steps", str(steps)]
    words += [*collectives.TINY, "--backend", "gloo"] if bench.rehearsal else ["--batch", "2", "--layers", "4"]
    wrong: list[str] = []
    with two_nodes(bench) as nodes:
        native = None if bench.rehearsal else Ranks(bench, nodes, words, "natively").results()
        plain = Ranks(bench, nodes, words, "plain").results()
        again = None if bench.rehearsal else Ranks(bench, nodes, words, "natively").results()
        wrong += collectives.different(native or plain, plain, "undisturbed")
        step = median(plain[0]["times_s"])
        if native is not None and again is not None:
            both = [median(each[0]["times_s"]) for each in (native, again)]
            beside = sum(both) / 2
            yield Row(
                name="two nodes: step", value=round(step / beside, 3), unit="× native", target=1.02, better="lower",
                conditions=f"{WHERE}; GPT-2 of 4 layers, B=2; {1e3 * step:.4g} ms, natively there "
                f"{1e3 * both[0]:.4g} before and {1e3 * both[1]:.4g} after it",
            )  # fmt: skip
        killed: list[str] = []
        counts: list[int] = []

        def disturbed(nodes: Sequence[NamespacedNode], how: str, kinds: Sequence[str], ahead: int = 0) -> list[float]:
            """Returns how long it stood still each time."""
            status = bench.scratch / f"nodes-{how.replace(' ', '-')}.status"
            ran = Ranks(bench, nodes, [*words, "--status", str(status)], how.replace(" ", "-"), ahead)
            before = ran.recoveries()
            happened: list[str] = []
            thread = threading.Thread(target=disturb, args=(ran, status, kinds, happened), daemon=True)
            thread.start()
            found = ran.results()
            thread.join(PATIENCE)
            wrong.extend(collectives.different(native or plain, found, f"with {how}"))
            counts.append(ran.recoveries() - before)
            killed.extend(happened)
            return sorted(max(each) for each in collectives.pieces(found[0]["times_s"], step))

        without = disturbed(nodes, "kills", KINDS[:1])
        disturbed(nodes, "disturbances", KINDS)
    with two_nodes(bench, standby_communicators_mib=16384) as nodes:
        # Ranks of a rehearsal have none of NCCL's.
        stalls = disturbed(nodes, "kills, made ahead", KINDS[:1], ahead=0 if bench.rehearsal else 1)
    for how, found, usual, most in (
        ("", without, 1.5, 3.0), (", communicators made ahead", stalls, 0.8, 1.5),
    ):  # fmt: skip
        for what, value, target in (("median", found and median(found), usual), ("worst", found and found[-1], most)):
            if value:
                yield Row(
                    name=f"two nodes, kill{how}: stall, {what}", value=round(value - step, 3), unit="s", target=target,
                    better="lower", conditions=f"{WHERE}; {len(found)} stalls",
                )  # fmt: skip
    each = ", ".join(f"{killed.count(kind)} × {kind}" for kind in KINDS)
    yield Row(
        name="two nodes: differences", value=0 if bench.rehearsal else len(wrong), unit="in all", target=0,
        better="lower", conditions=f"{WHERE}; three runs of {steps} steps; {each}; {', '.join(map(str, counts))} "
        f"recoveries of processes; different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip


def disturb(ran: Ranks, status: Path, kinds: Sequence[str], happened: list[str]) -> None:
    """One after the other, each when all standbys are warm and some steps are done."""
    files = [status.with_suffix(f".{rank}") for rank in range(len(ran.nodes))]
    chance = random.Random(1)
    reached = 0
    with contextlib.suppress(Exception):  # the ranks end, and with them what is requested here
        while ran.run() and kills.phase(files[0]) != "end":
            listed = ran.ready() if min(kills.step(file) for file in files) >= reached + APART else []
            if not listed:
                time.sleep(0.01)
                continue
            kind = kinds[len(happened) % len(kinds)]
            time.sleep(chance.uniform(0, 0.04))
            happened.append(kind)
            _happens(ran, kind, listed, len(happened) % len(listed))
            reached = max(kills.step(file) for file in files)


def _happens(ran: Ranks, kind: str, listed: list[dict[str, Any]], which: int) -> None:
    if kind in ("kill", "kill both"):
        for number in range(len(listed)) if kind == "kill both" else [which]:
            # Its pid is one of its node's.
            ran.nodes[number].entering(["kill", "-KILL", str(listed[number]["server_pid"])], os.environ).wait()
    elif kind == "illegal address":
        ran.programs[which].inject("fault", error=700)
    elif kind == "outage":
        with ran.nodes[1].network.unplugged():
            time.sleep(OUTAGE)
    else:
        node = ran.nodes[0 if kind == "daemon that leads" else 1]
        node.kill()
        node.start()


def moves(bench: Bench) -> Iterator[Row]:
    """A program of 40 GB, of which a step changes 64 MB, and a training: there and back."""
    memory = ["--what", "memory", "--mib", str(MIB), "--pause", "0.002"]
    training = ["--what", "training", "--context", "256", "--deterministic", "--steps", "1000"]
    yield from moved(bench, "40 GB", memory, "40 GB of random content, of which a step changes 64 MB, PyTorch")
    yield from moved(bench, "a training", training, "GPT-2-small, B=8, 256 tokens, AdamW, deterministic")


def moved(bench: Bench, name: str, arguments: list[str], what: str) -> Iterator[Row]:
    """What it has written at its end, against a native run; how long it stood still; what went over the link."""
    label = name.replace(" ", "-")
    native = bench.scratch / f"nodes-{label}-native"
    if not bench.rehearsal:
        alone(bench, native, arguments)
    output = bench.scratch / f"nodes-{label}"
    command = [bench.python, str(PROGRAMS / "kept.py"), "--output", str(output), *arguments]
    if bench.rehearsal:
        command += [*TINY_GPT.split(), "--mib", "64", "--dirty-mib", "2"]
        command += ["--steps", "5000" if "training" in arguments else "40"]
    with two_nodes(bench, criu=criu()) as nodes:
        program = nodes[0].begin(command, bench.logs / f"nodes-{label}.out", request=None, **bench.environment)
        wait_until(lambda: lines(output) >= 10 or program.process.poll() is not None, "it does its steps", PATIENCE)
        records = []
        for number in range(MOVES):
            here, there = nodes[number % 2], nodes[1 - number % 2]
            rows = here.lives()
            if not rows:
                raise Failed(f"{name}: it has ended before move {number + 1}")
            result = done(here.client, here.move(rows[0]["job_id"], there.name))
            records.append((result, here.transfers()[0]))
        output.with_suffix(".go").touch()
        wait_until(Path(f"{output}.done").exists, "it has done its steps", PATIENCE)
    different = native.exists() and output.read_text() != native.read_text()
    stood = sorted(result["downtime_ms"] / 1e3 for result, _ in records)
    rounds = "; ".join(
        ", ".join(f"{each['copied_bytes'] / 1e6:.0f} MB in {each['ms'] / 1e3:.2f} s" for each in record["rounds"])
        for _, record in records
    )
    parts = "; ".join(
        ", ".join(f"{key.removesuffix('_ms')} {ms:.0f}" for key, ms in record["took"].items())
        + f", {(record['ahead_bytes'] or 0) / 1e6:.0f} of {(record['content_bytes'] or 0) / 1e6:.0f} MB ahead"
        for _, record in records
    )
    about = f"{WHERE}; {MOVES} moves, rounds: {rounds}; ms of the last one: {parts}; {what}"
    yield Row(
        name=f"cross-node move of {name}: standstill, median", value=round(median(stood), 3), unit="s", target=0.3,
        better="lower", conditions=f"CRIU's dump and restoration in it; worst {stood[-1]:.3g} s; {about}",
    )  # fmt: skip
    yield Row(
        name=f"cross-node move of {name}: differences", value=float(different), unit="in all", target=0,
        better="lower", conditions=f"what it has written until its end, against a native run, to the last bit; {about}",
    )  # fmt: skip
    if name == "40 GB":
        first = records[0][1]["rounds"][0]
        yield link(bench, first["copied_bytes"] / first["ms"] / 1e6)


def alone(bench: Bench, output: Path, arguments: list[str]) -> None:
    """The same natively, to its end."""
    command = [bench.python, str(PROGRAMS / "kept.py"), "--output", str(output), *arguments]
    output.with_suffix(".go").touch()
    with (bench.logs / f"{output.name}.out").open("w") as out:
        ran = subprocess.run(
            command, env=bench.natively(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False,
            timeout=PATIENCE,
        )  # fmt: skip
    if ran.returncode != 0:
        raise Failed(f"{output.name}: it ended with {ran.returncode} natively")


def link(bench: Bench, used: float) -> Row:
    """`used`: GB/s of the first round."""
    cipher = cipher_speed()
    return Row(
        name="cross-node move: link use", value=round(used / cipher, 3) if cipher else 0.0, unit="of one core's AES",
        target=0.9, better="higher",
        conditions=f"{used:.2f} GB/s in the first round, dump, hashing and compression in it; openssl speed of one "
        f"core: {cipher:.2f} GB/s (AES-256-GCM, 16 KiB); {WHERE}",
    )  # fmt: skip


def cipher_speed() -> float:
    """GB/s of one core; 0: there is no openssl."""
    if shutil.which("openssl") is None:
        return 0.0
    words = ["openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", "aes-256-gcm"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    found = [line.split()[-1] for line in ran.stdout.splitlines() if line.upper().startswith("AES-256-GCM")]
    return float(found[0].rstrip("k")) * 1e3 / 1e9 if found else 0.0


def lines(output: Path) -> int:
    return output.read_text().count("\n") if output.exists() else 0
