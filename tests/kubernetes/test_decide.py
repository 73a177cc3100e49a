"""What is decided, without anybody to carry it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xmigd.kubernetes import decide, view
from xmigd.kubernetes.decide import Cordon, Device, Health, Job
from xmigd.kubernetes.view import Gpu, Pod, Rule

UID = "0d3c9a52-7c0b-4c39-8d2e-0f5a5d3b6a11"
ANOTHER = "99999999-7c0b-4c39-8d2e-0f5a5d3b6a11"
US = UID.replace("-", "_")
GPU = Gpu("gpu.nvidia.com", "n1", "gpu-0")


def device(**fields: Any) -> Device:
    found = {"id": "cuda:0", "uuid": "u0", "state": "ready", "why": "", "cordon_reason": "", "health": "fine"}
    return Device(**(found | fields))


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{US}.slice/cri-containerd-1.scope",
        f"/kubepods.slice/kubepods-pod{US}.slice/crio-1.scope",
        f"/kubepods/besteffort/pod{UID}/1",
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{US}.slice/x",
        f"/kubepods/pod{UID}/sub/kubepods/pod{ANOTHER}",
    ],
)
def test_a_process_is_in_a_pod(tmp_path: Path, path: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::{path}\n")
    assert view.pod_of(tmp_path, 7) == UID


@pytest.mark.parametrize(
    "path",
    [
        "/", "/user.slice/user-1000.slice", f"/user.slice/kubepods/pod{UID}/1", f"/pod{UID}", f"/kubepods/x/pod{UID}",
        f"/../../kubepods-pod{US}.slice/x", f"/kubepods/pod{UID}0/1", f"/kubepods.slice/evil-kubepods-pod{US}.slice",
    ],
)  # fmt: skip
def test_a_process_is_in_none(tmp_path: Path, path: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::{path}\n")
    assert view.pod_of(tmp_path, 7) is None
    assert view.pod_of(tmp_path, 8) is None


def test_objects_that_are_not_as_they_should_be() -> None:
    """Whoever may write annotations may write anything."""
    strange: list[Any] = [
        {}, {"metadata": None}, {"metadata": {"annotations": []}}, {"metadata": {"annotations": {view.JOB: True}}},
        {"metadata": {"name": 1, "namespace": "a", "uid": UID, "annotations": {view.JOB: "true"}}},
        {"spec": {"driver": "d", "pool": {"name": "p", "generation": "x"}, "devices": [None, {"attributes": 3}]}},
    ]  # fmt: skip
    assert view.pods(strange) == {}
    assert view.gpus(strange) == {}
    assert [view.rule(each).selects for each in strange] == [None] * len(strange)
    for text in ("soon", "-1", "1e9", "", None, 7):
        node = {"spec": {"unschedulable": True}, "metadata": {"annotations": {view.DRAIN: text}}}
        assert view.drain_within(node, 0.0) is None
    assert view.seconds("soon") is None


def test_ids_fit() -> None:
    pod = Pod("n" * 63, "p" * 253, UID, "", False, False)
    assert len(pod.external_id) == 255
    assert pod.external_id.endswith(f"p/{UID}")


def test_old_slices_do_not_count() -> None:
    def slice(generation: int, name: str) -> dict[str, Any]:
        devices = [{"name": name, "attributes": {"uuid": {"string": "GPU-ABC"}}}]
        pool = {"name": "n1", "generation": generation}
        return {"spec": {"driver": "d", "pool": pool, "devices": devices}}

    assert view.gpus([slice(2, "new"), slice(1, "old")]) == {"abc": Gpu("d", "n1", "new")}


class TestHealth:
    def test_is_never_a_reason_to_end_pods(self) -> None:
        for state in ("ready", "cordoned", "unhealthy"):
            for health in ("fine", "report", "cordon", "drain", "lose"):
                assert device(state=state, health=health).effect != "NoExecute"

    def test_a_cordon_for_kubernetes_is_no_fault(self) -> None:
        ours = device(state="cordoned", cordon_reason="Kubernetes: the node is drained")
        assert ours.effect is None
        assert device(state="cordoned", cordon_reason="a new fan").effect == "NoSchedule"
        assert device(state="unhealthy", cordon_reason="Kubernetes: the node is drained").effect == "NoSchedule"

    def test_the_condition_is_written_when_it_changes_and_each_minute(self) -> None:
        health = Health([device()])
        first = decide.condition(health, {}, 1000.0)
        assert first is not None
        assert (first["status"], first["reason"]) == ("True", "DevicesReady")
        assert decide.condition(health, first, 1059.0) is None
        beat = decide.condition(health, first, 1061.0)
        assert beat is not None
        assert beat["lastTransitionTime"] == first["lastTransitionTime"]
        gone = decide.condition(Health(unreachable="no xmigd answers\x1b[2J"), first, 1001.0)
        assert gone is not None
        assert gone["message"] == "no xmigd answers\\x1b[2J"
        assert gone["lastTransitionTime"] != first["lastTransitionTime"]

    def test_a_device_that_dra_does_not_have_taints_the_node(self) -> None:
        health = Health([device(state="unhealthy"), device(id="cuda:1", uuid="u1")])
        other = {"key": "other", "effect": "NoExecute"}
        tainted = decide.node_taints(health, {}, [other])
        assert tainted == [other, {"key": decide.TAINT, "value": "devices", "effect": "NoSchedule"}]
        assert decide.node_taints(health, {}, tainted) is None
        assert decide.node_taints(health, {"u0": GPU}, tainted) == [other]
        assert decide.node_taints(Health(unreachable="gone"), {"u0": GPU}, []) is not None


class TestCordons:
    def test_of_a_rule_for_one_device(self) -> None:
        def cordons(effect: str, *, ours: bool = False, selects: Gpu | None = GPU, **fields: str) -> Any:
            rule = Rule("r", selects, "k", "", effect, ours)
            return decide.cordons([device(**fields)], {"u0": GPU}, [rule], None)

        assert cordons("NoSchedule") == {"cuda:0": Cordon("Kubernetes: taint k of r", None)}
        assert cordons("NoExecute") == {"cuda:0": Cordon("Kubernetes: taint k of r", 60.0)}
        assert cordons("None") == cordons("NoSchedule", ours=True) == cordons("NoSchedule", selects=None) == {}
        assert cordons("NoSchedule", cordon_reason="a new fan") == {}

    def test_only_ours_are_taken_back(self) -> None:
        ours = device(cordon_reason="Kubernetes: the node is drained")
        assert decide.cordons([ours, device(id="cuda:1", cordon_reason="a new fan")], {}, [], None) == {"cuda:0": None}
        assert decide.cordons([ours], {}, [], 600.0) == {}


class TestJobs:
    POD = Pod("default", "p", UID, "Job/train", False, False)

    def job(self, pod: Pod | None = None, **fields: Any) -> Job:
        found: dict[str, Any] = {
            "id": "j",
            "pod": pod,
            "state": "running",
            "external_id": None,
            "labels": {},
            "restored": False,
        }
        return Job(**(found | fields))

    def test_a_pods_job_gets_its_name(self) -> None:
        change = decide.identity(self.job(self.POD))
        assert change == {"external_id": f"k8s:default/p/{UID}", "labels": self.POD.labels}
        assert decide.identity(self.job(self.POD, external_id=change["external_id"], labels=change["labels"])) is None
        assert decide.identity(self.job(self.POD, external_id="k8s:other", labels=change["labels"])) == change

    def test_a_claim_is_removed(self) -> None:
        forged = self.job(external_id=f"k8s:default/p/{UID}", labels={"k8s/pod": "p", "a": "b"})
        assert decide.identity(forged) == {"external_id": None, "labels": {"k8s/pod": None}}
        assert decide.identity(self.job(external_id="slurm:1", labels={"a": "b"})) is None

    def test_only_what_was_suspended_for_a_pod_is_resumed(self) -> None:
        suspended = self.job(self.POD, state="suspended")
        assert decide.suspension(suspended) is None
        ours = {decide.SUSPENDED: "true"}
        assert decide.suspension(self.job(self.POD, state="suspended", labels=ours)) == "resume"
        assert decide.suspension(self.job(self.POD, labels=ours)) == "forget"
        assert decide.suspension(self.job(self.POD)) is None
