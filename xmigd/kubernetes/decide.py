"""What is to be done, from what is there on both sides: no I/O, and nothing remembered. An adapter that was killed
anywhere decides the same again.

Invariants:
  xMIG's health goes to Kubernetes as what keeps new pods away (NoSchedule, None), never as NoExecute: the programs of a
  device that fails have moved, or go on elsewhere, and Kubernetes would end them.
  Of Kubernetes only what begins with ours is changed, and of xMIG only cordons with our reason are taken back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xmigd.kubernetes import view
from xmigd.kubernetes.view import Effect, Gpu, Pod, Rule
from xmigd.text import harmless

CONDITION = "XmigReady"
TAINT = "xmig.io/not-ready"  # of nodes, and of devices
OURS = "Kubernetes: "  # begins the reason of a cordon that Kubernetes wants
HEARTBEAT = 60.0  # seconds between two writes of a condition that has not changed
LONGEST = 500  # characters of a message


@dataclass(frozen=True, slots=True)
class Device:
    """Of xMIG."""

    id: str
    uuid: str  # empty: not known yet
    state: str  # ready, cordoned, unhealthy
    why: str
    cordon_reason: str  # empty: not cordoned
    health: str  # the rung of its worst finding: fine, report, cordon, drain, lose

    @property
    def cordoned_for_kubernetes(self) -> bool:
        return self.cordon_reason.startswith(OURS)

    @property
    def effect(self) -> Effect | None:
        """On new pods. None: it is as it should be."""
        bad = self.state == "unhealthy" or (self.state == "cordoned" and not self.cordoned_for_kubernetes)
        return "NoSchedule" if bad else "None" if self.health == "report" else None


def devices(found: Iterable[Mapping[str, Any]]) -> list[Device]:
    """Of the answer to GET /v1/devices, those of the configuration."""
    return [
        Device(
            each["id"], view.plain(each["uuid"] or ""), each["state"], each["why"],
            (each["cordon_reason"] or "cordoned") if each["cordoned"] else "", each["health"],
        )
        for each in found
        if each["configured"]
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Health:
    """`unreachable`: why xmigd does not answer; empty: it does."""

    devices: Sequence[Device] = ()
    unreachable: str = ""


# --- to Kubernetes ----------------------------------------------------------------------------------------------------


def condition(health: Health, before: Mapping[str, Any], now: float) -> dict[str, Any] | None:
    """The node's, where it is to be written."""
    if health.unreachable:
        status, reason, message = "False", "XmigdUnreachable", health.unreachable
    elif bad := [each for each in health.devices if each.effect == "NoSchedule"]:
        status, reason = "False", "DevicesNotReady"
        message = "; ".join(f"{each.id} is {each.state}: {each.why}" for each in bad)
    else:
        status, reason, message = "True", "DevicesReady", f"{len(health.devices)} devices take programs"
        if reported := [each.id for each in health.devices if each.effect == "None"]:
            reason, message = "DevicesDegraded", f"{message}; something is reported of {', '.join(reported)}"
    message = harmless(message, LONGEST)
    beaten = view.seconds(before.get("lastHeartbeatTime")) or 0.0
    same = (before.get("status"), before.get("reason"), before.get("message")) == (status, reason, message)
    if same and 0 <= now - beaten < HEARTBEAT:
        return None
    since = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": CONDITION, "status": status, "reason": reason, "message": message,
        "lastHeartbeatTime": view.timestamp(now), "lastTransitionTime": since or view.timestamp(now),
    }  # fmt: skip


