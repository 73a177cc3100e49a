"""The daemon dies at every point that xmigd/failpoints.py names: what was acknowledged is there afterwards, what was
begun is brought to an end, the store holds nothing that is not whole, and the program does not notice."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import harness
from tests.criu.test_client_dump import criu_or_skip, criu_program
from tests.daemon.node import alive, until
from tests.driver.conftest import FIRST, GIB, SECOND, Driver
from tests.driver.conftest import libraries as libraries  # a fixture
from tests.forked import Zygote
from tests.recovery.conftest import PROGRAMS
from xmigd.demo.node import Program
from xmigd.failpoints import POINTS
from xmigd.ipc.handshake import pack_notice
from xmigd.store.manifest import Manifests, verify
from xmigd.store.objects import Damaged, Objects

from .forked import ForkedNode, settle

# httpx leaves a socket open when it cannot connect, and here the daemon dies at any moment.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CRIU_CLIENT = harness.ROOT / "tests" / "criu" / "client.py"
NEWCOMER = "import ctypes, sys; print(ctypes.CDLL('libcuda.so.1').cuInit(0), flush=True); sys.stdin.read()"
TIDY = """
import asyncio, time
from xmigd.recording import retention
from xmigd.database.engine import make_engine
from xmigd.database.writer import Writer
from xmigd.settings import Settings
settings = Settings()
asyncio.run(retention.tidy(Writer(make_engine(settings.database, writer=True)), settings, time.time() + 1e9))
"""

Check = Callable[[], bool]


@dataclass
class Scene:
    """A node with a program that works, another one that the driver knows, and what somebody was sent was done."""

    node: ForkedNode
    point: Path  # names the place at which the daemon dies
    driver: Driver
    program: Program
    environment: dict[str, str]  # of a program that comes by itself
    process: str = ""
    answers: list[str] = field(default_factory=list)
    done: dict[str, Check] = field(default_factory=dict)
    newcomers: list[subprocess.Popen[str]] = field(default_factory=list)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        with self.node.http() as http:
            answer = http.request(method, path, json=body, headers=headers)
            assert answer.is_success, answer.text
            return answer

    def get(self, path: str) -> Any:
        return self.node.get(path)

    def work(self) -> None:
        harness.ask(self.program, 5)
        self.hear()

    def has_answered(self) -> bool:
        stdout = self.program.process.stdout
        assert stdout is not None
        return bool(select.select([stdout], [], [], 0)[0])

    def hear(self) -> None:
        self.answers.append(harness.answer(self.program))
        assert self.answers[-1], "the program has ended"

    # --- what somebody does -----------------------------------------------------------------------------------------

    def make_job(self) -> None:
        job = self.ask("POST", "/v1/jobs", {"name": "kept"}).json()["id"]
        self.done["a job"] = lambda: self.get(f"/v1/jobs/{job}")["name"] == "kept"

    def stop_job(self) -> None:
        job = self.ask("POST", "/v1/jobs", {"name": "stopped"}).json()["id"]
        self.ask("DELETE", f"/v1/jobs/{job}")
        self.done["a stopped job"] = lambda: self.get(f"/v1/jobs/{job}")["state"] == "stopped"

    def end_job(self) -> None:
        job = self.ask("POST", "/v1/jobs", {"name": "over"}).json()["id"]
        self.ask("POST", f"/v1/jobs/{job}:exited", {"exit_code": 3})
        self.done["a job's end"] = lambda: self.get(f"/v1/jobs/{job}")["exit_code"] == 3

    def label_job(self) -> None:
        path = f"/v1/jobs/{self.ask('POST', '/v1/jobs', {'name': 'labelled'}).json()['id']}"
        self.ask("PATCH", path, {"labels": {"a": "b"}}, **{"If-Match": "*"})
        self.done["a label"] = lambda: self.get(path)["labels"] == {"a": "b"}

    def end_a_newcomer(self) -> None:
        if self.newcomer() is None:
            return
        child = self.newcomers[-1]
        child.kill()  # and nobody waits for it: its end can be read
        # On the way there it may be recovered: the descriptor store has its memory, and its server may go with it.
        over = lambda: self._process_of(child)["state"] in ("ended", "lost")  # noqa: E731
        self.done["a program that was let in"] = lambda: until(over, "its end is known")

    def use_a_token(self) -> None:
        made = self.ask("POST", "/v1/tokens", {"name": "used"}).json()
        with self.node.http() as http:
            http.get("/v1/jobs", headers={"Authorization": f"Bearer {made['token']}"})

    def with_a_key(self) -> None:
        key = {"Idempotency-Key": os.urandom(8).hex()}
        job = self.ask("POST", "/v1/jobs", {"name": "once"}, **key).json()["id"]
        self.done["an answer"] = lambda: self.ask("POST", "/v1/jobs", {"name": "once"}, **key).json()["id"] == job

    def refused_with_a_key(self) -> None:
        secret = self.ask("POST", "/v1/tokens", {"name": "kept", "scope": "operate"}).json()["token"]
        headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "a"}
        with self.node.http() as http:
            assert http.post("/v1/tokens", json={"name": "kept"}, headers=headers).status_code == 403

    def make_token(self) -> None:
        token = self.ask("POST", "/v1/tokens", {"name": "kept"}).json()["id"]
        self.done["a token"] = lambda: token in [each["id"] for each in self.get("/v1/tokens")]

    def revoke_token(self) -> None:
        made = self.ask("POST", "/v1/tokens", {"name": "revoked"}).json()
        self.ask("DELETE", f"/v1/tokens/{made['id']}")

        def gone() -> bool:
            with self.node.http() as http:
                return http.get("/v1/jobs", headers={"Authorization": f"Bearer {made['token']}"}).status_code == 401

        self.done["a revoked token"] = gone

    def add_webhook(self, **fields: Any) -> str:
        """Nobody listens there."""
        made = self.ask("POST", "/v1/webhooks", {"url": "http://127.0.0.1:9/", "enabled": False, **fields}).json()
        self.done["a webhook"] = lambda: made["id"] in [each["id"] for each in self.get("/v1/webhooks")]
        return f"/v1/webhooks/{made['id']}"

    def change_webhook(self) -> None:
        path = self.add_webhook()
        self.ask("PATCH", path, {"types": ["fault"]}, **{"If-Match": "*"})
        self.done["its change"] = lambda: self.get(path)["types"] == ["fault"]

    def remove_webhook(self) -> None:
        path = self.add_webhook()
        del self.done["a webhook"]
        self.ask("DELETE", path)
        self.done["a removed webhook"] = lambda: self.get("/v1/webhooks") == []

    def retry_webhook(self) -> None:
        self.ask("POST", f"{self.add_webhook()}:retry", {})

    def deliver(self) -> None:
        path = self.add_webhook(enabled=True, types=["job.created"])
        self.done["a dead letter"] = lambda: until(lambda: bool(self.get(f"{path}/dead-letters")), "it is there")
        self.make_job()
        until(lambda: not self.node.is_alive, "the daemon is dead")

    def cordon(self) -> None:
        self.ask("PATCH", "/v1/devices/cpu:2", {"cordoned": True, "reason": "why"}, **{"If-Match": "*"})
        self.done["a cordoned device"] = lambda: self.get("/v1/devices/cpu:2")["cordoned"] is True

    def drain(self) -> None:
        self.ask("POST", "/v1/devices/cpu:2:drain", {})

    def report_a_finding(self) -> None:
        found = self.ask("POST", "/v1/devices/cpu:2/findings", {"code": "fan", "text": "dead", "rung": "cordon"}).json()

        def answered() -> bool:
            rows = self.get("/v1/devices/cpu:2/findings")
            return [row["answer"] for row in rows if row["id"] == found["id"]] == ["cordon"]

        self.done["a finding"] = answered

    def change_policy(self) -> None:
        version = self.ask("PATCH", "/v1/policies/retention", {"events": 5000}, **{"If-Match": "*"}).json()["version"]
        self.done["a policy"] = lambda: self.get("/v1/policies/retention")["version"] == version

    def reset_breaker(self) -> None:
        self.ask("POST", "/v1/circuit-breaker:reset")

    def elsewhere(self) -> dict[str, str]:
        """The body of a request to move the program."""
        device = self.get(f"/v1/processes/{self.process}")["device"]
        return {"process": self.process, "target": "cpu:1" if device == "cpu:0" else "cpu:0"}

    def move(self) -> None:
        operation = self.ask("POST", "/v1/migrations", self.elsewhere()).headers["location"]
        self.done["an operation"] = lambda: self.get(operation)["subject"]["id"] == self.process

    def move_with_the_driver(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
        self.newcomers.append(child)
        self.driver.program(child.pid)
        body = {"process": f"pid:{child.pid}", "target": "cuda:1", "engine": "driver"}
        operation = self.ask("POST", "/v1/migrations", body).headers["location"]
        self.done["an operation"] = lambda: self.get(operation)["kind"] == "migration"

    def pause_and_go_on(self) -> None:
        self.pause()
        self.ask("POST", f"/v1/processes/{self.process}:rebind", {"pid": self.program.process.pid})

    def pause(self) -> None:
        self.ask("POST", f"/v1/processes/{self.process}:pause")

    def go_on(self) -> bool:
        with self.node.http() as http:
            return http.post(f"/v1/processes/{self.process}:continue").status_code == 200

    def store_a_snapshot(self) -> None:
        while self.node.is_alive:
            self.work()
            time.sleep(0.02)

    def forget_a_snapshot(self) -> None:
        # It may come to it by itself: it tidies every ten seconds.
        until(lambda: not self.node.is_alive or len(self.kept_after_work()) >= 2, "more snapshots than are to be kept")
        with contextlib.suppress(ProcessLookupError):
            harness.stop(self.node.daemon_pid)
        if len(self.kept()) >= 2:
            self.start_daemon()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.node.daemon_pid, signal.SIGCONT)

    def kept_after_work(self) -> list[tuple[str, int, str]]:
        self.work()
        return self.kept()

    def kept(self) -> list[tuple[str, int, str]]:
        """Of the program that works: those of a newcomer stay for a while after its end."""
        with contextlib.closing(sqlite3.connect(self.node.folder / "xmig.db")) as database:
            return database.execute(
                "select process_id, number, manifest from stored_snapshots where process_id = ? order by number",
                (self.process,),
            ).fetchall()

    def stray(self) -> set[Path]:
        """Files of the store that no record names."""
        with contextlib.closing(sqlite3.connect(self.node.folder / "xmig.db")) as database:
            named = {f"{name}.zst" for (name,) in database.execute("select hash from stored_parts")}
            named |= {f"{number}.json" for (number,) in database.execute("select number from stored_snapshots")}
        return {path for path in (self.node.folder / "store").rglob("*") if path.is_file() and path.name not in named}

    def newcomer(self) -> dict[str, Any] | None:
        """A program that nobody has registered; its process, if it was let in."""
        child = subprocess.Popen(
            [sys.executable, "-c", NEWCOMER], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.newcomers.append(child)
        assert child.stdout is not None
        if child.stdout.readline() != "0\n":
            return None
        self.done["a program that was let in"] = lambda: self._process_of(child)["state"] in ("running", "lost")
        return self._process_of(child)

    def _process_of(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        # It is let in before that is written down.
        return until(lambda: next((p for p in self.get("/v1/processes") if p["pid"] == child.pid), None), "its process")

    def say(self) -> None:
        """A line for a job's log."""
        job = self.node.client.post("/v1/jobs", {"name": "says"})
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(self.node.settings.client_socket))
            sock.send(pack_notice(job["environment"]["XMIG_JOB"], "a line"))

    def go_round(self) -> None:
        """A process of a job loads the genuine driver."""
        job = self.node.client.post("/v1/jobs", {"name": "goes round", "watch": True})
        driver = Path(self.driver.environment["LD_LIBRARY_PATH"].split(":")[0], "libcuda.so.1")
        self.newcomers.append(
            subprocess.Popen(
                [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]); sys.stdin.read()", driver],
                env=self.environment | job["environment"] | {"LD_PRELOAD": ""}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip

    def fault(self) -> None:
        process = self.newcomer()
        assert process is not None
        os.kill(process["server_pid"], signal.SIGKILL)

    def acknowledge(self) -> None:
        process = self.newcomer()
        assert process is not None
        os.kill(process["server_pid"], signal.SIGKILL)
        fault = until(lambda: self.get(f"/v1/faults?process={process['id']}"), "the fault")[0]["id"]
        self.ask("POST", f"/v1/faults/{fault}:ack")
        self.done["an acknowledged fault"] = lambda: self.get(f"/v1/faults/{fault}")["acknowledged_at"] is not None

    def checkpoint(self) -> str:
        """Of a program that has nothing open but files; the operation."""
        output = self.node.folder / f"steps-{len(os.listdir(self.node.folder))}"
        kernels = Path(self.node.environment["XMIG_NATIVE_DIR"], "xmig_kernels.so")
        child = subprocess.Popen(
            [sys.executable, CRIU_CLIENT, output, "60", "0.02"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, text=True,
            env=self.environment | {"KERNELS": str(kernels)},
        )  # fmt: skip
        self.newcomers.append(child)
        until(lambda: output.exists() and output.read_text().count("\n") > 5, "it is on its way")
        process = self._process_of(child)["id"]
        self.done["its program"] = lambda: until(
            lambda: self._process_of(child)["state"] == "running" and output.read_text().count("\n") > 10, "it goes on"
        )
        return self.ask("POST", "/v1/checkpoints", {"process": process}).headers["location"]

    def remove_checkpoint(self) -> None:
        operation = self.checkpoint()
        until(lambda: self.get(operation)["state"] == "succeeded", "it is made")
        checkpoint = self.get(operation)["result"]["checkpoint"]
        with contextlib.suppress(httpx.TransportError):
            self.ask("DELETE", f"/v1/checkpoints/{checkpoint}")
            self.done["a removed checkpoint"] = lambda: checkpoint not in self.listed()

    def mirror_a_checkpoint(self) -> None:
        operation = self.checkpoint()
        until(lambda: self.get(operation)["state"] == "succeeded", "it is made")
        checkpoint = self.get(operation)["result"]["checkpoint"]
        mirrored = lambda: self.get(f"/v1/checkpoints/{checkpoint}")["mirrored"]  # noqa: E731
        self.done["a copy in the mirror"] = lambda: until(mirrored, "it is in the mirror")

    def checkpoint_to_disk(self) -> None:
        operation = self.checkpoint()
        until(lambda: self.get(operation)["state"] == "succeeded", "it is made")
        checkpoint = self.get(operation)["result"]["checkpoint"]
        on_disk = lambda: "disk" in self.get(f"/v1/checkpoints/{checkpoint}")["places"]  # noqa: E731
        self.done["a checkpoint on the disk"] = lambda: until(on_disk, "it goes from host memory to the disk")

    def remove_a_copy(self) -> None:
        self.remove_checkpoint()
        there = self.node.folder / "mirror"

        def removed() -> bool:
            listed = self.listed()
            return all(path.stem in listed for path in there.rglob("*.json"))

        self.done["a removed copy"] = lambda: until(removed, "it is removed from the mirror")

    def listed(self) -> list[str]:
        return [each["id"] for each in self.get("/v1/checkpoints")]

    def set_checkpoint_policy(self) -> str:
        job = self.ask("POST", "/v1/jobs", {"name": "kept"}).json()["id"]
        path = f"/v1/jobs/{job}/checkpoint-policy"
        self.ask("PUT", path, {"keep": 7}, **{"If-Match": "*"})
        self.done["a policy"] = lambda: self.get(path)["keep"] == 7
        return path

    def remove_checkpoint_policy(self) -> None:
        path = self.set_checkpoint_policy()
        del self.done["a policy"]
        self.ask("DELETE", path, **{"If-Match": "*"})
        self.done["a removed policy"] = lambda: self.get(path)["source"] == "settings"

    def start_daemon(self) -> None:
        self.node.kill()
        self.node.launch()

    def lose(self) -> None:
        """Nobody holds the memory of a program whose server, daemon and descriptor store have gone."""
        process = self.newcomer()
        assert process is not None
        stores = harness.descriptor_stores(Path(self.node.environment["XMIG_RUNTIME_DIR"]))
        self.node.kill()
        for pid in (*stores, process["server_pid"]):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(process["server_pid"]), "the server is gone")
        self.node.launch()

    def tidy(self) -> None:
        self.node.kill()
        done = subprocess.run([sys.executable, "-c", TIDY], env=self.node.environment, cwd=harness.ROOT, check=False)
        assert done.returncode == -signal.SIGKILL


def acts(*names: str, by: Callable[[Scene], Any]) -> dict[str, Callable[[Scene], Any]]:
    return dict.fromkeys(names, by)


# Who comes to a write, or to a place of the store.
ACTS = {
    **acts("audit.intent", "audit.outcome", "events.add", "jobs.add", by=Scene.make_job),
    **acts("jobs.stop", by=Scene.stop_job),
    **acts("jobs.end", by=Scene.end_job),
    **acts("jobs.change", by=Scene.label_job),
    **acts("checkpoints.add", by=Scene.checkpoint),
    **acts("checkpoints.remove", by=Scene.remove_checkpoint),
    **acts("checkpoints.mirrored", "mirror.objects", "mirror.manifest", by=Scene.mirror_a_checkpoint),
    **acts("checkpoints.on_disk", by=Scene.checkpoint_to_disk),
    **acts("checkpoints.unmirrored", by=Scene.remove_a_copy),
    **acts("checkpoint_policies.set", by=Scene.set_checkpoint_policy),
    **acts("checkpoint_policies.remove", by=Scene.remove_checkpoint_policy),
    **acts("processes.end", by=Scene.end_a_newcomer),
    **acts("tokens.used", by=Scene.use_a_token),
    **acts("keys.claim", "keys.answer", by=Scene.with_a_key),
    **acts("keys.release", by=Scene.refused_with_a_key),
    **acts("tokens.create", by=Scene.make_token),
    **acts("tokens.revoke", by=Scene.revoke_token),
    **acts("devices.change", by=Scene.cordon),
    **acts("devices.cordon", by=Scene.drain),
    **acts("health.findings", by=Scene.report_a_finding),
    **acts("policies.change", by=Scene.change_policy),
    **acts("breaker.reset", by=Scene.reset_breaker),
    **acts("breaker.acted", by=Scene.lose),
    **acts("operations.begin", "operations.save", "operations.end", by=Scene.move),
    **acts("migrations.intent", "migrations.save", by=Scene.move),
    **acts("native.adopt", by=Scene.move_with_the_driver),
    **acts("segments.add", "stored_snapshots.add", "store.objects", "store.manifest", by=Scene.store_a_snapshot),
    **acts("stored_snapshots.remove", by=Scene.forget_a_snapshot),
    **acts("jobs.made", "processes.start", "processes.state", "processes.assign", "devices.learn", by=Scene.newcomer),
    **acts("faults.add", "recoveries.save", by=Scene.fault),
    **acts("logs.add", by=Scene.say),
    **acts("processes.unprotected", by=Scene.go_round),
    **acts("faults.acknowledge", by=Scene.acknowledge),
    **acts("processes.rebind", by=Scene.pause_and_go_on),
    **acts("devices.configure", "native.forget", "prediction.profiles", by=Scene.start_daemon),
    **acts("history.tidy", by=Scene.tidy),
    **acts("webhooks.add", by=Scene.add_webhook),
    **acts("webhooks.change", by=Scene.change_webhook),
    **acts("webhooks.remove", by=Scene.remove_webhook),
    **acts("webhooks.retry", by=Scene.retry_webhook),
    **acts("webhooks.progress", by=Scene.deliver),
}


# A daemon that dies here leaves files in the store that no record names.
STRAY = (
    "store.objects",
    "store.manifest",
    "write.begun stored_snapshots.add",
    "write.committed stored_snapshots.remove",
)


OF_CHECKPOINTS = ("checkpoints.", "mirror.")


@pytest.fixture(scope="module")
def scene(native_dir: Path, kernels: Path, libraries: Path) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="xmig-") as name:
        folder = Path(name)
        (folder / "driver").mkdir()
        (folder / "mirror").mkdir()
        driver = Driver(folder / "driver", libraries)
        driver.gpu(f"{FIRST} {80 * GIB} 0 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} 0 0 0 NVIDIA H200")
        zygote = Zygote(driver.environment)
        node = ForkedNode(
            folder, zygote, native_dir=native_dir, devices="cpu:0,cpu:1,cpu:2", device_memory=1 << 30,
            adoption_grace=1, snapshot_cost=0.3, store_budget=1, store_snapshots=1, failpoint=folder / "point",
            criu=criu_program() or "criu", checkpoint_mirror=folder / "mirror", webhook_attempts=1,
            checkpoint_memory_mib=256, checkpoint_memory_dir=folder / "memory",
        )  # fmt: skip
        node.daemon_environment = driver.environment
        with contextlib.closing(zygote), node:
            program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels)
            harness.go(program)
            preload = node.client.post("/v1/jobs", {"name": "to read how"})["preload"]
            scene = Scene(node, folder / "point", driver, program, node.environment | {"LD_PRELOAD": preload})
            scene.process = program.until("running")["id"]
            yield scene


