"""Checkpoints: how long a program stands still for one, what it takes to store and to restore, and whether what is
restored computes the same. Beside it, in the same run, the driver's own checkpoint and torch.save."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.gpu.bench import Bench, Failed, wait_until
from tests.gpu.cases import PROGRAMS, TINY_GPT
from xmigd.cli.starting import name_optimizer_state
from xmigd.client import Client
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

PATIENCE = 300.0
KEEP_BITS = 11
LOSSY_STEPS, LOSSES = 300, 50
MIB = 38147  # 40 GB
POOL_MIB = 40960
TIER_MIB = 49152  # of host memory, for checkpoints
SMALL_TIER_MIB = 16384
READERS = 16  # threads that read a disk at once
OVER = ("succeeded", "failed", "cancelled")
# The driver's own: of another process, which it suspends to host memory and brings back.
DRIVER = """
import ctypes, sys, time
driver, pid = ctypes.CDLL("libcuda.so.1"), int(sys.argv[1])
arguments = ctypes.create_string_buffer(64)
took = []
driver.cuInit(0)
for names in (("cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"),
              ("cuCheckpointProcessRestore", "cuCheckpointProcessUnlock")):
    began = time.monotonic()
    for name in names:
        code = getattr(driver, name)(pid, arguments)
        assert code == 0, (name, code)
    took.append(time.monotonic() - began)
