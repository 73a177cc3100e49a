"""A real xmigd, the adapter, and an API server: health, pods, evictions, drains."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.harness import ROOT, needs_root
from tests.kubernetes.cluster import NODE, TAINT, Adapter, Cluster
from tests.migration.moves import succeeded
from xmigd.demo.node import Node, Program

OTHER = {"key": "example.com/busy", "value": "yes", "effect": "NoSchedule"}


def cordon(xmig: Node, device: str, cordoned: bool, reason: str = "a new fan") -> None:
    xmig.client.patch(f"/v1/devices/{device}", {"cordoned": cordoned, "reason": reason}, "*")


def device(xmig: Node, name: str) -> dict[str, Any]:
    return dict(next(each for each in xmig.client.get("/v1/devices") if each["id"] == name))


@pytest.fixture(autouse=True)
def as_before(xmig: Node, cluster: Cluster, adapter: Adapter) -> Iterator[None]:
    adapter.until(lambda: cluster.condition() == "True DevicesReady", "all devices are ready")
    yield
    for each in ("cpu:0", "cpu:1"):
        cordon(xmig, each, False)


def test_a_device_that_is_cordoned(xmig: Node, cluster: Cluster, adapter: Adapter) -> None:
    """Without DRA the node is tainted. Taints of others stay."""
    cluster.change_taints(OTHER)
    cordon(xmig, "cpu:1", True)
    adapter.until(lambda: cluster.condition() == "False DevicesNotReady", "the condition")
    adapter.until(lambda: cluster.taints() == {OTHER["key"]: "NoSchedule", TAINT: "NoSchedule"}, "the taint")
    message = next(each for each in cluster.node()["status"]["conditions"] if each["type"] == "XmigReady")["message"]
    assert message == "cpu:1 is cordoned: a new fan"
    cordon(xmig, "cpu:1", False)
    adapter.until(lambda: cluster.taints() == {OTHER["key"]: "NoSchedule"}, "only that of others")
    adapter.until(lambda: cluster.condition() == "True DevicesReady", "the condition is back")
    cluster.change_taints()


def program(xmig: Node, native_dir: Path, output: Path, **options: Any) -> Program:
    started = start(xmig, native_dir, output, 0.02, **options)
    wait_for_lines(output, STEPS // 4)
    return started


def ends(running: Program, output: Path) -> None:
    let_end(output)
    assert running.finish()[0] == 0


def of(xmig: Node, job: str) -> dict[str, Any]:
    return dict(xmig.client.get(f"/v1/jobs/{job}"))


def test_a_pod_is_a_job(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """What the kernel says counts. What a job, or a pod's annotation, says of itself does not."""
    pod, idle = cluster.pod("p1"), cluster.pod("p2", job="of p1, says p2")
    mine, forged = program(xmig, native_dir, tmp_path / "a"), program(xmig, native_dir, tmp_path / "b")
    claims = {"external_id": f"k8s:default/p1/{pod['metadata']['uid']}", "labels": {"k8s/pod": "p1", "team": "b"}}
    xmig.client.patch(f"/v1/jobs/{forged.job}", claims, "*")
    uid = pod["metadata"]["uid"].replace("-", "_")
    cluster.put(forged.process.pid, f"/user.slice/user-1000.slice/kubepods.slice/kubepods-pod{uid}.slice")
    cluster.put(mine.process.pid, pod)
    adapter.until(lambda: of(xmig, mine.job)["external_id"] == claims["external_id"], "it is the pod's")
    owner = pod["metadata"]["ownerReferences"][0]["uid"]
    assert of(xmig, mine.job)["labels"] == {
        "k8s/namespace": "default", "k8s/pod": "p1", "k8s/owner": "Job/train", "k8s/origin": f"default/{owner}//",
    }  # fmt: skip
    adapter.until(lambda: of(xmig, forged.job)["external_id"] is None, "the claim is removed")
    assert of(xmig, forged.job)["labels"] == {"team": "b"}
    # In a group below that of another pod, and in a pod that does not want it.
    cluster.put(forged.process.pid, f"/kubepods/pod{idle['metadata']['uid']}/x/kubepods/pod{pod['metadata']['uid']}")
    cluster.annotate("p1", suspend="true")
    adapter.until(lambda: of(xmig, mine.job)["state"] == "suspended", "it is suspended")
    assert (of(xmig, forged.job)["state"], of(xmig, forged.job)["external_id"]) == ("running", None)
    cluster.annotate("p1", suspend=None)
    adapter.until(lambda: of(xmig, mine.job)["state"] == "running", "it is resumed")
    adapter.until(lambda: "k8s/suspended" not in of(xmig, mine.job)["labels"], "and nothing is left of that")
    succeeded(xmig, xmig.client.post(f"/v1/jobs/{mine.job}:preempt", {"prefer": "suspend"}))
    cordon(xmig, "cpu:1", True)
    adapter.until(lambda: cluster.condition() == "False DevicesNotReady", "the adapter looks")
    cordon(xmig, "cpu:1", False)
    adapter.until(lambda: cluster.condition() == "True DevicesReady", "and has looked at the pods before")
    assert of(xmig, mine.job)["state"] == "suspended"  # that is another's affair, and stays so
    succeeded(xmig, xmig.client.post(f"/v1/jobs/{mine.job}:continue", {}))
    ends(mine, tmp_path / "a")
    ends(forged, tmp_path / "b")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    cluster.end("p1")
    cluster.end("p2")