# tests/transfers has those of transfers, tests/criu/test_nodes.py those of checkpoints of several nodes.
OF_NODES = ("checkpoints.whole", "checkpoints.part_removed", "operations.decide")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "point", [one for one in POINTS if " transfers." not in one and one.split()[-1] not in OF_NODES]
)
def test_a_crash(scene: Scene, point: str) -> None:
    node = scene.node
    scene.done.clear()
    if any(each in point for each in OF_CHECKPOINTS):
        criu_or_skip()
        # The daemon would die while it mirrors an earlier one, before this one's program has it.
        until(lambda: all(one["mirrored"] for one in scene.get("/v1/checkpoints")), "earlier ones are in the mirror")
    scene.point.write_text(point)
    with contextlib.suppress(httpx.TransportError):
        ACTS[point.split()[-1]](scene)
    until(lambda: not node.is_alive, f"the daemon comes to {point}")
    scene.point.unlink()
    stray, kept = scene.stray(), scene.kept()
    node.start()
    missing = [what for what, is_there in scene.done.items() if not is_there()]
    assert missing == [], f"acknowledged, and gone after a crash at {point}"
    for child in scene.newcomers:
        child.kill()
        child.communicate()
    scene.newcomers.clear()
    settle(node, scene.process)
    harness.ask(scene.program, 5)
    # Whoever has paused it lets it go on.
    until(lambda: scene.has_answered() or scene.go_on(), "the program goes on")
    scene.hear()
    if point in STRAY:
        assert stray
        until(lambda: not stray & scene.stray(), "what no record names is removed")
        until(lambda: scene.kept_after_work()[-1:] > kept[-1:], "snapshots are kept again")
        until(lambda: whole(scene), "what is kept is whole")
    scene.ask("PATCH", "/v1/devices/cpu:2", {"cordoned": False}, **{"If-Match": "*"})
    for webhook in scene.get("/v1/webhooks"):
        scene.ask("DELETE", f"/v1/webhooks/{webhook['id']}")


