"""A rank's device is lost with its memory in the middle of a training, again and again: the rank goes on elsewhere with
what the other rank has, and moves back once its device is there again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives, kills
from tests.gpu.bench import Bench, Failed, gpus
from tests.gpu.collectives import RANKS, TINY
from tests.gpu.rank_faults import SMALL, STEPS, Injected, at_work, stalls_of
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

LOSSES = 6
COPIES_MIB = 16384  # host memory for what only one rank has, such as its batch and its activations
ATTEMPTS = 3  # jobs, if one does not survive
LASTS = 55.0  # seconds from the part's start in which devices are lost
AFTERWARDS = 50.0  # for the end of the training and the native run
ENOUGH = 30.0  # with less than that nothing is begun any more
SPARES = 2  # devices beyond the ranks', where there are so many
PATIENCE = 20.0  # for anything of the daemon's
COPIED = re.compile(r"(\d+) MiB of \d+ MiB that were lost with a device were copied from (other ranks|host memory)")
ANEW = re.compile(r"a device was lost with its memory: (\d+) MiB were made anew")
REASONS = ("its device was lost with its memory", "while a snapshot was being taken", "the process is lost")
OVER = ("succeeded", "failed", "cancelled")


@dataclass
class Found:
    """What happened, as far as it was seen. `injected`: losses, and moves back, which end what follows a loss."""

    injected: list[Injected] = field(default_factory=list)
    survived: int = 0
    went_to: list[str] = field(default_factory=list)
    prepared: list[bool] = field(default_factory=list)  # of each loss: the daemon knew that the rank would survive
    copies: list[int] = field(default_factory=list)  # of each loss: bytes of the rank's that host memory had
    moved: int = 0
    errors: list[str] = field(default_factory=list)  # with which a job ended
    notes: list[str] = field(default_factory=list)  # what failed, and the job went on
    rounds: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # by job and number
    resumed_ms: list[float] = field(default_factory=list)
    pulled: dict[str, list[int]] = field(default_factory=dict)  # MiB, by where they came from

    @property
    def losses(self) -> int:
        return sum(one.kind == "loss" for one in self.injected)


def measure(bench: Bench) -> Iterator[Row]:
    """First under xMIG, until all devices are lost or time is over; then as many steps natively. A job that does not
    survive is followed by another one while there is time."""
    began = time.monotonic()
    devices = devices_of_two(bench)
    end = began + LASTS if bench.rehearsal else min(began + LASTS, bench.end - AFTERWARDS)
    found = Found()
    trained: list[dict[str, Any]] | None = None
    words = words_of(bench)
    with bench.node(devices=",".join(devices), replica_copies_mib=COPIES_MIB) as node:
        for number in range(ATTEMPTS):
            if number > 0 and time.monotonic() > end - ENOUGH:
                break
            use_again(node, devices[RANKS - 1])
            trained = attempt(bench, node, found, words, partial(lose_again, bench, devices[RANKS - 1], end, found))
            if trained is not None:
                break
        read_log(node, found)
    wrong = compared(bench, words, trained, found.errors, "with lost devices")
    where = f"{RANKS} ranks, each on a GPU of its own, GPT-2-small with DDP"
    spare = len(devices) > RANKS
    went_to = ", ".join(sorted(set(found.went_to))) or "nowhere"
    to = f"{'on a spare GPU' if spare else 'on the GPU of rank 0'} ({went_to})"
    about = (
        f"{where}; the device of rank {RANKS - 1} is lost, the rank goes on {to} "
        f"and moves back ({found.moved} times); {found.survived} of {found.losses} losses survived"
    )
    errors = f"a job ended: {'; '.join(found.errors[:3])[:500]}" if found.errors else "no job ended by it"
    errors += f"; {'; '.join(found.notes[:2])[:300]}" if found.notes else ""
    yield Row(
        name="replaced device: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{about}; {0 if trained is None else len(trained[0]['times_s'])} steps; {errors}; "
        f"different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip
    if trained is not None:
        step = median(trained[0]["times_s"])
        stalls = stalls_of(trained[0], [one for one in found.injected if one.at > trained[0]["ends"][0]], step)
        if values := stalls.get("loss"):
            daemon = f"; the daemon's own, of all ranks: median {median(found.resumed_ms):.0f} ms" * bool(
                found.resumed_ms
            )
            for name, value in (("median", median(values)), ("worst", max(values))):
                yield Row(
                    name=f"replaced device: stall, {name}", value=round(value, 3), unit="s", better="lower",
                    conditions=f"{about}; beyond a step of {1e3 * step:.4g} ms; each, s: "
                    f"{', '.join(f'{each:.3g}' for each in values)}{daemon}",
                )  # fmt: skip
    anew = ", ".join(map(str, found.pulled.get("anew", []))) or "none"
    copies = ", ".join(str(each >> 20) for each in found.copies) or "not known"
    known = f"{sum(found.prepared)} of {found.losses} when the daemon knew that the rank would survive"
    for name, source in (("pulled from replicas", "other ranks"), ("from copies in host memory", "host memory")):
        parts = found.pulled.get(source, [])
        yield Row(
            name=f"replaced device: bytes {name}", value=median(parts) if parts else 0, unit="MiB",
            better="lower", conditions=f"{about}; median of {len(parts)} recoveries, by the servers' log: "
            f"{', '.join(map(str, parts)) or 'none'}; memory made anew: {anew} MiB; {known}; host memory had of the "
            f"rank's, MiB: {copies}",
        )  # fmt: skip
    yield from same_place(found, where)


def same_place(found: Found, where: str) -> Iterator[Row]:
    taken = [one for one in found.rounds.values() if one["outcome"] == "taken"]
    given_up = [one for one in found.rounds.values() if one["outcome"] == "given_up"]
    same = [one["same_place"] for one in taken if one["same_place"] is not None]
    fitted = sorted(one["fitted_ms"] for one in taken if one["fitted_ms"] is not None)
    why = sorted({one["why"] for one in given_up})
    yield Row(
        name="snapshots at the same place", value=round(100 * sum(same) / len(same), 1) if same else 0,
        unit="% of rounds", better="higher",
        conditions=f"{where}; {len(same)} rounds of {len(taken)} that were taken, {len(given_up)} given up"
        f"{' (' + '; '.join(why)[:200] + ')' if why else ''}; from the first stop until all fit: "
        + (f"median {median(fitted):.1f} ms, worst {fitted[-1]:.1f}" if fitted else "not known"),
    )  # fmt: skip


def devices_of_two(bench: Bench) -> list[str]:
    """One for each rank, and up to two more. Raises Failed."""
    if bench.kind == "cuda" and gpus() < RANKS:
        raise Failed(f"it needs {RANKS} GPUs")
    spare = min(SPARES, gpus() - RANKS) if bench.kind == "cuda" else 0
    return [f"{bench.kind}:{number}" for number in range(RANKS + spare)]


def words_of(bench: Bench) -> list[str]:
    """Of ddp.py, on both sides. On null devices there is one step."""
    return ["--deterministic", "--own", "--warmup", "0", *(TINY if bench.rehearsal else SMALL)]


def attempt(
    bench: Bench,
    node: Node,
    found: Found,
    words: list[str],
    disturb: Callable[[Path, Program], None],
    name: str = "ddp.py",
    steps: list[str] | None = None,
) -> list[dict[str, Any]] | None:
    """The training with what is done to it, until that is over. None: it ended otherwise, and `found` says how."""
    number = len(list(bench.logs.glob(f"{Path(name).stem}-failed-*.out")))
    folder = bench.scratch / f"{Path(name).stem}-{time.monotonic_ns()}"
    folder.mkdir()
    status, until = folder / "status", folder / "until"
    if steps is None:
        steps = ["--sums", "--steps", "1"] if bench.kind == "null" else ["--steps", str(STEPS)]
    programs: list[Program] = []

    def disturbing(program: Program) -> None:
        programs.append(program)
        try:
            disturb(status, program)
        except (XmigError, OSError, TimeoutError, LookupError) as error:
            found.errors.append(" ".join(str(error).split()))
            kill_later(program)
        finally:
            until.touch()

    patience = LASTS + AFTERWARDS if bench.rehearsal else max(ENOUGH, bench.end - time.monotonic() - ENOUGH)
    try:
        return collectives.run(
            bench, node, [*words, *steps, "--until", str(until), "--status", str(status)], name, disturbing,
            patience=min(patience, LASTS + AFTERWARDS),
        )  # fmt: skip
    except (XmigError, OSError, LookupError, ValueError) as error:
        for program in programs:
            with contextlib.suppress(XmigError, OSError, LookupError):
                found.errors[:0] = reason_of(program)
        found.errors.append(" ".join(str(error).split()))
        out = bench.logs / f"{Path(name).stem}-killed.out"
        if out.exists():
            out.rename(bench.logs / f"{Path(name).stem}-failed-{number}.out")
        return None


def kill_later(program: Program) -> None:
    """It may hang: nobody waits for it longer than for its own end."""
    with contextlib.suppress(Exception):
        program.process.wait(5)
    if program.process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.process.pid, signal.SIGKILL)
    with contextlib.suppress(XmigError, OSError):
        # torchrun's workers have sessions of their own.
        for one in program.node.client.get("/v1/processes", job=program.job):
            if one["state"] != "ended":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)


def reason_of(program: Program) -> list[str]:
    """What the log has of the end of a job's ranks, at most one line."""
    lines = [str(line) for line in program.lines("server", "xmigd", "program")]
    for reason in REASONS:
        if having := [line for line in lines if reason in line]:
            return [having[-1][:300]]
    return []


