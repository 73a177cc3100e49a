"""What a job of two ranks takes to go on after the loss of one: under xMIG, and with what people use without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.gpu import collectives
from tests.gpu.bench import Bench, Failed, wait_until
from tests.gpu.cases import PROGRAMS
from tests.gpu.collectives import RANKS, ready
from xmigd.demo.node import Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

KILLS = 3
EVERY = 50  # steps between two checkpoints
BETWEEN = 60  # steps before each kill: one checkpoint at least
PATIENCE = 90.0  # seconds, from a start to the first steps, and from a kill until it goes on
PORT = 29510
WAYS = {
    "torchrun": ("torchrun restart from a checkpoint", f"a worker killed; a checkpoint every {EVERY} steps"),
    "nvrx": ("NVRx in-process restart", f"an exception in a rank, no process lost; a checkpoint every {EVERY} steps"),
    "torchft": ("torchft", "a replica killed, started again by torchrun; its state from the other replica"),
}
PACKAGES = {"nvrx": "nvidia_resiliency_ext.inprocess", "torchft": "torchft"}
Line = tuple[str, float, int]  # which life of the rank, when, the step


def measure(bench: Bench) -> Iterator[Row]:
    where = collectives.place(bench)
    ours = median(under_xmig(bench))
    yield Row(
        name="restarts: xMIG", value=round(ours, 3), unit="s", better="lower",
        conditions=f"{where}; a rank's server killed, until all ranks have done a step; median of {KILLS}",
    )  # fmt: skip
    missing = []
    site = installed(bench)
    for way, (name, how) in WAYS.items():
        try:
            times = without_xmig(bench, way, site)
        except (XmigError, OSError, subprocess.SubprocessError, LookupError) as error:
            missing.append(f"{name}: {error}")
            continue
        every = ", ".join(f"{time_s:.3g}" for time_s in times)
        about = f"{where}; {how}; until all ranks have done a step again: {every} s"
        yield Row(name=name, value=round(median(times), 3), unit="s", better="lower", conditions=about)
        yield Row(
            name=f"{name}, against ours", value=round(median(times) / ours, 1), unit="× ours", target=20,
            better="higher", conditions=f"{where}; ours {ours:.3g} s in the same run",
        )  # fmt: skip
    if missing:
        raise Failed("; ".join(missing))


def words(bench: Bench, how: str, folder: Path) -> list[str]:
    folder.mkdir()
    small = ["--backend", "gloo", *collectives.TINY] if bench.kind != "cuda" else []
    shared = ["--shared"] if collectives.shares(bench) else []
    named = ["--how", how, "--folder", str(folder), "--every", str(EVERY), "--port", str(PORT)]
    return [str(PROGRAMS / "restarting.py"), *named, *small, *shared]


def torchrun(bench: Bench, ranks: int) -> list[str]:
    return [bench.python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone",
            "--max-restarts", "100"]  # fmt: skip


def under_xmig(bench: Bench) -> list[float]:
    """Seconds from each kill of a server."""
    folder = bench.scratch / "restarts-xmig"
    command = [*torchrun(bench, RANKS), *words(bench, "plain", folder)]
    device = collectives.device_of_job(bench)
    with (
        bench.node(devices=collectives.devices(bench)) as node,
        (bench.logs / "restarts-xmig.out").open("w") as out,
    ):
        program = node.program(
            command, name="ranks", device=device, environment=bench.environment, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with stopping(folder, program.process):
            return [_kill_server(program, folder, number) for number in range(KILLS)]


def _kill_server(program: Program, folder: Path, number: int) -> float:
    has_steps(folder, BETWEEN // 2, program.process)
    wait_until(lambda: ready(program, RANKS) is not None, "all ranks have standbys", PATIENCE)
    servers = ready(program, RANKS)
    assert servers is not None
    at = time.monotonic()
    os.kill(servers[number % RANKS]["server_pid"], signal.SIGKILL)
    has_steps(folder, 10, program.process)
    return max(end_of_longest(lines(folder, rank), at) for rank in range(RANKS)) - at


def without_xmig(bench: Bench, way: str, site: Path | None) -> list[float]:
    """Seconds from each loss of a rank. Raises Failed where there is no such package."""
    environment = bench.natively(RANKS)
    if site is not None:
        environment |= {"PYTHONPATH": str(site)}
    if way in PACKAGES:
        tried = subprocess.run([bench.python, "-c", f"import {PACKAGES[way]}"], env=environment, capture_output=True,
                               text=True, check=False)  # fmt: skip
        if tried.returncode != 0:
            raise Failed(
                f"not measured, its package cannot be used: {(tried.stderr.strip().splitlines() or ['?'])[-1]}"
            )
    folder = bench.scratch / f"restarts-{way}"
    program = words(bench, way, folder)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context((bench.logs / f"restarts-{way}.out").open("w"))

        def start(command: list[str], **more: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command, env=environment | more, stdout=out, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            stack.enter_context(stopping(folder, process))
            return process

        if way == "torchft":
            start([bench.python, *words_of_lighthouse(program)])
            time.sleep(1)
            started = [start([*torchrun(bench, 1), *program], REPLICA_GROUP_ID=str(rank)) for rank in range(RANKS)]
        else:
            started = [start([*torchrun(bench, RANKS), *program])]
        return [lose_rank(folder, way, started[0]) for _ in range(KILLS)]


def words_of_lighthouse(program: list[str]) -> list[str]:
    at = program.index("--how")
    return [*program[: at + 1], "lighthouse", *program[at + 2 :]]


def lose_rank(folder: Path, way: str, process: subprocess.Popen[str]) -> float:
    """Seconds until all ranks have done a step again; the lost one in a new life, and with it all that start again."""
    has_steps(folder, BETWEEN, process)
    victim = RANKS - 1
    lost = [victim] if way == "torchft" else list(range(RANKS))
    lives = [lines(folder, rank)[-1][0] for rank in range(RANKS)]
    at = time.monotonic()
    number = signal.SIGUSR1 if way == "nvrx" else signal.SIGKILL
    os.kill(int((folder / f"pid.{victim}").read_text()), number)

    def again(rank: int) -> float | None:
        found = lines(folder, rank)
        return next((ended for life, ended, _ in found if ended > at and life != lives[rank]), None)

    until(lambda: all(again(rank) is not None for rank in lost), "goes on after a loss", process)
    return max(again(rank) or 0.0 for rank in lost) - at


def has_steps(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until each rank has done so many more."""
    before = [len(lines(folder, rank)) for rank in range(RANKS)]
    until(
        lambda: all(len(lines(folder, rank)) >= before[rank] + count for rank in range(RANKS)),
        "does its steps",
        process,
    )