@pytest.mark.parametrize("moment", ["write.begun", "write.committed"])
def test_a_key_tells_what_it_began(scene: Scene, moment: str) -> None:
    node, key = scene.node, {"Idempotency-Key": moment}
    body, before = scene.elsewhere(), [each["id"] for each in scene.get("/v1/migrations")]
    scene.point.write_text(f"{moment} operations.begin")
    with contextlib.suppress(httpx.TransportError):
        scene.ask("POST", "/v1/migrations", body, **key)
    until(lambda: not node.is_alive, "the daemon is dead")
    scene.point.unlink()
    node.start()
    settle(node, scene.process)
    new = [each for each in scene.get("/v1/migrations") if each["id"] not in before]
    with node.http() as http:
        answer = http.post("/v1/migrations", json=body, headers=key)
        if moment == "write.begun":  # nothing was written, so nothing was done
            assert (answer.status_code, answer.json()["code"], new) == (409, "outcome_unknown", [])
            return
        operation = answer.json()
        assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/operations/{operation['id']}")
        assert [each["operation_id"] for each in new] == [operation["id"]]
        assert operation == http.get(answer.headers["location"]).json()
        assert http.post("/v1/migrations", json=body, headers=key).json() == operation
        assert http.post("/v1/migrations", json={**body, "target": "cpu:2"}, headers=key).status_code == 422


def test_a_pause_outlives_the_daemon(scene: Scene) -> None:
    scene.pause()
    scene.node.kill()
    scene.node.start()
    settle(scene.node, scene.process)
    harness.ask(scene.program, 5)
    until(scene.go_on, "it is paused, and goes on")
    scene.hear()


def whole(scene: Scene) -> bool:
    """Everything that the database names is in the store; False if some of it has been removed since."""
    store = scene.node.folder / "store"
    for row in scene.kept():
        try:
            verify(Objects(store / "objects"), Manifests(store / "snapshots").read(*row))
        except Damaged:
            assert row not in scene.kept()
            return False
    return True


def test_the_program_has_not_noticed(scene: Scene, kernels: Path) -> None:
    undisturbed = harness.start(scene.node, PROGRAMS / "stepwise.py", kernels=kernels)
    harness.go(undisturbed)
    assert scene.answers == [harness.steps(undisturbed, 5) for _ in scene.answers]
    harness.output(undisturbed)
    harness.output(scene.program)
