"""The daemon: what it takes when nothing happens, how fast it starts and answers, and whether events arrive."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx

from tests.bench import crowd, history, writes
from tests.bench.native import Failed, Programs
from tests.harness import cpu_seconds
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

DEVICES = ",".join(f"cpu:{ordinal}" for ordinal in range(8))
JOBS = 16
IDLE_SECONDS = 10
RATE, SECONDS = 1050, 10  # a little more than what is requested
LISTENERS, EVENTS, ANSWERS = 200, 50, 100  # per second
RECORDS = 10_000
PATIENCE = 60
# A caller may ask so often; what is measured is not the limit.
UNLIMITED = {"XMIG_REQUEST_RATE": "1000000"}
COMPILED = "compiled"  # folder of Python's bytecode, which packages carry


def measure(programs: Programs, runs: int) -> Iterator[Row]:
    """Rows for the daemon."""
    yield from start(programs, runs)
    with node_with(programs) as node, jobs(programs, node):
        yield from idle(node)
        yield from answers(node)
        yield from events(node)
    yield from acknowledged(programs, runs)
    yield from command_line(programs)
    yield from pages(programs)
    with node_with(programs, **crowd.PATIENT) as node, dashboard(node) as client:
        yield from crowd.measure(node, f"{client.base_url.host}:{client.base_url.port}")


def command_line(programs: Programs) -> Iterator[Row]:
    """What a user's `xmigctl ps` takes of a core, the start of Python included."""
    took: list[float] = []
    with node_with(programs) as node:
        # A user's environment: where the daemon is, and none of its other settings.
        environment = {name: value for name, value in node.environment.items() if not name.startswith("XMIG_")}
        environment["XMIG_RUNTIME_DIR"] = str(node.folder)
        for _ in range(10):
            before = os.times()
            subprocess.run([sys.executable, "-m", "xmigd.cli", "ps"], env=environment, check=True, capture_output=True)
            after = os.times()
            took.append(after.children_user + after.children_system - before.children_user - before.children_system)
    yield Row(
        name="xmigctl ps: processor time", value=round(median(took), 3), unit="s", target=0.35, better="lower",
        conditions=f"user and system; median of {len(took)}, most {max(took):.2f} s",
    )  # fmt: skip


@contextlib.contextmanager
def node_with(programs: Programs, **settings: str) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="xmig-bench-") as folder:
        node = Node(
            Path(folder),
            devices=DEVICES,
            device_memory=1 << 28,
            log_level="warning",
            user_connections=LISTENERS + 128,
            user_streams=LISTENERS,
        )
        node.environment |= UNLIMITED | settings
        # As installed: compiled once, whatever the tree's owner or environment lets Python write.
        node.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        node.environment["PYTHONPYCACHEPREFIX"] = str(programs.folder / COMPILED)
        with node:
            yield node


@contextlib.contextmanager
def jobs(programs: Programs, node: Node) -> Iterator[list[Program]]:
    """JOBS programs, two on each device, each with its server and a warm standby."""
    started = [
        node.program([programs.built("idle")], name=f"job {number}", device=f"cpu:{number % 8}", stdin=subprocess.PIPE)
        for number in range(JOBS)
    ]
    for program in started:
        program.until("running")
    end = time.monotonic() + PATIENCE
    while any(p["standby"] != "warm" for p in node.client.get("/v1/processes", live=True)):
        if time.monotonic() > end:
            raise Failed("not every job has a standby")
        time.sleep(0.05)
    yield started


def start(programs: Programs, runs: int) -> Iterator[Row]:
    """From the start of the process to the first answer of /readyz; with a database that is there already."""
    took: list[float] = []
    with node_with(programs) as node:
        for _ in range(max(3, runs)):
            node.stop()
            began = time.perf_counter()
            node.start()
            took.append(time.perf_counter() - began)
    yield Row(
        name="start to ready", value=round(median(took), 3), unit="s", target=1.5, better="lower",
        conditions=f"8 devices, bytecode as packages carry it; median of {len(took)}, slowest {max(took):.2f} s",
    )  # fmt: skip