@pytest.mark.criu
def test_a_pod_is_evicted(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """A checkpoint within its grace, from which the job goes on to the same end."""
    criu_or_skip()
    whole, steps = tmp_path / "whole", tmp_path / "steps"
    undisturbed = program(xmig, native_dir, whole)
    pod = cluster.pod("p3", on_eviction="checkpoint")
    running = program(xmig, native_dir, steps)
    cluster.put(running.process.pid, pod)
    adapter.until(lambda: of(xmig, running.job)["external_id"] is not None, "it is the pod's")
    # A preemption just before, which has left nothing behind, is not the one of the eviction.
    for request, body in (("preempt", {"prefer": "suspend"}), ("continue", {})):
        succeeded(xmig, xmig.client.start(f"/v1/jobs/{running.job}:{request}", body))
    cluster.delete("/api/v1/namespaces/default/pods/p3")
    adapter.until(lambda: running.process.poll() is not None, "the program has ended with its checkpoint")
    cluster.end("p3")
    (made,) = xmig.client.get("/v1/checkpoints", job=running.job)
    operation = xmig.client.start(f"/v1/jobs/{running.job}:continue", {})
    operation = xmig.client.get(f"/v1/operations/{operation['id']}/wait", timeout=60)
    assert operation["state"] == "succeeded", operation
    let_end(steps)
    ends(undisturbed, whole)
    adapter.until(lambda: not of(xmig, operation["result"]["job"])["processes"], "what was restored has ended")
    assert steps.read_text() == whole.read_text()
    xmig.client.delete(f"/v1/checkpoints/{made['id']}")


def test_no_checkpoint_can_be_made(
    xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path
) -> None:
    """The pod's events say why, once, and the program goes on until Kubernetes ends it."""
    pod = cluster.pod("p4", on_eviction="checkpoint")
    output = tmp_path / "steps"
    with output.with_suffix(".held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # an obstacle: a lock of a file that is another process's, too
        running = program(xmig, native_dir, output, pass_fds=(held.fileno(),))
        cluster.put(running.process.pid, pod)
        adapter.until(lambda: of(xmig, running.job)["external_id"] is not None, "it is the pod's")
        cluster.delete("/api/v1/namespaces/default/pods/p4")
        adapter.until(lambda: bool(cluster.events("p4")), "an event says why")
    (event,) = cluster.events("p4")
    assert event.startswith("xMIG made no checkpoint: the job cannot be preempted, and the job goes on running: ")
    ends(running, output)
    cluster.end("p4")


def test_a_node_is_drained(xmig: Node, cluster: Cluster, adapter: Adapter) -> None:
    path = f"/api/v1/nodes/{NODE}"
    cluster.patch(path, {"spec": {"unschedulable": True}, "metadata": {"annotations": {"xmig.io/drain": "30"}}})
    for each in ("cpu:0", "cpu:1"):
        adapter.until(lambda each=each: device(xmig, each)["cordoned"], "its devices take no programs")  # type: ignore[misc]
    assert device(xmig, "cpu:0")["cordon_reason"] == "Kubernetes: the node is drained"
    assert cluster.condition() == "True DevicesReady"
    cluster.patch(path, {"spec": {"unschedulable": None}, "metadata": {"annotations": {"xmig.io/drain": None}}})
    for each in ("cpu:0", "cpu:1"):
        adapter.until(lambda each=each: not device(xmig, each)["cordoned"], "they do again")  # type: ignore[misc]


def test_devices_are_tainted(xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path) -> None:
    """With DRA the device is, and not the node. What others taint is cordoned."""
    running = program(xmig, native_dir, tmp_path / "steps", device="cpu:0")  # from now on its UUID is known
    ends(running, tmp_path / "steps")
    adapter.until(lambda: device(xmig, "cpu:0")["uuid"] is not None, "its UUID is known")
    cluster.post("/apis/resource.k8s.io/v1/resourceslices", {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "n1-gpu"},
        "spec": {
            "driver": "gpu.example.com", "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": f"GPU-{device(xmig, 'cpu:0')['uuid']}"}}}],
        },
    })  # fmt: skip
    reported = {"code": "fan", "text": "it is loud", "rung": "report"}
    xmig.client.post("/v1/devices/cpu:0/findings", reported)
    adapter.until(lambda: cluster.device_taints() == {"gpu-0": "None"}, "a taint that only informs")
    adapter.until(lambda: cluster.condition() == "True DevicesDegraded", "the condition")
    cordon(xmig, "cpu:0", True)
    adapter.until(lambda: cluster.device_taints() == {"gpu-0": "NoSchedule"}, "a taint")
    assert cluster.taints() == {}
    cordon(xmig, "cpu:0", False)  # closes what was reported
    adapter.until(lambda: cluster.device_taints() == {}, "no taint")
    version = cluster.rules.split("/")[3]
    cluster.post(cluster.rules, {
        "apiVersion": f"resource.k8s.io/{version}", "kind": "DeviceTaintRule", "metadata": {"name": "maintenance"},
        "spec": {
            "deviceSelector": {"driver": "gpu.example.com", "pool": NODE, "device": "gpu-0"},
            "taint": {"key": "example.com/maintenance", "effect": "NoSchedule"},
        },
    })  # fmt: skip
    adapter.until(lambda: device(xmig, "cpu:0")["cordoned"], "xMIG does not use it, either")
    assert device(xmig, "cpu:0")["cordon_reason"] == "Kubernetes: taint example.com/maintenance of maintenance"
    cluster.delete(f"{cluster.rules}/maintenance")
    adapter.until(lambda: not device(xmig, "cpu:0")["cordoned"], "xMIG uses it again")
    cluster.delete("/apis/resource.k8s.io/v1/resourceslices/n1-gpu")