print(*took)
"""


@dataclass(frozen=True)
class Kept:
    """`tests/gpu/programs/kept.py`, which writes into `output` what it computes."""

    process: subprocess.Popen[str]
    output: Path
    program: Program | None

    def lines(self) -> int:
        return self.output.read_text().count("\n") if self.output.exists() else 0

    def text(self) -> str:
        return self.output.read_text()

    def ranks(self) -> list[Kept]:
        """Of one with two: what each writes."""
        return [Kept(self.process, Path(f"{self.output}.{rank}"), self.program) for rank in range(2)]

    def let_end(self) -> None:
        self.output.with_suffix(".go").touch()

    def done(self) -> list[float]:
        """Wait for its end: bytes of its state, seconds that torch.save took, its longest step."""
        over = Path(f"{self.output}.done")
        wait_until(over.exists, "it has done its steps", PATIENCE)
        return [float(word) for word in over.read_text().split()]


@contextmanager
def kept(
    bench: Bench, node: Node | None, name: str, arguments: list[str], **environment: str
) -> Iterator[Kept]:  # fmt: skip
    """It runs, with nothing open but files."""
    output = bench.scratch / f"{name}-{'xmig' if node else 'native'}"
    command = [bench.python, str(PROGRAMS / "kept.py"), "--output", str(output), *arguments]
    if bench.rehearsal:
        steps = "5000" if "training" in arguments else "40"
        command += [*TINY_GPT.split(), "--mib", "64", "--dirty-mib", "2", "--steps", steps]
    log = bench.logs / f"{output.name}.out"
    with log.open("w") as out:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True, "text": True,
        }  # fmt: skip
        if node is None:
            process = subprocess.Popen(command, env=dict(bench.natively()) | dict(bench.environment), **options)
            running = Kept(process, output, None)
        else:
            program = node.program(command, name=name, environment=dict(bench.environment) | environment, **options)
            running = Kept(program.process, output, program)
    try:
        wait_until(lambda: "holding" in log.read_text() or running.process.poll() is not None, "it works", PATIENCE)
        if running.process.poll() is not None:
            raise Failed(f"{name}: it ended too soon: {' '.join(log.read_text().split())[-300:]}")
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


def done(client: Client, operation: dict[str, Any]) -> dict[str, Any]:
    """Its result, when it has succeeded."""
    began = time.monotonic()
    while operation["state"] not in OVER:
        if time.monotonic() - began > PATIENCE:
            raise Failed(f"the {operation['kind']} is not over after {PATIENCE:.0f} s: {operation['phase']}")
        operation = client.get(f"/v1/operations/{operation['id']}/wait", timeout=10)
    if operation["state"] != "succeeded":
        error = operation["error"] or {}
        raise Failed(f"the {operation['kind']}: {error.get('code')}: {error.get('detail')}")
    result: dict[str, Any] = operation["result"]
    return result


def make(node: Node, running: Kept, **more: Any) -> dict[str, Any]:
    assert running.program is not None
    operation = node.client.post("/v1/checkpoints", {"job": running.program.job, **more})
    if more.get("stop"):
        running.process.wait(PATIENCE)  # the daemon waits until its pid is free
    return done(node.client, operation)


def restore(node: Node, made: dict[str, Any]) -> dict[str, Any]:
    return done(node.client, node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": []}))


def disk_speed(folder: Path, mib: int, *, keep: bool = False) -> float:
    """Of writing what cannot be compressed, until it is on the disk. GB/s. `keep`: it stays, as `speed`."""
    piece, path = os.urandom(64 << 20), folder / "speed"
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(mib // 64):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    took = time.monotonic() - began
    if not keep:
        path.unlink()
    return (mib << 20) / took / 1e9


def large(bench: Bench) -> Iterator[Row]:
    """40 GB of random content, of which a step changes 64 MB."""
    arguments = ["--what", "memory", "--mib", str(MIB), "--pause", "0.002"]
    native, saved, driver = natively(bench, "checkpoint-40GB", arguments)
    what = "40 GB of random content, of which a step changes 64 MB, PyTorch"
    ready = 0 if bench.rehearsal else POOL_MIB << 20
    with (
        host_memory(bench) as memory,
        bench.node(criu=criu(), host_pool_mib=ready >> 20, checkpoint_memory_mib=4096 if bench.rehearsal else TIER_MIB,
                   **memory) as node,
    ):  # fmt: skip
        with kept(bench, node, "checkpoint-40GB", arguments) as running:
            wait_until(lambda: pool(node) >= ready, "host memory is ready", 120)
            disk = disk_speed(node.folder, 64 if bench.rehearsal else 8192)
            first = make(node, running)
            yield from standstill("checkpoint of 40 GB", first, what)
            settled = until_on_disk(node, first)
            first |= {"stored_bytes": node.client.get(f"/v1/checkpoints/{first['checkpoint']}")["stored_bytes"]}
            yield to_disk("checkpoint of 40 GB", first | {"store_ms": first["store_ms"] + settled}, disk, saved)
            yield from increments(node, running, what)
            last = make(node, running, stop=True)
        yield from restored(node, "40 GB", last, running, native, what, "host memory")
        yield from from_disk(bench, node, "40 GB", last, what)
    if driver:
        stood = (first["standstill_ms"] or 0) / 1e3
        yield Row(
            name="the driver's own checkpoint and back, 40 GB", value=round(sum(driver) / max(stood, 1e-3), 1),
            unit="× xMIG's standstill", target=15, better="higher",
            conditions=f"of the same program natively, without CRIU's part: {driver[0]:.2f} s out, {driver[1]:.2f} s "
            f"back, in which it stands still; xMIG's checkpoint {stood:.3f} s; {what}",
        )  # fmt: skip


def increments(node: Node, running: Kept, what: str) -> Iterator[Row]:
    """Of a job that goes on, in which nothing but its own memory has changed."""
    took, every = [], []
    for _ in range(3):
        began = time.monotonic()
        every.append(make(node, running))
        took.append((time.monotonic() - began) * 1e3)
        until_on_disk(node, every[-1])  # nothing else is under way then
    beyond = [whole - each["dump_ms"] for whole, each in zip(took, every, strict=True)]
    middle = sorted(range(3), key=lambda one: beyond[one])[1]
    made = every[middle]
    where = "host memory" if not made["on_disk"] else "the disk"
    yield Row(
        name="increment of an idle 40 GB job", value=round(beyond[middle] / 1e3, 3), unit="s beyond CRIU's dump",
        target=0.1, better="lower",
        conditions=f"from the request until there is another checkpoint, in {where}, while the job goes on: "
        f"{took[middle]:.0f} ms in all, the median of three; it stood still for {made['standstill_ms']:.0f} ms; "
        f"{made['copied_bytes'] / 1e6:.0f} MB copied from the device; {parts(made)}; {what}",
    )  # fmt: skip
    yield Row(
        name="increment of an idle 40 GB job: CRIU's dump", value=round(made["dump_ms"] / 1e3, 3), unit="s",
        better="lower", conditions=f"of the program's own memory, all of it each time; {what}",
    )  # fmt: skip


def until_on_disk(node: Node, made: dict[str, Any]) -> float:
    """ms."""
    began = time.monotonic()
    path = f"/v1/checkpoints/{made['checkpoint']}"
    wait_until(lambda: "disk" in node.client.get(path)["places"], "it is on the disk", PATIENCE)
    return (time.monotonic() - began) * 1e3


@contextmanager
def host_memory(bench: Bench) -> Iterator[dict[str, object]]:
    """Settings of a node that has its checkpoints in a tmpfs large enough; where none can be mounted, in /dev/shm."""
    folder = bench.scratch / "host-memory"
    folder.mkdir(mode=0o700, exist_ok=True)
    size = "4g" if bench.rehearsal else f"{2 * TIER_MIB}m"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield {}
        return
    try:
        yield {"checkpoint_memory_dir": folder}
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def from_disk(bench: Bench, node: Node, name: str, made: dict[str, Any], what: str) -> Iterator[Row]:
    """The same once more, when host memory has nothing of it: against the speed at which the disk is read."""
    node.stop()
    node.environment["XMIG_CHECKPOINT_MEMORY_MIB"] = "0"  # what is on the disk goes out of host memory
    mib = 64 if bench.rehearsal else 8192
    probe = node.folder / "speed"
    disk_speed(node.folder, mib, keep=True)
    cold = dropped_caches()
    disk = read_speed(probe)
    probe.unlink()
    node.start()
    cold = dropped_caches() and cold
    back = done(node.client, node.client.post(
        f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": [], "own_files": True}
    ))  # fmt: skip
    speed = made["content_bytes"] / back["read_ms"] / 1e6
    yield Row(
        name=f"restore of {name}, from disk", value=round(speed / disk, 3), unit="of the disk's speed", target=0.9,
        better="higher",
        conditions=f"{speed:.2f} GB/s until its memory was read, the disk alone {disk:.2f} GB/s; "
        f"{'no page of it' if cold else 'pages of it may be'} in host memory before; {back['ms'] / 1e3:.2f} s in all, "
        f"memory was read after {back['read_ms']:.0f} ms, CRIU done after {back['criu_ms']:.0f}; {what}",
    )  # fmt: skip
    os.kill(back["pid"], signal.SIGKILL)


def dropped_caches() -> bool:
    """Nothing of a file is in the page cache any more."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return True


