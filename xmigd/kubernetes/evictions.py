"""Pods that are being deleted, by a preemption, a drain or anybody: a checkpoint of their programs within the grace.

It is tried once for each pod and job, and the pod's events say what became of it. What others have requested before, to
suspend the job for instance, is another matter. An adapter that was restarted meanwhile may try once more.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from xmigd import log
from xmigd.client import Client
from xmigd.kubernetes import view
from xmigd.kubernetes.api import Api, Changed
from xmigd.kubernetes.decide import Job
from xmigd.kubernetes.view import Pod
from xmigd.text import harmless

logger = log.get("kubernetes")

MOST = 1000  # checkpoints that are remembered
SHORTEST = 1.0  # seconds: with less left nothing is begun
COMPONENT = "xmig-kubernetes"


class Evictions:
    """`margin`: seconds before the end of a pod's grace at which a checkpoint is given up."""

    def __init__(self, client: Client, api: Api, margin: float) -> None:
        self._client = client
        self._api = api
        self._margin = margin
        self._begun: dict[tuple[str, str], str] = {}  # by pod and job: the operation, the oldest first

    def serve(self, job: Job, pod: Pod, ends_at: float) -> None:
        """Raises XmigError."""
        key = (pod.uid, job.id)
        if (begun := self._begun.get(key)) is not None:
            self._report(pod, self._client.get(f"/v1/operations/{begun}"))
            return
        left = ends_at - time.time() - self._margin
        if left < SHORTEST:
            return
        body = {"deadline_seconds": left, "prefer": "checkpoint"}
        operation = self._client.start(f"/v1/jobs/{job.id}:preempt", body)
        self._begun[key] = operation["id"]
        if len(self._begun) > MOST:
            del self._begun[next(iter(self._begun))]
        logger.info("a pod is evicted: a checkpoint of its program", pod=pod.external_id, job=job.id[:12], within=left,
                    operation=operation["id"])  # fmt: skip

    def _report(self, pod: Pod, operation: dict[str, Any]) -> None:
        """An event of the pod for one that has failed: of a success nothing lives that would be found here."""
        if operation["state"] not in ("failed", "cancelled"):
            return
        why = (operation["error"] or {}).get("detail")
        # The same name each time: it is made once.
        if self._event(pod, f"xmig-{operation['id']}", "CheckpointFailed", f"xMIG made no checkpoint: {why}"):
            logger.warning("no checkpoint was made", pod=pod.external_id, why=why)

    def report_continuation(self, pod: Pod, why: str) -> None:
        """An event of a pod that could not go on. Raises XmigError."""
        name = "xmig-" + hashlib.sha256(f"{pod.uid}/{why}".encode()).hexdigest()[:32]  # once for each reason
        self._event(pod, name, "ContinueFailed", f"it does not go on from its checkpoint: {why}")

    def _event(self, pod: Pod, name: str, reason: str, message: str) -> bool:
        """Was it made now?"""
        now = view.timestamp(time.time())
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
            },
            "reason": reason, "type": "Warning", "message": harmless(message, 1000),
            "source": {"component": COMPONENT}, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        }  # fmt: skip
        try:
            self._api.post(f"/api/v1/namespaces/{pod.namespace}/events", event)
        except Changed:
            return False
        return True