def node_taints(health: Health, known: Mapping[str, Gpu], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """All of the node's, where they change. `known`: devices that DRA can taint, if it can taint any: a node without
    them is tainted for one bad device."""
    bad = [each for each in health.devices if each.effect == "NoSchedule"]
    not_ready = bool(health.unreachable) or any(each.uuid not in known for each in bad)
    others = [each for each in now if each.get("key") != TAINT]
    value = "xmigd" if health.unreachable else "devices"
    ours = [each for each in now if each.get("key") == TAINT]
    if not_ready:
        if [(each.get("value"), each.get("effect")) for each in ours] == [(value, "NoSchedule")]:
            return None
        return [*others, {"key": TAINT, "value": value, "effect": "NoSchedule"}]
    return others if ours else None


def rule_name(node: str, device: str) -> str:
    return "xmig-" + hashlib.sha256(f"{node}/{device}".encode()).hexdigest()[:24]


def device_rules(node: str, health: Health, known: Mapping[str, Gpu]) -> dict[str, dict[str, Any]]:
    """The DeviceTaintRules of this node's devices by their names, without version and kind."""
    found = {}
    for device in health.devices:
        gpu = known.get(device.uuid)
        if gpu is None or device.effect is None:
            continue
        found[rule_name(node, device.id)] = {
            "metadata": {
                "name": rule_name(node, device.id), "labels": {"app.kubernetes.io/managed-by": "xmig-kubernetes"},
                "annotations": {"xmig.io/node": node, "xmig.io/device": device.id},
            },
            "spec": {
                "deviceSelector": {"driver": gpu.driver, "pool": gpu.pool, "device": gpu.name},
                "taint": {
                    "key": TAINT, "value": device.health if device.state == "ready" else device.state,
                    "effect": device.effect,
                },
            },
        }  # fmt: skip
    return found


# --- to xMIG ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cordon:
    """`within`: seconds in which its programs leave; None: they stay."""

    reason: str
    within: float | None


def cordons(
    found: Sequence[Device], known: Mapping[str, Gpu], rules: Iterable[Rule], node_within: float | None
) -> dict[str, Cordon | None]:
    """What is to be cordoned or drained, and what is not any more (None)."""
    wanted: dict[str, Cordon] = {}
    names = {gpu: device.id for device in found if (gpu := known.get(device.uuid)) is not None}
    for rule in rules:
        device = names.get(rule.selects) if rule.selects is not None and not rule.ours else None
        if device is None or rule.effect not in ("NoSchedule", "NoExecute"):
            continue
        # With NoExecute Kubernetes ends the pods themselves; what is not a pod's leaves, too.
        within = 60.0 if rule.effect == "NoExecute" else None
        wanted[device] = Cordon(harmless(f"{OURS}taint {rule.key} of {rule.name}", 255), within)
    if node_within is not None:
        wanted |= {each.id: Cordon(f"{OURS}the node is drained", node_within) for each in found}
    changes: dict[str, Cordon | None] = {}
    for each in found:
        if (cordon := wanted.get(each.id)) is not None:
            if not each.cordon_reason:
                changes[each.id] = cordon
        elif each.cordoned_for_kubernetes:
            changes[each.id] = None
    return changes


@dataclass(frozen=True, slots=True)
class Job:
    """Of xMIG, with processes that live. `pod`: the one that they are in; None: in none, or not all in one."""

    id: str
    pod: Pod | None
    state: str
    external_id: str | None
    labels: Mapping[str, str]
    restored: bool


def identity(job: Job) -> dict[str, Any] | None:
    """How its external id and its labels are to be changed: the kernel says whose it is, not the job."""
    claimed = (job.external_id or "").startswith("k8s:")
    if job.pod is None:
        if job.restored or not (claimed or any(key.startswith("k8s/") for key in job.labels)):
            return None
        gone: dict[str, Any] = {"labels": {key: None for key in job.labels if key.startswith("k8s/")}}
        return gone | ({"external_id": None} if claimed else {})
    wanted = job.pod.labels
    if job.external_id == job.pod.external_id and all(job.labels.get(key) == value for key, value in wanted.items()):
        return None
    return {"external_id": job.pod.external_id, "labels": wanted}


SUSPENDED = "k8s/suspended"  # label of a job that is suspended because its pod's annotation says so
Suspension = Literal["suspend", "resume", "forget"]


def suspension(job: Job) -> Suspension | None:
    """What its pod's annotation changes; `forget`: it runs again, and whoever suspends it from now on is somebody else.
    None: nothing."""
    if job.pod is None or job.pod.ends_at is not None:
        return None
    if job.pod.suspend:
        return "suspend" if job.state == "running" else None
    if SUSPENDED not in job.labels:
        return None
    return "resume" if job.state == "suspended" else "forget"
