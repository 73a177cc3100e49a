"""What the adapter reads in objects of Kubernetes and in /proc. Anybody may write an annotation: what is not well
formed is as if it were not there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

JOB = "xmig.io/job"  # annotation of a pod: "true": its programs run under xMIG
ON_EVICTION = "xmig.io/on-eviction"  # annotation of a pod: "checkpoint"
SUSPEND = "xmig.io/suspend"  # annotation of a pod: "true": its programs give their devices back
DRAIN = "xmig.io/drain"  # annotation of a node that is unschedulable: seconds in which its devices are emptied
ORIGIN = "k8s/origin"  # label of a job: whose place its pod has
# Labels of pods: which of its controller's pods this is, and of which version of the controller's template.
PLACES = ("batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index")
REVISION = "controller-revision-hash"
LONGEST_DRAIN = 86400.0  # seconds
LONGEST_ID = 255  # characters of an external id
UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
# From the root on: below its own control group a process may call groups as it likes. cgroup v2, and hierarchies of v1.
POD = re.compile(
    r"^\d+:[^:]*:/(?:kubelet(?:\.slice)?/)?(?:kubelet-)?kubepods(?:\.slice)?/"
    r"(?:(?:kubelet-)?(?:kubepods-)?(?:burstable|besteffort)(?:\.slice)?/)?"
    rf"(?:(?:kubelet-)?kubepods-(?:(?:burstable|besteffort)-)?)?pod({UID})(?:\.slice)?(?:/|$)"
)
Effect = Literal["None", "NoSchedule", "NoExecute"]


@dataclass(frozen=True, slots=True)
class Pod:
    """One whose programs are to be under xMIG."""

    namespace: str
    name: str
    uid: str
    owner: str  # Kind/name of its controller; empty: none
    checkpoint: bool  # before it is evicted
    suspend: bool
    ends_at: float | None = None  # Unix seconds: when its grace is over; None: nobody has deleted it
    grace: float = 0.0  # seconds before that, in which it was deleted
    origin: str = ""  # the same of a pod that its controller starts in the place of this one; empty: it has none

    @property
    def external_id(self) -> str:
        """The name gives way if all of it is too long."""
        begin, end = f"k8s:{self.namespace}/", f"/{self.uid}"
        return begin + self.name[: LONGEST_ID - len(begin) - len(end)] + end

    @property
    def labels(self) -> dict[str, str]:
        found = {
            "k8s/namespace": self.namespace, "k8s/pod": self.name, "k8s/owner": self.owner, ORIGIN: self.origin
        }  # fmt: skip
        return {key: value[:255] for key, value in found.items() if value}


def pods(objects: Iterable[Mapping[str, Any]]) -> dict[str, Pod]:
    """By their uids."""
    found = {}
    for each in objects:
        metadata = _mapping(each.get("metadata"))
        annotations = _mapping(metadata.get("annotations"))
        namespace, name, uid = (_text(metadata.get(key)) for key in ("namespace", "name", "uid"))
        if annotations.get(JOB) != "true" or not (namespace and name and uid):
            continue
        owners = map(_mapping, _list(metadata.get("ownerReferences")))
        owner: Mapping[str, Any] = next((one for one in owners if one.get("controller")), {})
        found[uid] = Pod(
            namespace, name, uid, "/".join(filter(None, (_text(owner.get("kind")), _text(owner.get("name"))))),
            checkpoint=annotations.get(ON_EVICTION) == "checkpoint", suspend=annotations.get(SUSPEND) == "true",
            ends_at=seconds(metadata.get("deletionTimestamp")),
            grace=_number(metadata.get("deletionGracePeriodSeconds")),
            origin=_origin(namespace, owner, _mapping(metadata.get("labels"))),
        )  # fmt: skip
    return found


def _origin(namespace: str, owner: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    """A controller that was made anew, under its old name, has another uid. Too long: none."""
    uid = _text(owner.get("uid"))
    if not uid:
        return ""
    place = next((_text(labels.get(name)) for name in PLACES if name in labels), "")
    found = f"{namespace}/{uid}/{place}/{_text(labels.get(REVISION))}"
    return found if len(found) <= LONGEST_ID and found.isascii() and found.isprintable() else ""


def group_of(proc: Path, pid: int) -> str | None:
    """The control group of a process, of version 2, from the root on. None: there is none, or it is none of ours."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            if line.startswith("0::/") and ".." not in line and line != "0::/":
                return line.removeprefix("0::")
    return None