def memory(pid: int, what: str) -> float:
    """MiB, of /proc/PID/status."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise Failed(f"the kernel does not say {what}")
    return int(found[1]) / 1024


def idle(node: Node) -> Iterator[Row]:
    assert node.process is not None
    pid = node.process.pid
    time.sleep(5)  # what the start of the jobs has left to do is no part of it
    before = cpu_seconds(pid)
    time.sleep(IDLE_SECONDS)
    share = 100 * (cpu_seconds(pid) - before) / IDLE_SECONDS
    conditions = f"8 devices, {JOBS} jobs with warm standbys"
    yield Row(
        name="resident memory, idle", value=round(memory(pid, "VmRSS") * 1.048576, 1), unit="MB", target=100,
        better="lower", conditions=conditions,
    )  # fmt: skip
    yield Row(
        name="processor time, idle", value=round(share, 2), unit="% of a core", target=1, better="lower",
        conditions=f"{conditions}; all threads over {IDLE_SECONDS} s",
    )  # fmt: skip


def load(*words: object) -> subprocess.Popen[str]:
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("load.py"), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def reported(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate(timeout=PATIENCE)
    if process.returncode != 0:
        raise Failed(f"those who ask ended with exit code {process.returncode}")
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def answers(node: Node) -> Iterator[Row]:
    """GET /v1/jobs, which lists the jobs that run."""
    socket = node.settings.api_socket
    reported(load("requests", socket, "--rate", 100, "--seconds", 1))
    assert node.process is not None
    before = cpu_seconds(node.process.pid)
    found = reported(load("requests", socket, "--rate", RATE, "--seconds", SECONDS))
    share = (cpu_seconds(node.process.pid) - before) / SECONDS
    if found["good"] != found["sent"]:
        raise Failed(f"not every request was answered well: {found}")
    conditions = (
        f"GET /v1/jobs with {JOBS} jobs, {RATE}/s by the clock on 16 connections of the local socket for {SECONDS} s, "
        "who asks on the same 2 cores"
    )
    yield Row(
        name="requests answered", value=round(found["per_s"]), unit="1/s", target=1000, better="higher",
        conditions=f"{conditions}; {100 * share:.0f} % of a core",
    )  # fmt: skip
    yield Row(
        name="requests, 99th percentile", value=round(found["p99_ms"], 1), unit="ms", target=50, better="lower",
        conditions=f"the same; median {found['median_ms']:.1f} ms, slowest {found['slowest_ms']:.0f} ms",
    )  # fmt: skip


def events(node: Node) -> Iterator[Row]:
    """Jobs are registered, each is an event, and everybody is informed of all."""
    socket = node.settings.api_socket
    assert node.process is not None
    listening = load("listeners", socket, "--count", LISTENERS)
    assert listening.stdout is not None
    assert listening.stdin is not None
    if listening.stdout.readline() != "listening\n":
        raise Failed("the listeners cannot listen")
    body = json.dumps({"name": "an event", "command": "none"})
    before = cpu_seconds(node.process.pid)
    making = load(
        "requests", socket, "--method", "POST", "--path", "/v1/jobs", "--body", body, "--rate", EVENTS, "--seconds",
        SECONDS,
    )  # fmt: skip
    asking = load("requests", socket, "--path", "/v1/node", "--rate", ANSWERS, "--seconds", SECONDS)
    made, requested = reported(making), reported(asking)
    share = (cpu_seconds(node.process.pid) - before) / SECONDS
    listening.stdin.close()
    listening.stdin = None
    found = reported(listening)
    if made["good"] != made["sent"] or requested["good"] != requested["sent"]:
        raise Failed(f"not every request was answered well: {made} {requested}")
    if found["events"] < made["sent"]:
        raise Failed(f"{made['sent']} events were made, but the listeners heard of {found['events']}")
    conditions = f"{LISTENERS} listeners, {EVENTS} jobs registered a second for {SECONDS} s"
    yield Row(
        name="listeners that missed an event", value=found["incomplete"], unit="in all", target=0, better="lower",
        conditions=f"{conditions}; {found['delivered']:,} events delivered, {100 * share:.0f} % of a core",
    )  # fmt: skip
    yield Row(
        name="event to listener, 99th percentile", value=round(found["p99_ms"], 1), unit="ms", better="lower",
        conditions=f"the same; from publication to a listener's hands, median {found['median_ms']:.0f} ms",
    )  # fmt: skip
    yield Row(
        name="requests beside it, 99th percentile", value=round(requested["p99_ms"], 1), unit="ms", target=50,
        better="lower", conditions=f"GET /v1/node, {ANSWERS}/s, in the same seconds",
    )  # fmt: skip


def acknowledged(programs: Programs, runs: int) -> Iterator[Row]:
    """Writes, of the writer itself and over the API."""
    yield from writes.measure(programs.folder, runs)
    with node_with(programs) as node:
        yield from registered(node, runs)


def registered(node: Node, runs: int) -> Iterator[Row]:
    """Jobs: each is two writes that are waited for, and two that are not."""
    assert node.process is not None
    found: list[dict[str, float]] = []
    took: list[float] = []  # of a processor, for each
    for _ in range(runs + 1):  # the first one is no part of it: the daemon makes then what it makes once
        before = cpu_seconds(node.process.pid)
        clients = load(
            "clients", node.settings.api_socket, "--method", "POST", "--path", "/v1/jobs", "--body", writes.JOB,
            "--connections", writes.CLIENTS, "--seconds", writes.SECONDS,
        )  # fmt: skip
        found.append(reported(clients))
        took.append((cpu_seconds(node.process.pid) - before) / max(1.0, found[-1]["good"]))
        if found[-1]["good"] != found[-1]["sent"]:
            raise Failed(f"not every write was acknowledged: {found[-1]}")
    del found[0], took[0]
    rates = [each["per_s"] for each in found]
    yield Row(
        name="writes acknowledged over REST", value=round(median(rates)), unit="1/s", target=writes.TARGET,
        better="higher",
        conditions=f"POST /v1/jobs, {writes.CLIENTS} clients of the local socket at once, on the same 2 cores; each "
        "waits for the audit's intent and for its job, and leaves an outcome and events; "
        f"median of {runs} runs of {writes.SECONDS} s, worst {min(rates):.0f}/s; {1e3 * median(took):.1f} ms of a "
        "processor each",
    )  # fmt: skip
    yield Row(
        name="writes over REST, 99th percentile", value=round(median(each["p99_ms"] for each in found), 1), unit="ms",
        better="lower", conditions=f"the same; median {median(each['median_ms'] for each in found):.0f} ms, slowest "
        f"{max(each['slowest_ms'] for each in found):.0f} ms",
    )  # fmt: skip


def pages(programs: Programs) -> Iterator[Row]:
    """Every list and page with a long history."""
    with node_with(programs) as node:
        node.stop()
        known = history.write(node.folder / "xmig.db", RECORDS)
        node.start()
        api = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(node.settings.api_socket)),
            base_url="http://localhost",
            timeout=PATIENCE,
        )
        with api:
            slowest = timed(api, paths_of(api.get("/openapi.json").json(), known))
        yield Row(
            name="slowest answer with a long history", value=slowest[0], unit="ms", target=200, better="lower",
            conditions=f"{RECORDS:,} migrations, operations, recoveries, faults and events; "
            f"{slowest[2]} paths of the API, median of 5 of each; {slowest[1]}",
        )  # fmt: skip
        with dashboard(node) as web:
            slowest = timed(web, history.pages(known))
        yield Row(
            name="slowest page with a long history", value=slowest[0], unit="ms", target=200, better="lower",
            conditions=f"the same; {slowest[2]} pages of the dashboard, the API's part included; {slowest[1]}",
        )  # fmt: skip


def timed(client: httpx.Client, paths: list[str]) -> tuple[float, str, int]:
    """The slowest path's median in ms, which it is, and how many there are."""
    medians: dict[str, float] = {}
    for path in paths:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            answer = client.get(path)
            took.append(1e3 * (time.perf_counter() - began))
            if answer.status_code >= 400:
                raise Failed(f"GET {path} is answered with {answer.status_code}: {answer.text[:200]}")
        medians[path.partition("?")[0]] = median(took)
    name = max(medians, key=medians.__getitem__)
    shown = re.sub(r"[0-9a-f]{32}", "{id}", name)
    return round(medians[name], 1), f"the slowest is {shown}", len(medians)