def read_speed(path: Path) -> float:
    """Of several threads, each of its own part. GB/s."""
    size, piece = path.stat().st_size, 2 << 20
    buffers = threading.local()

    def read(at: int) -> int:
        if not hasattr(buffers, "piece"):
            buffers.piece = bytearray(piece)
        return os.preadv(file.fileno(), [buffers.piece], at)

    began = time.monotonic()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        if sum(pool.map(read, range(0, size, piece))) != size:
            raise Failed(f"{path} was not read as a whole")
    return size / (time.monotonic() - began) / 1e9


def training(bench: Bench) -> Iterator[Row]:
    """GPT-2-small after some steps: what is restored ends as the native run."""
    arguments = ["--what", "training", "--context", "256", "--deterministic", "--steps", "800"]
    native, saved, _ = natively(bench, "checkpoint-training", arguments)
    what = "GPT-2-small, B=8, 256 tokens, AdamW, deterministic"
    with (
        host_memory(bench) as memory,
        bench.node(criu=criu(), checkpoint_memory_mib=SMALL_TIER_MIB, **memory) as node,
    ):
        with kept(bench, node, "checkpoint-training", arguments) as running:
            wait_until(lambda: running.lines() >= (10 if bench.rehearsal else 200), "200 steps", PATIENCE)
            disk = disk_speed(node.folder, 64 if bench.rehearsal else 2048)
            first = make(node, running)
            yield from standstill("checkpoint of a training", first, what)
            settled = until_on_disk(node, first)
            first |= {"stored_bytes": node.client.get(f"/v1/checkpoints/{first['checkpoint']}")["stored_bytes"]}
            yield to_disk("checkpoint of a training", first | {"store_ms": first["store_ms"] + settled}, disk, saved)
            yield Row(
                name="compression", value=round(first["content_bytes"] / max(first["stored_bytes"], 1), 2),
                unit="× smaller", better="higher",
                conditions=f"all that the checkpoint has, program included: {first['content_bytes'] / 1e6:.0f} MB, "
                f"{first['stored_bytes'] / 1e6:.0f} MB on disk; after 200 steps; {what}",
            )  # fmt: skip
            second = make(node, running, stop=True)
        yield from restored(node, "a training", second, running, native, what, "host memory")