def pod_of(proc: Path, pid: int) -> str | None:
    """The uid of the pod that a process is in, by its control group: the kernel's word. None: it is in none."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            if (match := POD.match(line)) is not None:
                return match[1].replace("_", "-")
    return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as DRA calls it."""

    driver: str
    pool: str
    name: str


def gpus(slices: Iterable[Mapping[str, Any]]) -> dict[str, Gpu]:
    """Of this node's ResourceSlices, by their UUIDs as xMIG writes them. That of a pool with the highest generation
    counts."""
    newest: dict[tuple[str, str], int] = {}
    specs = [_mapping(each.get("spec")) for each in slices]
    for spec in specs:
        key = _pool(spec)
        newest[key] = max(newest.get(key, 0), _generation(spec))
    found = {}
    for spec in specs:
        driver, pool = _pool(spec)
        if not (driver and pool) or _generation(spec) != newest[driver, pool]:
            continue
        for device in map(_mapping, _list(spec.get("devices"))):
            attributes = _mapping(device.get("attributes")) or _mapping(
                _mapping(device.get("basic")).get("attributes")
            )  # v1beta1
            uuid = _text(_mapping(attributes.get("uuid")).get("string"))
            if uuid and (name := _text(device.get("name"))):
                found[plain(uuid)] = Gpu(driver, pool, name)
    return found


def plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _pool(spec: Mapping[str, Any]) -> tuple[str, str]:
    return _text(spec.get("driver")), _text(_mapping(spec.get("pool")).get("name"))


def _generation(spec: Mapping[str, Any]) -> int:
    found = _mapping(spec.get("pool")).get("generation")
    return found if isinstance(found, int) else 0


@dataclass(frozen=True, slots=True)
class Rule:
    """A DeviceTaintRule."""

    name: str
    selects: Gpu | None  # None: something else than one device
    key: str
    value: str
    effect: str
    ours: bool


def rule(found: Mapping[str, Any]) -> Rule:
    metadata, spec = _mapping(found.get("metadata")), _mapping(found.get("spec"))
    selector, taint = _mapping(spec.get("deviceSelector")), _mapping(spec.get("taint"))
    named = [_text(selector.get(key)) for key in ("driver", "pool", "device")]
    return Rule(
        name=_text(metadata.get("name")), selects=Gpu(*named) if all(named) else None, key=_text(taint.get("key")),
        value=_text(taint.get("value")), effect=_text(taint.get("effect")),
        ours=_mapping(metadata.get("labels")).get("app.kubernetes.io/managed-by") == "xmig-kubernetes",
    )  # fmt: skip


def drain_within(node: Mapping[str, Any], default: float) -> float | None:
    """Seconds in which its devices are to be emptied; None: they are not."""
    if _mapping(node.get("spec")).get("unschedulable") is not True:
        return None
    given = _mapping(_mapping(node.get("metadata")).get("annotations")).get(DRAIN)
    if isinstance(given, str) and re.fullmatch(r"\d{1,6}", given):
        return min(float(given), LONGEST_DRAIN) or None
    return default or None


def taints(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(each) for each in map(_mapping, _list(_mapping(node.get("spec")).get("taints"))) if each]


def condition(node: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Empty: it has none."""
    conditions = _list(_mapping(node.get("status")).get("conditions"))
    return next((one for one in map(_mapping, conditions) if one.get("type") == kind), {})


def seconds(text: Any) -> float | None:
    """Unix seconds of a time as Kubernetes writes it."""
    with contextlib.suppress(ValueError):
        if isinstance(text, str):
            return datetime.fromisoformat(text).timestamp()
    return None


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int) else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