@needs_root
def test_a_program_in_namespaces(
    xmig: Node, native_dir: Path, cluster: Cluster, adapter: Adapter, tmp_path: Path
) -> None:
    """As in a container: its own pids, mounts and network, and no more of xMIG than pods mount. It has no job when it
    begins."""
    pod = cluster.pod("p5")
    library, output = xmig.folder / "lib", tmp_path / "steps"
    adapter.until(lambda: (xmig.folder / "pods" / "client.sock").exists(), "its socket is there")
    made = xmig.client.post("/v1/jobs", {"name": "for its variables"})
    mounts = xmig.folder.with_name(f"{xmig.folder.name}-pod")
    script = f"""
        mount -t tmpfs none {mounts} && mkdir {mounts}/pods {mounts}/lib
        mount --bind {xmig.folder}/pods {mounts}/pods && mount --bind {library} {mounts}/lib
        mount --rbind {mounts} {xmig.folder} && ls {xmig.folder} > {output}.sees
        exec env LD_PRELOAD={made["preload"]} "$@"
    """
    environment = {
        "PATH": os.environ["PATH"], "XMIG_SOCKET": str(xmig.folder / "pods" / "client.sock"),
        "LD_LIBRARY_PATH": str(library), "KERNELS": str(native_dir / "xmig_kernels.so"),
    }  # fmt: skip
    mounts.mkdir()
    with output.with_suffix(".err").open("wb") as errors:
        running = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc", "sh", "-ec", script,
             "sh", sys.executable, ROOT / "tests" / "criu" / "client.py", output, str(STEPS), "0.02"],
            env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
        )  # fmt: skip
    try:
        wait_for_lines(output, STEPS // 4)
        assert Path(f"{output}.sees").read_text().split() == ["lib", "pods"]
        (process,) = xmig.client.get("/v1/processes", live=True)
        cluster.put(process["pid"], pod)
        uid = pod["metadata"]["uid"]
        adapter.until(lambda: of(xmig, process["job_id"])["external_id"] == f"k8s:default/p5/{uid}", "it is the pod's")
        cluster.annotate("p5", suspend="true")
        adapter.until(lambda: of(xmig, process["job_id"])["state"] == "suspended", "it is suspended")
        cluster.annotate("p5", suspend=None)
        let_end(output)
        assert running.wait(60) == 0, output.with_suffix(".err").read_text()
        assert len(output.read_text().splitlines()) == STEPS
    finally:
        running.kill()
        running.wait()
        mounts.rmdir()
    cluster.end("p5")


def test_programs_have_a_socket_of_their_own(xmig: Node, adapter: Adapter) -> None:
    """Also after the daemon was restarted; it is all that pods see."""
    folder = xmig.folder / "pods"
    own = xmig.folder / "client.sock"
    adapter.until(lambda: (folder / "client.sock").exists(), "it is there")
    xmig.stop()
    xmig.start()
    adapter.until(lambda: (folder / "client.sock").samefile(own), "it is the new daemon's")
    assert sorted(each.name for each in folder.iterdir()) == ["client.sock", "continue.sock"]
