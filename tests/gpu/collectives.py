"""Programs of several ranks with NCCL: the same results as natively, and how long operations take. Two GPUs, or two
ranks on one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import kills
from tests.gpu.bench import Bench, Failed, gpus
from tests.gpu.cases import PROGRAMS
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

RANKS = int(os.environ.get("RANKS", "2"))
PATIENCE = 240.0
WARMUP = 10  # steps
STALL = 0.1  # seconds beyond the median that count as one
TINY = ["--layers", "1", "--width", "64", "--heads", "1", "--words", "512", "--context", "64", "--batch", "1"]
TARGETS = (
    ("ddp: step", "step_s", 1.0),
    ("large all-reduce", "large_s", 1.02),  # 0.98 of the bandwidth
    ("communicators: init", "init_s", 1.1),
)


def measure(bench: Bench) -> Iterator[Row]:
    """Natively, then under xMIG."""
    shared = shares(bench)
    where = place(bench)
    large = 1 << 20 if bench.rehearsal else 1 << (26 if shared else 30)
    # A null device returns nothing: DDP's second step would read from it in which order gradients came.
    steps = 1 if bench.rehearsal else 10
    words = ["--steps", str(steps), "--large", str(large), *(["--shared"] if shared else [])]
    # A rehearsal has no driver that could answer natively.
    native = None if bench.rehearsal else run(bench, None, words)
    with bench.node(devices=devices(bench)) as node:
        xmig = run(bench, node, words)
        later = xmig if bench.rehearsal else run(bench, node, words, more={"NCCL_RUNTIME_CONNECT": "1"})
    compared = [] if native is None else differing(native, xmig)
    wrong = [] if bench.rehearsal else [name for rank in xmig for name in rank["wrong"]]
    named = ", ".join([*compared, *wrong][:4])
    yield Row(
        name="collectives: differences", value=len(set(compared) | set(wrong)), unit="in all", target=0, better="lower",
        conditions=f"{where}; PyTorch, {len(xmig[0]['digests'])} results and {steps} steps with DDP; "
        f"{large >> 20} MiB in the large all-reduce; different: {named or 'none'}",
    )  # fmt: skip
    for name, key, target in TARGETS:
        value = most(xmig, key)
        if native is None:
            yield Row(name=name, value=round(1e3 * value, 3), unit="ms", better="lower", conditions=where)
            continue
        beside = most(native, key)
        more = ""
        if key == "init_s":
            contexts = [most(each, "context_s") for each in (xmig, native, later)]
            more = (
                f"; from when all ranks are there until their first sum is done; contexts {1e3 * contexts[0]:.4g} ms "
                f"of it, natively {1e3 * contexts[1]:.4g}; with NCCL_RUNTIME_CONNECT=1 "
                f"{1e3 * most(later, key):.4g} ms, contexts {1e3 * contexts[2]:.4g}"
            )
        yield Row(
            name=name, value=round(value / beside, 3), unit="× native", target=target, better="lower",
            conditions=f"{where}; {1e3 * value:.4g} ms, natively {1e3 * beside:.4g}{more}",
        )  # fmt: skip
    small = most(xmig, "small_s") - (0 if native is None else most(native, "small_s"))
    yield Row(
        name="all-reduce 8 B, beyond native", value=round(1e6 * small, 2), unit="µs",
        target=None if native is None else 3, better="lower", conditions=f"{where}; 500 in a row",
    )  # fmt: skip


def most(ranks: list[dict[str, Any]], key: str) -> float:
    return max(float(rank[key]) for rank in ranks)


def recovery(bench: Bench) -> Iterator[Row]:
    """A data-parallel training whose servers are killed, beside an undisturbed one and a native one."""
    shared = shares(bench)
    where = place(bench)
    small = ["--batch", "2", "--layers", "4"] if shared else []
    count = 1 if bench.rehearsal else 60 if shared else 360
    warmup = 0 if bench.rehearsal else WARMUP
    words = ["--deterministic", "--steps", str(count), "--warmup", str(warmup), *small]
    words += [*(["--shared"] if shared else []), *(TINY if bench.rehearsal else [])]
    native = None if bench.rehearsal else run(bench, None, words, "ddp.py")
    kinds: list[tuple[str, dict[str, object], float, float]] = [
        ("job recovery, kill", {"standby_communicators_mib": 16384}, 0.5, 1.0),
        ("job recovery without standby communicators", {}, 1.5, 3.0),
    ]
    wrong: list[str] = []
    kills_in_all = 0
    step = 0.0
    for which, (name, settings, usual, worst) in enumerate(kinds):
        killed: list[float] = []
        with bench.node(devices=devices(bench), **settings) as node:
            if which == 0:
                plain = run(bench, node, words, "ddp.py")
                snapshots = snapshots_of(node)
                step = median(plain[0]["times_s"][warmup:])
                wrong += different(native or plain, plain, "undisturbed")
                if native is not None:
                    beside = median(native[0]["times_s"][warmup:])
                    yield Row(
                        name="ddp: step, GPT-2", value=round(step / beside, 3), unit="× native", target=1.0,
                        better="lower",
                        conditions=f"{where}; {1e3 * step:.4g} ms, natively {1e3 * beside:.4g}; deterministic, "
                        "snapshots taken",
                    )  # fmt: skip
                if costs := [100 * spent / lasted for spent, lasted, _ in snapshots if lasted]:
                    yield Row(
                        name="snapshots: cost", value=round(max(costs), 3), unit="% of time", target=1, better="lower",
                        conditions=f"{where}; GPT-2-small with DDP, undisturbed; of the rank that spent most; "
                        f"{', '.join(str(count) for *_, count in snapshots)} snapshots",
                    )  # fmt: skip
            status = bench.scratch / f"ddp-{which}.status"
            taken: list[int] = []
            kill = partial(kill_servers, bench, status, killed, taken=taken, ahead=which == 0)
            disturbed = run(bench, node, [*words, "--status", str(status)], "ddp.py", kill)
            recovered = [one for one in node.client.get("/v1/recoveries") if one["outcome"] == "resumed"]
        wrong += different(native or plain, disturbed, f"{name}:")
        kills_in_all += len(killed)
        about = f"{where}; {len(killed)} servers killed, of one rank after the other; {len(recovered)} recoveries"
        stalls = sorted(max(each) for each in pieces(disturbed[0]["times_s"][warmup:], step))
        for what, value, target in (
            ("median", stalls and median(stalls), usual),
            ("worst", stalls and stalls[-1], worst),
        ):
            if value:
                yield Row(
                    name=f"{name}: stall, {what}", value=round(value - step, 3), unit="s", target=target,
                    better="lower", conditions=about,
                )  # fmt: skip
        if taken:
            yield Row(
                name="standby communicators: memory", value=round(median(taken) / (1 << 20)), unit="MiB per rank",
                target=2048, better="lower",
                conditions=f"{where}; one communicator of {RANKS} ranks; by what was free before and after",
            )  # fmt: skip
    yield Row(
        name="job recovery: differences", value=0 if bench.rehearsal else len(wrong), unit="in all", target=0,
        better="lower", conditions=f"{where}; {kills_in_all} kills in {2 * count} steps of GPT-2 with DDP; "
        f"different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip


def snapshots_of(node: Node) -> list[tuple[float, float, int]]:
    """Of each process that there was: milliseconds spent on snapshots, those from the first to the last, how many."""
    found = []
    for process in node.client.get("/v1/processes"):
        taken = node.client.get(f"/v1/processes/{process['id']}/segments", limit=1000)
        times = [each["at"] for each in taken]
        if times:
            found.append((sum(each["ms"] for each in taken[:-1]), 1e3 * (max(times) - min(times)), len(taken)))
    return found


def four_on_two(bench: Bench) -> Iterator[Row]:
    """Four ranks on two GPUs, which NCCL is to take for four machines."""
    ranks = 2 * RANKS
    count = 1 if bench.rehearsal else 80
    words = ["--deterministic", "--warmup", "0", "--steps", str(count), "--shared"]
    words += TINY if bench.rehearsal else ["--batch", "2", "--layers", "4", "--context", "512"]
    native = None if bench.rehearsal else run(bench, None, words, "ddp.py", ranks=ranks)
    status, killed = bench.scratch / "four.status", list[float]()
    with bench.node(devices=",".join(bench.two())) as node:
        disturbed = run(
            bench, node, [*words, "--status", str(status)], "ddp.py",
            partial(kill_servers, bench, status, killed, ranks=ranks, apart=4), ranks=ranks,
        )  # fmt: skip
        recovered = [one for one in node.client.get("/v1/recoveries", limit=1000) if one["outcome"] == "resumed"]
    where = "four ranks on two GPUs, NCCL without P2P and shared memory, natively as well"
    wrong = [] if native is None else different(native, disturbed, "with kills")
    yield Row(
        name="four on two: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{where}; {len(killed)} kills in {count} steps of GPT-2 with DDP, {len(recovered)} recoveries; "
        f"different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip
    step = median(disturbed[0]["times_s"])
    if stalls := sorted(max(each) for each in pieces(disturbed[0]["times_s"], step)):
        yield Row(
            name="four on two, kill: stall, median", value=round(median(stalls) - step, 3), unit="s", better="lower",
            conditions=f"{where}; {len(killed)} kills, worst {stalls[-1] - step:.3g} s; a step: {1e3 * step:.4g} ms",
        )  # fmt: skip
    if native is not None:
        beside = median(native[0]["times_s"])
        yield Row(
            name="four on two: step", value=round(step / beside, 3), unit="× native", better="lower",
            conditions=f"{where}; {1e3 * step:.4g} ms, natively {1e3 * beside:.4g}",
        )  # fmt: skip


def different(reference: list[dict[str, Any]], runs: list[dict[str, Any]], called: str) -> list[str]:
    """Whose losses or weights are not those of the same rank in the other run."""
    return [
        f"{name} of rank {one['rank']} {called}"
        for one, other in zip(runs, reference, strict=True)
        for key, name in (("losses", "losses"), ("sha256", "weights"))
        if one[key] != other[key]
    ]


def pieces(times: list[float], step: float) -> list[list[float]]:
    """Steps that took much longer than the others, those that follow each other together."""
    found: list[list[float]] = []
    before = -9
    for number, time_s in enumerate(times):
        if time_s > step + STALL:
            if number - before > 3:
                found.append([])
            found[-1].append(time_s)
            before = number
    return found


def kill_servers(
    bench: Bench, status: Path, killed: list[float], program: Program, *, ranks: int = RANKS, apart: int = WARMUP,
    ahead: bool = False, taken: list[int] | None = None,
) -> None:  # fmt: skip
    """One after the other, of one rank after the other, each when all standbys are warm and `apart` steps are done;
    `ahead`: and have made their communicators. `taken`: bytes that these take."""
    files = [status.with_suffix(f".{rank}") for rank in range(ranks)]
    chance = random.Random(1)
    steps = 0
    while program.process.poll() is None:
        if min(kills.step(file) for file in files) < steps + apart or kills.phase(files[0]) == "end":
            time.sleep(0.005)
            continue
        listed = ready(program, ranks)
        if listed is None:
            time.sleep(0.005)
            continue
        if ahead and any(one["standby_communicators"] == 0 for one in listed):
            time.sleep(0.005)
            continue
        if taken is not None:
            taken += [one["communicator_bytes"] for one in listed if one["communicator_bytes"]]
        time.sleep(chance.uniform(0, 0.04))
        with contextlib.suppress(ProcessLookupError):
            os.kill(listed[len(killed) % ranks]["server_pid"], signal.SIGKILL)
            killed.append(time.monotonic())
        steps = max(kills.step(file) for file in files)


def ready(program: Program, ranks: int) -> list[dict[str, Any]] | None:
    """The ranks' processes, if all of them run, each with a warm standby."""
    listed = [one for one in program.node.client.get("/v1/processes", job=program.job) if one["state"] == "running"]
    warm = len(listed) >= ranks and all(one["standby"] == "warm" for one in listed[:ranks])
    return sorted(listed[:ranks], key=lambda one: int(one["pid"])) if warm else None


