"""The loop: both sides are read, decided upon (decide.py), and changed. A restart misses nothing that is remembered.

Each part fails alone. What fails is tried again with the next look, and so is what somebody else changed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xmigd import log
from xmigd.client import Client, Refused
from xmigd.errors import XmigError
from xmigd.kubernetes import decide, view
from xmigd.kubernetes.api import Api, ApiError, Changed
from xmigd.kubernetes.continuing import Continuing
from xmigd.kubernetes.decide import Health, Job
from xmigd.kubernetes.evictions import Evictions
from xmigd.kubernetes.rules import Rules
from xmigd.kubernetes.settings import KubernetesSettings
from xmigd.kubernetes.watched import Watched

logger = log.get("kubernetes")

TRIES = 5  # to change an object that others change, too
LIVE = {"live": True, "limit": 1000}


class Adapter:
    """`runtime_dir`: of xMIG, where its sockets are."""

    def __init__(self, settings: KubernetesSettings, api: Api, client: Client, runtime_dir: Path) -> None:
        self._settings = settings
        self._api = api
        self._client = client
        self._runtime_dir = runtime_dir
        beside = runtime_dir.with_name(f"{runtime_dir.name}-pods")
        self._pods_folder = settings.pods_folder or beside
        self._node_path = f"/api/v1/nodes/{settings.node_name}"
        self._wake = threading.Event()
        self._stopping = False
        self._failing: dict[str, str] = {}
        named = {"fieldSelector": f"spec.nodeName={settings.node_name}"}
        self._node = Watched(api, "/api/v1/nodes", self._wake.set, fieldSelector=f"metadata.name={settings.node_name}")
        self._pods = Watched(api, "/api/v1/pods", self._wake.set, **named)
        self._rules = Rules(api, settings.node_name, self._wake.set)
        self._evictions = Evictions(client, api, settings.margin)
        self._continuing = Continuing(
            client, proc=settings.proc, groups=settings.control_groups, pods=self._known_pods,
            report=self._evictions.report_continuation,
        )  # fmt: skip

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Until `stop`."""
        for watched in (self._node, self._pods):
            watched.start()
        self._rules.start()
        self._check_groups()
        logger.info("xmig-kubernetes is ready", node=self._settings.node_name, api=self._settings.server)
        while not self._stopping:
            self._wake.clear()
            self._look()
            self._wake.wait(self._settings.interval)
        self._continuing.stop()

    def _known_pods(self) -> dict[str, view.Pod] | None:
        objects = self._pods.objects
        return None if objects is None else view.pods(objects)

    def _check_groups(self) -> None:
        """In a namespace of its own, paths of control groups do not begin at the root, and no pod is recognized."""
        with contextlib.suppress(OSError):
            if ":/.." in (self._settings.proc / "1" / "cgroup").read_text(errors="replace"):
                logger.error("pods are not recognized", why="this container has a cgroup namespace of its own",
                             hint="run it as privileged")  # fmt: skip

    def _look(self) -> None:
        health = self._health()
        self._part("socket", self._link_socket)
        self._part("continuing", self._listen)
        self._part("condition", lambda: self._write_condition(health))
        self._part("taint", lambda: self._write_taint(health))
        self._part("device taints", lambda: self._rules.write(health))
        if not health.unreachable:
            self._part("cordons", lambda: self._cordon(health))
            self._part("pods", self._serve_pods)

    def _part(self, name: str, work: Callable[[], None]) -> None:
        """A failure is logged when it begins, and when it changes."""
        try:
            work()
        except Changed:  # the newer one is on its way
            return
        except (XmigError, OSError) as error:
            if self._failing.get(name) != str(error):
                logger.warning("a part fails", what=name, why=str(error))
            self._failing[name] = str(error)
        except Exception:
            logger.exception("a part failed", what=name)
        else:
            if self._failing.pop(name, None) is not None:
                logger.info("a part succeeds again", what=name)

    def _health(self) -> Health:
        try:
            self._client.get("/readyz")
            return Health(decide.devices(self._client.get("/v1/devices")))
        except XmigError as error:
            return Health(unreachable=error.message)

    # --- to Kubernetes ------------------------------------------------------------------------------------------------

    def _known_node(self) -> dict[str, Any] | None:
        """None: it is not known yet, or Kubernetes has no such node."""
        objects = self._node.objects
        if objects is None:
            return None
        if not objects:
            raise ApiError(f"Kubernetes has no node {self._settings.node_name} (XMIG_KUBERNETES_NODE_NAME)")
        return objects[0]

    def _write_condition(self, health: Health) -> None:
        node = self._known_node()
        if node is None:
            return
        written = decide.condition(health, view.condition(node, decide.CONDITION), time.time())
        if written is not None:
            # By its type the server finds it among those of others.
            self._api.patch(f"{self._node_path}/status", {"status": {"conditions": [written]}}, "strategic-merge-patch")

    def _write_taint(self, health: Health) -> None:
        """Taints are one list: it is written only as it was read."""
        node = self._known_node()
        known = self._rules.known
        if node is None or known is None:
            return
        for _ in range(TRIES):
            taints = decide.node_taints(health, known if self._rules.possible else {}, view.taints(node))
            if taints is None:
                return
            version = node["metadata"]["resourceVersion"]
            with contextlib.suppress(Changed):
                body = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}
                self._api.patch(self._node_path, body)
                logger.info("the node's taint is written", taints=[each.get("key") for each in taints])
                return
            node = self._api.get(self._node_path)

    # --- to xMIG ------------------------------------------------------------------------------------------------------

    def _cordon(self, health: Health) -> None:
        node, known, rules = self._known_node(), self._rules.known, self._rules.all
        if node is None or known is None or rules is None:
            return
        within = view.drain_within(node, self._settings.drain_seconds)
        for device, cordon in decide.cordons(health.devices, known, rules, within).items():
            path = f"/v1/devices/{device}"
            if cordon is None:
                self._client.patch(path, {"cordoned": False}, "*")
            elif cordon.within is None:
                self._client.patch(path, {"cordoned": True, "reason": cordon.reason}, "*")
            else:
                with contextlib.suppress(Refused):  # a drain of it is under way
                    body = {"reason": cordon.reason, "within_seconds": cordon.within}
                    self._client.start(f"{path}:drain", body)

    def _serve_pods(self) -> None:
        pods = self._known_pods()
        if pods is None:
            return
        for job in self._jobs(pods):
            with self._job_may_be_over():
                change = decide.identity(job)
                if change is not None:
                    if job.pod is None:
                        logger.warning("a job claims to be a pod's", job=job.id[:12], external_id=job.external_id)
                    self._client.patch(f"/v1/jobs/{job.id}", change, "*")
            with self._job_may_be_over():
                self._suspend(job)
            if job.pod is not None and job.pod.ends_at is not None and job.pod.checkpoint:
                with self._job_may_be_over():
                    self._evictions.serve(job, job.pod, job.pod.ends_at)

    @contextlib.contextmanager
    def _job_may_be_over(self) -> Any:
        try:
            yield
        except Refused as refused:
            if refused.status not in (404, 409):
                raise

    def _jobs(self, pods: dict[str, view.Pod]) -> list[Job]:
        """Those with processes that live."""
        before = self._client.get("/v1/processes", **LIVE)
        found = {each["id"]: view.pod_of(self._settings.proc, each["pid"]) for each in before}
        # One that lives still has had its pid all the time: what was read of it is not another one's.
        live = [each for each in self._client.get("/v1/processes", **LIVE) if each["id"] in found]
        uids: dict[str, set[str | None]] = {}
        for each in live:
            uids.setdefault(each["job_id"], set()).add(found[each["id"]])
        jobs = []
        for each in self._client.get("/v1/jobs", **LIVE):
            if (of := uids.get(each["id"])) is None:
                continue
            uid = next(iter(of)) if len(of) == 1 else None
            jobs.append(Job(
                each["id"], pods.get(uid or ""), each["state"], each["external_id"], each["labels"],
                each["restored_from"] is not None,
            ))  # fmt: skip
        return jobs

    def _suspend(self, job: Job) -> None:
        path = f"/v1/jobs/{job.id}"
        match decide.suspension(job):
            case "suspend":
                # Before it is suspended: so that an adapter that comes later knows who has done it.
                self._client.patch(path, {"labels": {decide.SUSPENDED: "true"}}, "*")
                self._client.start(f"{path}:suspend", {"to": "host"})
            case "resume":
                self._client.start(f"{path}:resume", {})
            case "forget":
                self._client.patch(path, {"labels": {decide.SUSPENDED: None}}, "*")

    # --- what pods mount ----------------------------------------------------------------------------------------------

    def _link_socket(self) -> None:
        """Pods get the socket of programs, and not that of the API: with it, root in a container would be an operator.
        A folder of its own, because the next daemon makes a new socket, and systemd removes the runtime directory."""
        folder, socket = self._pods_folder, self._runtime_dir / "client.sock"
        linked = folder / socket.name
        try:
            wanted = socket.stat()
        except FileNotFoundError:
            return
        folder.mkdir(mode=0o755, exist_ok=True)
        if folder.lstat().st_uid != os.geteuid():
            raise XmigError(f"{folder} is another user's", hint="remove it, or choose XMIG_KUBERNETES_PODS_FOLDER")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(linked.lstat(), wanted):
                return
        made = folder / f".{socket.name}"
        made.unlink(missing_ok=True)
        os.link(socket, made)
        made.rename(linked)

    def _listen(self) -> None:
        """For pods that may go on from a checkpoint."""
        if self._pods_folder.is_dir():
            self._continuing.listen(self._pods_folder)
