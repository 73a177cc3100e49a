"""Runs programs natively and under a daemon of its own, keeps what they say, and ends what takes too long."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu.cases import PATIENCE, PROGRAMS, Case
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.native import find_native_dir

TURNS_OF_A_REHEARSAL = 2  # it has as many blocks of steps


class Failed(XmigError):
    """A program did not do what it should, or took too long."""


@dataclass(frozen=True)
class Outcome:
    """What a program printed, and what the daemon knows of it."""

    result: dict[str, Any]
    recoveries: list[dict[str, Any]]
    snapshots: list[dict[str, Any]]
    faults: list[dict[str, Any]]


class Running:
    """A program that has been started."""

    def __init__(
        self, process: subprocess.Popen[str], out: Path, *, patience: float, end: float, program: Program | None
    ) -> None:
        self.process = process
        self.program = program
        self._out = out
        self._patience = patience  # from its start, and from each time that it is let go on
        self._last = end
        self._end = min(end, time.monotonic() + patience)

    def holding(self) -> dict[str, Any]:
        """Wait until a program that was started with `--hold` has done its steps; its results."""
        self._until_reported("holding")
        return self._result()

    def imported(self) -> None:
        """Wait until a program that was started with `--turns` is to use the device for the first time."""
        self._until_reported("imported")

    def ready(self) -> None:
        """Wait until a program that tests/conformance/start.py runs has shaken hands, and is to begin."""
        self._until_reported("ready")

    def turn(self, number: int) -> None:
        """Wait until a program that was started with `--turns` is to do this part of its steps, from 1 on."""
        self._until_reported("turn", number)

    def go(self) -> None:
        """Let it do that part."""
        assert self.process.stdin is not None
        self._end = min(self._last, time.monotonic() + self._patience)
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def all_at_once(self) -> Outcome:
        """Let a program of one turn that has imported what it needs do everything, and wait for it."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Let it begin with its steps, all of them in one turn."""
        self.go()
        self.turn(1)
        self.go()

    def _until_reported(self, word: str, times: int = 1) -> None:
        while self._out.read_text().splitlines().count(word) < times:
            if self.process.poll() is not None or time.monotonic() > self._end:
                self.finish()
                raise Failed(f"{self._side} it ended too soon")
            time.sleep(0.005)

    def finish(self) -> Outcome:
        """Wait for its end. Raises Failed with the last line that it reported."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"{self._side} it took too long; {self._reported()}") from None
        if code != 0:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise Failed(f"{self._side} {how}: {self._reported()}")
        recoveries: list[dict[str, Any]] = []
        snapshots: list[dict[str, Any]] = []
        faults: list[dict[str, Any]] = []
        if self.program is not None and (info := self.program.info()) is not None:
            recoveries = self.program.recoveries()
            faults = self.program.faults()
            snapshots = self.program.node.client.get(f"/v1/processes/{info['id']}/segments", limit=1000)
            self._out.with_suffix(".snapshots").write_text(
                "".join(json.dumps(snapshot) + "\n" for snapshot in snapshots)
            )
        return Outcome(self._result(), recoveries, snapshots, faults)

    def _result(self) -> dict[str, Any]:
        lines = [line for line in self._out.read_text().splitlines() if line.startswith("{")]
        if not lines:
            raise Failed(f"{self._side} it printed no results: {self._reported()}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    @property
    def _side(self) -> str:
        return "natively:" if self.program is None else "under xMIG:"

    def _reported(self) -> str:
        """The line that says most: the last exception's, Python's or C++'s, else the last one."""
        lines = [line.strip() for line in self._out.with_suffix(".err").read_text(errors="replace").splitlines()]
        reported = [line for line in lines if line]
        errors = [line for line in reported if re.match(r"([\w.]*(Error|Exception)|what\(\)): ", line)]
        return (errors or reported or ["it reported nothing"])[-1][:300]