def compared(
    bench: Bench,
    words: list[str],
    trained: list[dict[str, Any]] | None,
    errors: list[str],
    called: str,
) -> list[str]:
    """Natively the same number of steps: what is not equal, and jobs that did not get to their end."""
    wrong = [error[:80] for error in errors[:1]]
    if trained is None:
        return wrong or ["no training got to its end"]
    if bench.rehearsal:
        return wrong
    steps = str(len(trained[0]["times_s"]))
    try:
        native = collectives.run(bench, None, [*words, "--steps", steps], "ddp.py")
    except XmigError as error:
        return [*wrong, f"not compared, natively: {error}"]
    return wrong + collectives.different(native, trained, called)


def lose_again(bench: Bench, home: str, end: float, found: Found, status: Path, program: Program) -> None:
    """Lose the last rank's device, have it back, and move the rank back. Raises Failed when the job does not go on."""
    client = program.node.client
    files = [status.with_suffix(f".{rank}") for rank in range(RANKS)]
    victim, steps = "", 0
    for number in range(2 if bench.rehearsal else LOSSES):
        listed = at_work(program, files, steps)
        look(program, found)
        if listed is None or (number > 0 and time.monotonic() > end):
            return
        victim = victim or next((one["id"] for one in listed if one["device"] == home), "")
        if not victim:
            raise Failed(f"no rank is on {home}: {', '.join(one['device'] for one in listed)}")
        snapshots = {one["id"]: one["snapshots"] or 0 for one in listed}
        known, copied = until_survives(program, victim, snapshots, 1 if bench.kind == "null" else 2)
        if program.process.poll() is not None:
            return
        found.prepared.append(known)
        found.copies.append(copied)
        steps = max(kills.step(file) for file in files)
        found.injected.append(Injected("loss", time.monotonic()))
        client.post(f"/v1/devices/{home}:lose", {"reason": "it is a measurement"})
        if not goes_on(program, files, steps):
            raise Failed("the job ended behind the loss of a device")
        found.survived += 1
        found.went_to.append(device_of(program, victim))
        look(program, found)
        recovered = client.get(f"/v1/jobs/{program.job}/ranks", together=1)["recoveries"]
        found.resumed_ms += [one["resumed_ms"] for one in recovered if one["resumed_ms"] is not None]
        use_again(program.node, home)
        if found.went_to[-1] != home:
            steps = max(kills.step(file) for file in files)
            found.injected.append(Injected("move", time.monotonic()))
            if not move_back(program, victim, home, found):
                break  # where it is now rank 0 is, too
            found.moved += 1
    at_work(program, files, steps)  # the last one has to go on, too
    look(program, found)