def place(bench: Bench) -> str:
    """For a row's conditions."""
    return "two ranks on one GPU, without P2P and shared memory" if shares(bench) else "one GPU for each rank"


def devices(bench: Bench) -> str:
    """The daemon's."""
    return ",".join(f"{bench.kind}:{number}" for number in range(1 if shares(bench) else RANKS))


def device_of_job(bench: Bench) -> str | None:
    """All devices."""
    return None if shares(bench) else f"{bench.kind}:{','.join(map(str, range(RANKS)))}"


def shares(bench: Bench) -> bool:
    """Are the ranks on one GPU?"""
    return bench.kind == "cuda" and gpus() < RANKS


def differing(native: list[dict[str, Any]], xmig: list[dict[str, Any]]) -> list[str]:
    """Names of results that are not the same on some rank."""
    found: list[str] = []
    for ours, theirs in zip(xmig, native, strict=True):
        found += [name for name, digest in theirs["digests"].items() if ours["digests"].get(name) != digest]
        found += [f"loss {i}" for i, loss in enumerate(theirs["losses"]) if ours["losses"][i] != loss]
    return found


def run(
    bench: Bench,
    node: Node | None,
    words: list[str],
    name: str = "ranks.py",
    disturb: Callable[[Program], None] | None = None,
    ranks: int = RANKS,
    more: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> list[dict[str, Any]]:
    """What each rank says. `more`: of its environment. Raises Failed."""
    command = [
        bench.python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone",
        str(PROGRAMS / name), *words,
    ]  # fmt: skip
    how = "natively" if node is None else "xmig" if disturb is None else "killed"
    how += "" if ranks == RANKS else f"-{ranks}"
    out = bench.logs / f"{Path(name).stem}-{how}.out"
    end = min(bench.end, time.monotonic() + patience)
    with out.open("w") as to:
        if node is None:
            process: subprocess.Popen[Any] = subprocess.Popen(
                command,
                env=bench.natively(RANKS) | dict(more or {}),
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            options: dict[str, Any] = {"stdout": to, "stderr": subprocess.STDOUT, "start_new_session": True}
            options["environment"] = {**bench.environment, **(more or {})}
            program = node.program(command, name="ranks", device=device_of_job(bench), **options)
            process = program.process
            if disturb is not None:
                threading.Thread(target=disturb, args=(program,), daemon=True).start()
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"ranks take longer than {patience:.0f} s; see {out}") from None
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{") and '"rank"' in line]
    if code != 0 or len(lines) != ranks:
        raise Failed(f"ranks ended with {code}, and {len(lines)} of {ranks} have results; see {out}")
    return sorted(lines, key=lambda line: int(line["rank"]))