def paths_of(document: dict[str, dict[str, dict[str, object]]], known: dict[str, str]) -> list[str]:
    """Every path that can be read, with ids that exist; lists as long as they can be."""
    found = []
    for path, methods in document["paths"].items():
        if "get" not in methods or path.endswith("/wait"):
            continue
        for name, value in known.items():
            path = path.replace(f"{{{name}}}", value)
        if "{" not in path:
            parameters = [p["name"] for p in methods["get"].get("parameters", [])]  # type: ignore[attr-defined]
            found.append(f"{path}?limit=1000" if "limit" in parameters else path)
    return found


@contextlib.contextmanager
def dashboard(node: Node) -> Iterator[httpx.Client]:
    """xmig-web in front of the node, and a visitor from this machine."""
    from xmigd.api.server import bind_tcp

    with contextlib.closing(bind_tcp("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = node.environment | {
        "XMIG_WEB_API": f"unix:{node.settings.api_socket}", "XMIG_WEB_PORT": str(port), "XMIG_WEB_LOCAL": "true",
        "XMIG_WEB_LOG_LEVEL": "warning",
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "xmigd.web.main"], env=environment, cwd=os.getcwd())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, follow_redirects=True) as client:
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    client.get("/")
                    break
                except httpx.ConnectError:
                    if process.poll() is not None or time.monotonic() > end:
                        raise Failed("the dashboard does not start") from None
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE)