def until(condition: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    """Raises Failed when it has ended, or does not come to it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None:
            raise Failed(f"it has ended with {process.returncode} before it {what}")
        if time.monotonic() > end:
            raise Failed(f"not within {PATIENCE:.0f} s: it {what}")
        time.sleep(0.02)


def lines(folder: Path, rank: int) -> list[Line]:
    try:
        text = (folder / f"steps.{rank}").read_text()
    except FileNotFoundError:
        return []
    whole = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
    return [(life, float(ended), int(step)) for life, ended, step in whole]


def end_of_longest(found: list[Line], at: float) -> float:
    """When the longest step ended of those that ended after this moment."""
    times = [ended for _, ended, _ in found]
    return max((after - before, after) for before, after in pairwise(times) if after > at)[1]


@contextlib.contextmanager
def stopping(folder: Path, process: subprocess.Popen[str]) -> Iterator[None]:
    """Nothing of it is left."""
    try:
        yield
    finally:
        (folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in folder.glob("pid.*"):  # torchrun's workers have sessions of their own
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def installed(bench: Bench) -> Path | None:
    """The wheels of `--others`, in a folder of their own."""
    wheels = sorted(bench.others.resolve().glob("*.whl")) if bench.others is not None else []
    if not wheels:
        return None
    site = bench.scratch / "site"
    quietly = ["--disable-pip-version-check", "--quiet"]
    command: list[str | Path] = [bench.python, "-m", "pip", *quietly, "install", "--no-index", "--no-deps"]
    command += ["--no-compile", "--target", site]
    if subprocess.run([*command, *wheels], capture_output=True, check=False).returncode != 0:
        for wheel in wheels:  # one that does not fit keeps nothing but itself away
            subprocess.run([*command, wheel], capture_output=True, check=False)
    return site