class Bench:
    """Where and with what programs run. In a rehearsal "natively" is on a second null device."""

    def __init__(
        self, logs: Path, scratch: Path, *, python: str, rehearsal: bool, end: float, gpu: int = 0,
        environment: Mapping[str, str] | None = None, make_node: Callable[..., Node] = Node, faults: int = 100,
        seed: int = 1, others: Path | None = None,
    ) -> None:  # fmt: skip
        self.logs = logs
        self.scratch = scratch
        self.logs.mkdir(parents=True, exist_ok=True)
        self.python = python
        self.rehearsal = rehearsal
        self.end = end
        self.kind = "null" if rehearsal else "cuda"
        self.gpu = 0 if rehearsal else gpu  # the one of what needs one
        self.environment = environment or {}  # of every program
        self.faults, self.seed = faults, seed  # of a job of several ranks
        self.others = others  # folder of wheels, of what xMIG is compared with
        self._make_node = make_node
        self.downtimes: dict[str, float] = {}  # the longest of each part's moves, in milliseconds
        self.once_more: dict[str, Outcome] = {}  # another native run of a program, by the case's name
        # Natively and under xMIG, and what ends them; by the case's name.
        self._ahead: dict[str, tuple[contextlib.ExitStack, tuple[Running, Running]]] = {}
        self._numbers: dict[str, int] = {}

    @contextmanager
    def node(self, **settings: object) -> Iterator[Node]:
        """A daemon with the GPU."""
        devices = f"{self.kind}:{self.gpu}"
        # Not below the results' folder: a socket's path has at most 107 bytes.
        with tempfile.TemporaryDirectory(prefix="xmig-gpu-") as name:
            try:
                with self._make_node(Path(name), **({"devices": devices, "port": -1} | settings)) as node:
                    yield node
                # A daemon that ends at once may leave them to see for themselves that their programs have gone.
                wait_until(lambda: not servers_of(name), "its servers have ended")
            finally:
                self.keep_log(Path(name) / "xmigd.log")

    def two(self) -> tuple[str, str]:
        """Two devices, for moves. Raises Failed where there is one GPU only."""
        if self.kind == "cuda" and gpus() < 2:
            raise Failed("it needs two GPUs, and here is one")
        return f"{self.kind}:0", f"{self.kind}:1"

    def two_devices(self) -> str:
        return ",".join(self.two())

    def natively(self, devices: int = 1) -> dict[str, str]:
        """The environment of a native program: one that needs one GPU sees the one that is measured."""
        chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(self.gpu)}
        return os.environ | (chosen if self.gpu and devices == 1 else {})

    def native(self, case: Case, more: str = "") -> Outcome:
        """Run it without xMIG, to its end."""
        with self.started(case, None, more) as running:
            return running.finish()

    def under(self, node: Node, case: Case, more: str = "") -> Outcome:
        """Run it under xMIG, to its end."""
        with self.started(case, node, more) as running:
            return running.finish()

    def turns(self, case: Case) -> int:
        return min(case.turns, TURNS_OF_A_REHEARSAL) if self.rehearsal else case.turns

    @contextmanager
    def ahead(self, cases: list[Case]) -> Iterator[None]:
        """Have these import what they need, all at once; `both` gives them out."""
        with contextlib.ExitStack() as stack:
            stacks = [stack.enter_context(contextlib.ExitStack()) for _ in cases]
            # Two share a core as a rule, and would wait for each other.
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
                pairs = list(pool.map(self._import_both, stacks, cases))
            for case, own, pair in zip(cases, stacks, pairs, strict=True):
                if pair is not None:
                    self._ahead[case.name] = own, pair
            yield
            self._ahead.clear()

    @contextmanager
    def both(self, case: Case, more: str = "") -> Iterator[tuple[Running, Running]]:
        """It natively and under xMIG, in turns: both have imported what they need, and neither has used the device.
        Nothing of either is left there afterwards."""
        stack, pair = self._ahead.pop(case.name, None) or (contextlib.ExitStack(), None)
        with stack:
            native, xmig = pair or self._start_both(stack, case, more)
            native.imported()
            xmig.imported()
            assert xmig.program is not None
            if xmig.program.info() is not None:
                raise Failed("under xMIG: it used the device while it imported what it needs")
            yield native, xmig

    def _start_both(self, stack: contextlib.ExitStack, case: Case, more: str = "") -> tuple[Running, Running]:
        """Natively, and under a daemon of its own, until `stack` is closed."""
        more = f"--turns {self.turns(case)} {more}"
        node = stack.enter_context(self.node())
        native = stack.enter_context(self.started(case, None, more))
        return native, stack.enter_context(self.started(case, node, more))

    def _import_both(self, stack: contextlib.ExitStack, case: Case) -> tuple[Running, Running] | None:
        """Until they have imported what they need. What fails fails again for whoever asks for them."""
        try:
            pair = self._start_both(stack, case)
            for running in pair:
                running.imported()
        except (XmigError, OSError):
            stack.close()
            return None
        return pair

    @contextmanager
    def started(
        self, case: Case, node: Node | None, more: str = "", *, launcher: Path | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> Iterator[Running]:  # fmt: skip
        """Start it, under `node` or natively; it is not left behind. `launcher`: the script that runs it. `request`:
        what else its job is to have."""
        if self.rehearsal and node is None:
            with (
                self.node(**({"devices": self.two_devices()} if case.devices == 2 else {})) as other,
                self.started(case, other, more) as running,
            ):
                yield running
            return
        out = self._log_of(case, node)
        command = case.command(self.python, tiny=self.rehearsal, more=more)
        command[1:1] = [] if launcher is None else [str(launcher)]
        # The programs have their own packages; Triton and Inductor must not take from one side what the other made.
        caches = self.scratch / ("xmig" if node else "native")
        environment = {
            "PYTHONPATH": str(PROGRAMS) if launcher else "", "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUPY_CACHE_DIR": str(caches / "cupy"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            **self.environment, **case.environment,
        }  # fmt: skip
        # Its pool has one process for each processor otherwise, in each of several programs that compile at once.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1" if self.rehearsal else "8"
        if self.rehearsal:  # on a GPU it is the user's, natively as under xMIG
            environment["CUDA_CACHE_PATH"] = str(caches / "cuda")
        patience = case.patience * (2 if self.rehearsal else 1)  # other tests run beside it
        with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
            options: dict[str, Any] = {"stdout": stdout, "stderr": stderr, "stdin": subprocess.PIPE}
            options["start_new_session"] = True  # its workers end with it
            if node is not None:
                device = f"{self.kind}:0,1" if case.devices == 2 else None
                program = node.program(
                    command, name=case.name, device=device, environment=environment, request=request, **options
                )
                running = Running(program.process, out, patience=patience, end=self.end, program=program)
            else:
                process = subprocess.Popen(command, env=self.natively(case.devices) | environment, text=True, **options)
                running = Running(process, out, patience=patience, end=self.end, program=None)
        try:
            yield running
        finally:
            with running.process, contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)

    def _log_of(self, case: Case, node: Node | None) -> Path:
        kind = f"{case.name.replace(': ', '-').replace(' ', '-')}-{'xmig' if node else 'native'}"
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self.logs / f"{kind}-{self._numbers[kind]}.out"

    def keep_log(self, log: Path) -> None:
        number = self._numbers["xmigd"] = self._numbers.get("xmigd", 0) + 1
        if log.exists():
            shutil.copy(log, self.logs / f"xmigd-{number}.log")

    def can(self, mib: int) -> dict[str, Any]:
        """What the device and its buses can, with so much memory: `xmig-server --measure`."""
        command = [str(find_native_dir(None) / "xmig-server"), "--measure", f"{self.kind}:{self.gpu}", str(mib)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        if done.returncode != 0:
            raise Failed(f"xmig-server --measure: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return dict(json.loads(done.stdout))

    @functools.cached_property
    def context_s(self) -> float:
        """What the driver and a context take to start in a server."""
        return float(median(self.can(64)["open_ms"] for _ in range(3)) / 1e3)

    def memory_bandwidth(self) -> float:
        """What the device's memory can do by its clock and its width, GB/s. 0 in a rehearsal."""
        if self.rehearsal:
            return 0
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(self.gpu)
            clock = nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM) * 1e6
            return float(2 * clock * nvml.nvmlDeviceGetMemoryBusWidth(device) / 8 / 1e9)  # two transfers a period
        finally:
            nvml.nvmlShutdown()

    def device_used(self) -> int:
        """Bytes in use on the device, by whomever."""
        if self.rehearsal:
            return 0
        requested = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={self.gpu}"]
        return int(subprocess.run(requested, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def servers_of(folder: str) -> list[int]:
    """The processes of the servers of a daemon that has this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"xmig-server") and folder.encode() in words:
                    found.append(int(entry.name))
    return found


def gpus() -> int:
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return len(done.stdout.splitlines())


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Poll until it holds. Raises Failed."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.005)