def goes_on(program: Program, files: list[Path], steps: int) -> bool:
    """Wait until all ranks have done steps since, and run; they need no standbys for that. Raises Failed."""
    end = time.monotonic() + PATIENCE
    while program.process.poll() is None:
        if min(kills.step(file) for file in files) > steps + 1:
            listed = program.node.client.get("/v1/processes", job=program.job)
            if sum(one["state"] == "running" and one["snapshots"] is not None for one in listed) >= RANKS:
                return True
        if time.monotonic() > end:
            raise Failed(f"after the loss of a device at step {steps} the ranks do not go on within {PATIENCE:.0f} s")
        time.sleep(0.005)
    return False


def until_survives(program: Program, victim: str, before: dict[str, int], rounds: int) -> tuple[bool, int]:
    """Wait until each rank has so many more snapshots and the daemon knows that the victim would survive; or for as
    long as it takes to say that it does not. And how many bytes of the victim's have a copy in host memory."""
    end = time.monotonic() + PATIENCE / 2
    copied = 0
    while program.process.poll() is None and time.monotonic() < end:
        listed = [one for one in program.node.client.get("/v1/processes", job=program.job) if one["state"] == "running"]
        one = next((each for each in listed if each["id"] == victim), None)
        if one is not None:
            copied = one["replica_copy_bytes"] or 0
            # torchrun's own process is in the job, and takes no snapshots.
            ranks = [each for each in listed if each["id"] in before]
            enough = all((each["snapshots"] or 0) >= before[each["id"]] + rounds for each in ranks)
            if enough and len(ranks) == RANKS and one["survives_device_loss"]:
                return True, copied
        time.sleep(0.005)
    return False, copied