def lossy(bench: Bench) -> Iterator[Row]:
    """The same, with a checkpoint that rounds the moments: before it all is as natively, and afterwards how far is it
    from that? What a null device computes is no number."""
    if bench.rehearsal:
        return
    arguments = ["--what", "training", "--context", "256", "--deterministic", "--steps", str(LOSSY_STEPS)]
    native, _, _ = natively(bench, "checkpoint-lossy", arguments)
    environment: dict[str, str] = {}
    name_optimizer_state(environment, "exp_avg,exp_avg_sq")
    with (
        host_memory(bench) as memory,
        bench.node(criu=criu(), checkpoint_memory_mib=SMALL_TIER_MIB, **memory) as node,
    ):
        with kept(bench, node, "checkpoint-lossy", arguments, **environment) as running:
            wait_until(lambda: running.lines() >= LOSSY_STEPS // 2, "half of its steps", PATIENCE)
            made = make(node, running, stop=True, keep_bits=KEEP_BITS)
            before = running.text().splitlines()
        restore(node, made)
        running.let_end()
        running.done()
    rounded = made["lossy"]
    errors = "; ".join(
        f"{each['changed']} of type {each['type']} changed, at most by {each['largest_relative']:.3g} of what they were"
        for each in rounded["rounded"]
    )
    what = f"GPT-2-small, B=8, 256 tokens, fused AdamW, deterministic; its moments with {KEEP_BITS} bits of mantissa"
    yield Row(
        name="lossy checkpoint of a training: pieces with moments",
        value=round(rounded["piece_bytes"] / max(rounded["stored_bytes"] or 0, 1), 2), unit="× smaller", target=2,
        better="higher", conditions=f"{rounded['piece_bytes'] / 1e6:.0f} MB; numbers: {errors}; {what}",
    )  # fmt: skip
    reference = native.splitlines()
    different = before != reference[: len(before)]
    yield Row(
        name="lossy checkpoint of a training: differences before", value=float(different), unit="in all", target=0,
        better="lower", conditions=f"what the program has written until it was made, against a native run; {what}",
    )  # fmt: skip
    ours, theirs = (losses(text)[-LOSSES:] for text in (running.text(), native))
    yield Row(
        name="lossy checkpoint of a training: loss afterwards", value=round(abs(fmean(ours) / fmean(theirs) - 1), 6),
        unit="of the native one", target=0.005, better="lower",
        conditions=f"mean of the last {LOSSES} of {LOSSY_STEPS} steps, {LOSSY_STEPS - len(before)} after it was made: "
        f"{fmean(ours):.5f}, natively {fmean(theirs):.5f}; its tokens are random: the loss can hardly fall; {what}",
    )  # fmt: skip


def losses(text: str) -> list[float]:
    return [float.fromhex(line.split()[1]) for line in text.splitlines() if line[0].isdigit()]


def ranks(bench: Bench) -> Iterator[Row]:
    """Two ranks on one GPU: what they write ends as that of the native ranks. A null device computes no second step."""
    if bench.rehearsal:
        return
    arguments = [
        "--what", "training", "--ranks", "2", "--batch", "4", "--context", "256", "--deterministic", "--steps", "80",
    ]  # fmt: skip
    what = "GPT-2-small with DDP, 2 ranks on one GPU, B=4 each, 256 tokens, AdamW, deterministic"
    with kept(bench, None, "checkpoint-ranks", arguments) as running:
        native = [rank.text() for rank in running.ranks() if rank.done()]
    with (
        host_memory(bench) as memory,
        bench.node(criu=criu(), checkpoint_memory_mib=SMALL_TIER_MIB, **memory) as node,
    ):
        with kept(bench, node, "checkpoint-ranks", arguments) as running:
            both = running.ranks()
            wait_until(lambda: all(rank.lines() >= 15 for rank in both), "15 steps", PATIENCE)
            made = make(node, running)
            again = make(node, running, stop=True)
        back = restore(node, again)
        for rank in both:
            rank.done()
    yield Row(
        name="checkpoint of two ranks: standstill", value=round(made["standstill_ms"] / 1e3, 3), unit="s", target=1.0,
        better="lower",
        conditions=f"from the first rank that stops until all go on; {parts(made)}; "
        f"{made['content_bytes'] / 1e6:.0f} MB of content, {made['stored_bytes'] / 1e6:.0f} MB stored; {what}",
    )  # fmt: skip
    yield Row(
        name="restore of two ranks", value=round(back["ms"] / 1e3, 3), unit="s", target=1.5, better="lower",
        conditions=f"from host memory, {back['shared_bytes'] / 1e6:.0f} MB as they are there; memory was read after "
        f"{back['read_ms']:.0f} ms, CRIU done after {back['criu_ms']:.0f}; {what}",
    )  # fmt: skip
    yield Row(
        name="restore of two ranks: differences",
        value=float(native != [rank.text() for rank in both]), unit="in all", target=0,
        better="lower",
        conditions=f"what both ranks have written until their end, against native ones, to the last bit; {what}",
    )  # fmt: skip


def natively(bench: Bench, name: str, arguments: list[str]) -> tuple[str, float, list[float]]:
    """What it writes; GB/s of torch.save; seconds of the driver's own checkpoint, out and back."""
    driver: list[float] = []
    if bench.rehearsal:
        return "", 0.0, driver
    save = bench.scratch / "saved.pt"
    with kept(bench, None, name, [*arguments, "--save", str(save)]) as running:
        if "memory" in arguments:
            command = [sys.executable, "-c", DRIVER, str(running.process.pid)]
            done_by_driver = subprocess.run(
                command, env=bench.natively(), capture_output=True, text=True, check=False, timeout=120
            )
            if done_by_driver.returncode == 0:
                driver = [float(word) for word in done_by_driver.stdout.split()]
            else:
                (bench.logs / f"{name}-driver.err").write_text(done_by_driver.stderr)
        running.let_end()
        size, took, _ = running.done()
    save.unlink(missing_ok=True)
    return running.output.read_text(), size / max(took, 1e-3) / 1e9, driver


def standstill(name: str, made: dict[str, Any], what: str) -> Iterator[Row]:
    yield Row(
        name=f"{name}: standstill", value=round((made["standstill_ms"] - made["dump_ms"]) / 1e3, 3),
        unit="s beyond CRIU's dump", target=0.1, better="lower",
        conditions=f"in all {made['standstill_ms']:.0f} ms, from the request to stop until it goes on; {parts(made)}; "
        f"{what}",
    )  # fmt: skip
    yield Row(
        name=f"{name}: to host memory", value=round(made["copy_ms"] / 1e3, 3), unit="s", target=1.3, better="lower",
        conditions=f"of device memory, beside the dump and the program; {parts(made)}; {what}",
    )  # fmt: skip


def to_disk(name: str, made: dict[str, Any], disk: float, saved: float) -> Row:
    speed = made["content_bytes"] / made["store_ms"] / 1e6
    beside = f"; torch.save and fsync of the state natively {saved:.2f} GB/s" if saved else ""
    return Row(
        name=f"{name}: to disk", value=round(speed / disk, 3), unit="of the disk's speed", target=0.9, better="higher",
        conditions=f"{speed:.2f} GB/s of content, synced; the disk alone {disk:.2f} GB/s{beside}; "
        f"{made['stored_bytes'] / 1e6:.0f} of {made['content_bytes'] / 1e6:.0f} MB stored",
    )  # fmt: skip


def restored(
    node: Node, name: str, made: dict[str, Any], running: Kept, native: str, what: str,
    source: str = "disk, as far as its pages are not in memory",
) -> Iterator[Row]:  # fmt: skip
    """It goes on from there to its end, and has written the same."""
    back = restore(node, made)
    running.let_end()
    running.done()
    different = native != "" and running.output.read_text() != native
    yield Row(
        name=f"restore of {name}", value=round(back["ms"] / 1e3, 3), unit="s", target=1.5, better="lower",
        conditions=f"from {source}, {back['shared_bytes'] / 1e6:.0f} MB as they are there; "
        f"{made['content_bytes'] / back['ms'] / 1e6:.2f} GB/s; memory was read after {back['read_ms']:.0f} ms, "
        f"CRIU done after {back['criu_ms']:.0f}; {what}",
    )  # fmt: skip
    yield Row(
        name=f"restore of {name}: differences", value=float(different), unit="in all", target=0, better="lower",
        conditions=f"what the restored program has written until its end, against a native run, to the last bit; "
        f"{what}",
    )  # fmt: skip


def parts(made: dict[str, Any]) -> str:
    names = {"dump_ms": "CRIU's dump", "copy_ms": "to host memory", "store_ms": "to disk"}
    return ", ".join(f"{text} {made[key]:.0f} ms" for key, text in names.items() if key in made)


def pool(node: Node) -> int:
    """Bytes of host memory that is ready."""
    for line in node.client.get_text("/metrics").splitlines():
        if line.startswith("xmigd_host_pool_bytes "):
            return int(float(line.split()[1]))
    return 0


def criu() -> str:
    """Raises Failed: there is none, or it does not run here."""
    kit = Path(__file__).parents[2] / "criu" / "criu"
    program = str(kit) if kit.exists() else os.environ.get("CRIU", "criu")
    try:
        checked = subprocess.run([program, "check"], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise Failed(f"there is no CRIU: {error.strerror}") from None
    if checked.returncode != 0:
        raise Failed(f"CRIU does not run here: {' '.join(checked.stderr.split())[-300:]}")
    return program


if __name__ == "__main__":
    print(json.dumps({"criu": criu()}))
