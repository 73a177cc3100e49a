"""A pod goes on from the checkpoint that an earlier pod of its controller left when it was evicted.

The first process of its container, `xmig-pod` (shim/pod), connects to a socket that pods mount, and waits for the
answer: begin anew, or what was restored runs, or has ended with this. Who asks, the kernel says: the process's control
group names the pod, and its credentials the user. Nothing that it sends names a checkpoint.

Invariants:
  What goes on is of the same namespace, controller, place among its pods and revision, and of the same user.
  One checkpoint goes on once: xMIG continues what a preemption left a single time, and of each origin one pod is served
  at a time.
  A pod whose checkpoint cannot be restored does not begin anew: its container fails, and says why.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xmigd import log
from xmigd.checkpoints.movable import processes_of
from xmigd.client import RESTART_PATIENCE, Client, NoDaemon, Refused
from xmigd.devices.visible import names_devices, numbered, visible
from xmigd.errors import Conflict, XmigError
from xmigd.ipc import exits
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd
from xmigd.kubernetes import view
from xmigd.kubernetes.view import Pod
from xmigd.text import harmless

logger = log.get("kubernetes")

NAME = "continue.sock"
LONGEST = 4096  # bytes of a message
MOST = 256  # connections
MOST_OF_ONE = 32  # of these: of a pod, or of a user's processes that are in none
KNOWN_WITHIN = 30.0  # seconds in which a pod is known of whose program runs already
SEEN_WITHIN = 10.0  # seconds in which xmigd knows how a program has ended, if it gets to know it
INTERVAL = 0.1  # seconds between two looks
OVER = ("ended", "stopped", "lost")  # jobs
NEXT = ("not_preempted", "continued_already", "not_found")  # this job left nothing to go on from
ELSEWHERE = ("cordoned", "failing", "no_room", "no_such_device")  # of a device: another one may do
PASSED_ON = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})
_CREDENTIALS = struct.Struct("iII")

Report = Callable[[Pod, str], None]


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Continuing:
    def __init__(
        self, client: Client, *, proc: Path, groups: Path, pods: Callable[[], Mapping[str, Pod] | None],
        report: Report,
    ) -> None:  # fmt: skip
        """`groups`: where control groups are. `pods`: of this node by their uids; None: not known yet. `report`: that
        a pod could not go on."""
        self._client = client
        self._proc = proc
        self._groups = groups
        self._pods = pods
        self._report = report
        self._stopping = threading.Event()
        self._choosing = [threading.Lock() for _ in range(64)]
        self._taken: dict[str, int] = {}  # connections of each pod and user
        self._counting = threading.Lock()
        self._listener: socket.socket | None = None
        self._path = Path()

    def listen(self, folder: Path) -> None:
        """Once more if somebody has removed the socket. Raises OSError."""
        path = folder / NAME
        if self._listener is not None and path == self._path and path.is_socket():
            return
        self.stop_listening()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = folder / f".{NAME}"
        made.unlink(missing_ok=True)
        listener.bind(str(made))
        made.chmod(0o666)
        listener.listen(64)
        made.rename(path)
        self._listener, self._path = listener, path
        threading.Thread(target=self._accept, args=(listener,), name="continuing", daemon=True).start()

    def stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def stop(self) -> None:
        """Those who wait connect to the next adapter."""
        self._stopping.set()
        self.stop_listening()

    # --- who asks -----------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="pod", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            try:
                found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(found)
                with self._counted(self.pod_of(pid) or f"user {uid}"):
                    _Waiting(self, connection, pid, uid).serve()
            except (Gone, OSError):
                return
            except Exception:  # what waits connects again
                logger.exception("a pod was not served")

    @contextlib.contextmanager
    def _counted(self, whose: str) -> Iterator[None]:
        with self._counting:
            if self._taken.get(whose, 0) >= MOST_OF_ONE or sum(self._taken.values()) >= MOST:
                raise Gone
            self._taken[whose] = self._taken.get(whose, 0) + 1
        try:
            yield
        finally:
            with self._counting:
                self._taken[whose] -= 1
                if not self._taken[whose]:
                    del self._taken[whose]

    # --- for those who wait -------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        return self._client

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def choosing(self, origin: str) -> threading.Lock:
        """Of one origin, one pod is served at a time."""
        return self._choosing[hash(origin) % len(self._choosing)]

    def report(self, pod: Pod, why: str) -> None:
        with contextlib.suppress(XmigError):
            self._report(pod, why)

    def pods(self) -> Mapping[str, Pod]:
        return self._pods() or {}

    def pod_of(self, pid: int) -> str | None:
        return view.pod_of(self._proc, pid)

    def join(self, root: int, pid: int) -> None:
        """What was restored comes into the control group of this process: it is the pod's, with its limits, and ends
        with it. Raises Conflict."""
        group = view.group_of(self._proc, pid)
        if group is None:
            raise Conflict("this node has no control groups of version 2, so nothing is brought into the pod's")
        try:
            for each in processes_of(root):
                with contextlib.suppress(ProcessLookupError):
                    (self._groups / group.lstrip("/") / "cgroup.procs").write_text(f"{each}\n")
        except OSError as error:
            raise Conflict(f"it cannot be brought into the control group of its pod: {error.strerror}") from None


class _Waiting:
    """One that waits."""

    def __init__(self, owner: Continuing, connection: socket.socket, pid: int, uid: int) -> None:
        self._owner = owner
        self._client = owner.client
        self._connection = connection
        self._pid = pid
        self._uid = uid
        self._devices = ""  # its $CUDA_VISIBLE_DEVICES

    def serve(self) -> None:
        with contextlib.closing(Fd(os.pidfd_open(self._pid))) as pidfd:
            self._pidfd = pidfd
            word, _, self._devices = self._received(KNOWN_WITHIN).partition(" ")
            if word not in ("continue", "follow"):
                raise Gone
            pod: Pod | None = None
            try:
                pod = self._pod()
                found = self._root(pod, began=word == "follow")
                if found is not None:
                    self._follow(pod, *found)
                elif word == "continue":
                    self._send("anew")
                else:
                    self._end(self._last(pod), None)
            except XmigError as error:
                if isinstance(error, NoDaemon):
                    raise Gone from None  # xmigd is being started again: it asks anew
                if pod is not None:
                    self._owner.report(pod, error.message)
                logger.warning("a pod does not go on", pod=pod and pod.external_id, why=error.message)
                self._send(f"refused {harmless(str(error), 1000)}")

    def _pod(self) -> Pod:
        """Raises Conflict: it is in none."""
        end = time.monotonic() + KNOWN_WITHIN
        while True:
            uid = self._owner.pod_of(self._pid)
            self._check()  # what was read is this process's, and not that of the next one with its pid
            pod = self._owner.pods().get(uid or "")
            if pod is not None:
                return pod
            if time.monotonic() > end:
                raise Conflict("this process is in no pod of this node that has the annotation xmig.io/job")
            time.sleep(INTERVAL)

    def _check(self) -> None:
        """Raises Gone: it has ended, or this adapter ends."""
        if self._owner.stopping or select.select([self._pidfd.fileno()], [], [], 0)[0]:
            raise Gone

    # --- what it goes on from -----------------------------------------------------------------------------------------

    def _root(self, pod: Pod, *, began: bool) -> tuple[str, int] | None:
        """The job and the first process of what was restored for it. `began`: it was, before the adapter ended. None:
        nothing is there to go on from, or it has ended. Raises XmigError."""
        if not pod.origin or not pod.checkpoint:
            return None
        end = time.monotonic() + KNOWN_WITHIN
        while True:
            with self._owner.choosing(pod.origin):
                jobs = self._jobs(pod)
                found = self._restored(pod, jobs)
                if found is not None or began:
                    return found
                # What is being evicted may leave something for this one.
                if not self._is_leaving(jobs, patient=time.monotonic() < end):
                    return self._go_on(pod, jobs)
            self._check()
            time.sleep(INTERVAL)

    def _jobs(self, pod: Pod) -> list[dict[str, Any]]:
        """Of this pod's origin and user, the newest first."""
        found = self._client.get("/v1/jobs", label=f"{view.ORIGIN}={pod.origin}", limit=1000)
        return [each for each in found if each["uid"] == self._uid]

    def _is_leaving(self, jobs: Sequence[dict[str, Any]], *, patient: bool) -> bool:
        """Is any of these being evicted? `jobs` were read before: what is over in there had its preemption begun by
        then, and what was not, and has no processes now, has ended in between."""
        for job in jobs:
            if job["state"] in OVER:
                continue
            pids = self._pids(job)
            pods = [self._owner.pods().get(self._owner.pod_of(pid) or "") for pid in pids]
            if any(pod is not None and pod.checkpoint and pod.ends_at is not None for pod in pods):
                return True
            if not pids and patient:
                return True
        ids = {job["id"] for job in jobs}
        return any(
            operation["job_id"] in ids
            for state in ("pending", "running")
            for operation in self._client.get("/v1/operations", kind="preemption", state=state, limit=1000)
        )

    def _pids(self, job: dict[str, Any]) -> list[int]:
        if not job["processes"]:
            return []
        return [each["pid"] for each in self._client.get("/v1/processes", live=True, job=job["id"], limit=1000)]

    def _restored(self, pod: Pod, jobs: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
        """What an adapter that was killed meanwhile has restored for this pod, or for nobody yet."""
        for job in jobs:
            pids = self._pids(job) if job["restored_from"] is not None else []
            if not pids or any(self._owner.pod_of(pid) not in (None, pod.uid) for pid in pids):
                continue
            for operation in self._client.get("/v1/operations", kind="restoration", state="succeeded", limit=1000):
                result = operation["result"] or {}
                if result.get("job") == job["id"] and "root" in result:
                    self._take(pod, job["id"], result["root"])
                    return job["id"], result["root"]
        return None

    def _last(self, pod: Pod) -> str:
        """What this pod went on with last, which is over. Raises Conflict."""
        found = self._client.get("/v1/jobs", external_id=pod.external_id, limit=1000)
        for job in found:
            if job["uid"] == self._uid and job["restored_from"] is not None:
                return str(job["id"])
        raise Conflict("xMIG does not know any more what this pod went on with")

    def _go_on(self, pod: Pod, jobs: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
        for job in jobs:
            if job["state"] not in OVER:
                continue
            try:
                operation = self._continue(job["id"])
            except Refused as refused:
                if refused.code in NEXT:
                    continue
                raise
            job_id, root = operation["result"]["job"], int(operation["result"]["root"])
            try:
                self._take(pod, job_id, root)
            except XmigError:
                self._client.delete(f"/v1/jobs/{job_id}")
                raise
            logger.info("a pod goes on", pod=pod.external_id, job=job_id[:12], pid=root)
            return job_id, root
        return None

    def _continue(self, job: str) -> dict[str, Any]:
        """Raises Refused, Conflict: it cannot be restored."""
        path, last = f"/v1/jobs/{job}:continue", None
        for devices in self._places(job):
            try:
                return self._finished(self._client.start(path, {"devices": devices}))
            except Refused as refused:
                if refused.code not in ELSEWHERE:
                    raise
                last = last or refused
        assert last is not None
        raise last

    def _places(self, job: str) -> Iterator[list[str]]:
        """Those that the pod has; of one that has none, those that the job had, and others in the place of one."""
        known = [each for each in self._client.get("/v1/devices") if each["configured"]]
        if names_devices(self._devices):
            uuids = {each["id"]: view.plain(each["uuid"] or "") for each in known}
            chosen = visible(self._devices, numbered(None, list(uuids)), uuids.get)
            if not chosen:
                raise Conflict(f"xMIG has no devices {harmless(self._devices, 200)} (CUDA_VISIBLE_DEVICES)")
            yield chosen
            return
        yield []
        had = self._client.get(f"/v1/jobs/{job}")["device"] or ""
        ready = [each for each in known if each["state"] == "ready" and each["id"] != had]
        if "," not in had:
            for each in sorted(ready, key=lambda one: -(one["free_bytes"] or 0)):
                yield [each["id"]]

    def _take(self, pod: Pod, job: str, root: int) -> None:
        """Raises XmigError. The first thing is that it is announced: from then on its container never begins anew,
        whatever becomes of this adapter."""
        self._send("running")
        self._owner.join(root, self._pid)
        self._check()
        self._client.patch(f"/v1/jobs/{job}", {"external_id": pod.external_id, "labels": pod.labels}, "*")

    # --- while it runs ------------------------------------------------------------------------------------------------

    def _follow(self, pod: Pod, job: str, root: int) -> None:
        try:
            pidfd = Fd(os.pidfd_open(root))
        except ProcessLookupError:
            self._end(job, None)
            return
        with contextlib.closing(pidfd):
            started = pidfds.start_time(root)
            while not select.select([pidfd.fileno()], [], [], 0)[0]:
                self._check()
                ready = select.select([pidfd.fileno(), self._connection.fileno()], [], [], 1.0)[0]
                if self._connection.fileno() in ready:
                    self._signal(pod, root, self._received(1.0))
            self._end(job, exits.exit_status(pidfd, root, started))

    def _signal(self, pod: Pod, root: int, message: str) -> None:
        """One that the container got. SIGTERM begins an eviction, and with that the program ends as a checkpoint."""
        word, _, number = message.partition(" ")
        if word != "signal" or not number.isdecimal() or int(number) not in PASSED_ON:
            raise Gone
        if pod.checkpoint and int(number) == signal.SIGTERM:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root, int(number)) if os.getpgid(root) == root else os.kill(root, int(number))

    def _end(self, job: str, status: int | None) -> None:
        end = exits.end_of(status)
        over = time.monotonic() + SEEN_WITHIN
        while end == exits.UNKNOWN:  # xmigd may see it a moment later
            seen = self._client.get(f"/v1/jobs/{job}")
            end = exits.End(seen["exit_code"], seen["exit_signal"])
            if time.monotonic() > over:
                break
            time.sleep(INTERVAL)
        if end == exits.UNKNOWN:
            self._send("refused this kernel does not say how the restored program ended (Linux 6.15 does)")
        else:
            self._send(f"ended {128 + end.signal if end.signal is not None else end.code}")

    def _finished(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Raises Conflict: it has not succeeded."""
        silent_since = time.monotonic()
        while operation["state"] not in ("succeeded", "failed", "cancelled"):
            time.sleep(INTERVAL)
            try:
                operation = self._client.get(f"/v1/operations/{operation['id']}")
                silent_since = time.monotonic()
            except NoDaemon:  # it is being restarted
                if time.monotonic() - silent_since > RESTART_PATIENCE:
                    raise
        if operation["state"] != "succeeded":
            error = operation["error"] or {}
            raise Conflict(str(error.get("detail") or f"the restoration has {operation['state']}"))
        return operation

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        self._connection.settimeout(5.0)
        self._connection.send(text.encode())

    def _received(self, seconds: float) -> str:
        """Raises Gone, OSError."""
        self._connection.settimeout(seconds)
        message = self._connection.recv(LONGEST)
        if not message:
            raise Gone
        return message.decode(errors="replace")