def device_of(program: Program, process: str) -> str:
    listed = program.node.client.get("/v1/processes", job=program.job)
    return str(next(one["device"] for one in listed if one["id"] == process))


def use_again(node: Node, device: str) -> None:
    """It is there again, after a loss."""
    _, tag = node.client.get_tagged(f"/v1/devices/{device}")
    node.client.patch(f"/v1/devices/{device}", {"cordoned": False}, tag)


def move_back(program: Program, process: str, target: str, found: Found) -> bool:
    """With a second try: the rank may just be in a round. False: it stays, and `found` says why."""
    for _ in range(2):
        try:
            move(program, process, target)
        except XmigError as error:
            found.notes.append(" ".join(str(error).split()))
            time.sleep(1)
        else:
            return True
    return False


def move(program: Program, process: str, target: str) -> None:
    """Raises Failed."""
    body = {"process": process, "target": target}
    wait_for(program, program.node.client.post("/v1/migrations", body), "a move back")


def wait_for(program: Program, operation: dict[str, Any], what: str, patience: float = PATIENCE) -> dict[str, Any]:
    """The operation, once it has succeeded. Raises Failed."""
    end = time.monotonic() + patience
    while operation["state"] not in OVER and time.monotonic() < end:
        operation = program.node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=5)
    if operation["state"] != "succeeded":
        why = (operation["error"] or {}).get("detail") or f"{operation['state']} in {operation['phase']}"
        raise Failed(f"{what}: {' '.join(str(why).split())}")
    return operation


def look(program: Program, found: Found) -> None:
    """The job's rounds: the daemon keeps the last hundred."""
    with contextlib.suppress(XmigError, OSError):
        for one in program.node.client.get(f"/v1/jobs/{program.job}/ranks", together=100)["snapshots"]:
            found.rounds[program.job, one["round"]] = one


def read_log(node: Node, found: Found) -> None:
    """Nothing else says where lost memory came from."""
    text = node.log.read_text(errors="replace")
    for amount, source in COPIED.findall(text):
        found.pulled.setdefault(source, []).append(int(amount))
    found.pulled["anew"] = [int(amount) for amount in ANEW.findall(text)]
