"""The policies of the manifests, in a real API server: skipped where there is none (real.py)."""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx
import pytest

from tests.harness import wait_until
from tests.kubernetes.cluster import NODE, Cluster, Json

pytestmark = pytest.mark.skipif("KUBE_APISERVER" not in os.environ, reason="KUBE_APISERVER names no real API server")


@pytest.fixture(scope="module")
def as_adapter(cluster: Cluster) -> Callable[[str, str, Json], httpx.Response]:
    """A patch with the adapter's token."""
    cluster.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}})

    def patch(path: str, kind: str, body: Json) -> httpx.Response:
        headers = {"Authorization": f"Bearer {cluster.token.read_text()}", "Content-Type": f"application/{kind}+json"}
        return cluster.client.patch(path, json=body, headers=headers)

    def other_node_is_refused() -> bool:  # a policy counts a moment after it was made
        return patch("/api/v1/nodes/n2", "merge-patch", {"spec": {"taints": []}}).status_code == 422

    wait_until(other_node_is_refused, "the policies are known")
    return patch


@pytest.mark.parametrize(
    ("path", "change", "why"),
    [
        ("/api/v1/nodes/n2/status", {"status": {"phase": "Running"}}, "its own node only"),
        (f"/api/v1/nodes/{NODE}", {"spec": {"unschedulable": True}}, "a taint and a condition only"),
        (f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"a": "b"}}}, "a taint and a condition only"),
        (
            f"/api/v1/nodes/{NODE}",
            {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
            "xmig.io/not-ready only",
        ),
    ],
)
def test_an_adapter_changes_little(
    as_adapter: Callable[[str, str, Json], httpx.Response], path: str, change: Json, why: str
) -> None:
    answer = as_adapter(path, "merge-patch", change)
    assert answer.status_code == 422, answer.text
    assert why in answer.text


def test_an_adapter_reads_no_secrets(cluster: Cluster) -> None:
    headers = {"Authorization": f"Bearer {cluster.token.read_text()}"}
    for path in ("/api/v1/secrets", "/api/v1/namespaces/default/configmaps"):
        assert cluster.client.get(path, headers=headers).status_code == 403


def test_pods_get_what_they_need(cluster: Cluster) -> None:
    """Volumes, mounts and variables; what the pod has itself stays."""

    def mutated() -> bool:
        pod = cluster.pod("mutated")
        cluster.end("mutated")
        return bool(pod["spec"].get("volumes"))

    wait_until(mutated, "the policies are known")
    spec = cluster.pod("mutated")["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["python", "train.py"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["XMIG_SOCKET"] == "/run/xmig-pods/client.sock"
    assert {each["hostPath"]["path"] for each in spec["volumes"]} == {
        "/run/xmig-pods", "/run/xmig/lib", "/usr/lib64/xmig/xmigd/native",
    }  # fmt: skip
    assert all(each["readOnly"] for each in container["volumeMounts"])
    assert "volumes" not in cluster.pod("plain", job="false")["spec"]


@pytest.mark.parametrize(
    "change",
    [
        {"securityContext": {}},
        {"securityContext": {"runAsNonRoot": False}},
        {"containers": [{"name": "main", "image": "a", "securityContext": {"runAsUser": 0}}]},
        {"initContainers": [{"name": "first", "image": "a", "securityContext": {"runAsNonRoot": False}}]},
    ],
)
def test_pods_are_not_root(cluster: Cluster, change: Json) -> None:
    body = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root", "annotations": {"xmig.io/job": "true"}},
        "spec": {"securityContext": {"runAsNonRoot": True}, "containers": [{"name": "main", "image": "a"}]} | change,
    }  # fmt: skip

    def refused() -> bool:
        answer = cluster.client.post("/api/v1/namespaces/default/pods", json=body)
        if answer.is_success:
            cluster.end("root")
        return answer.status_code == 422 and "root" in answer.text.lower()

    wait_until(refused, "it is refused")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> str:
    labels = {"xmig.io/jobs": "true", "pod-security.kubernetes.io/enforce": "privileged"}
    cluster.post("/api/v1/namespaces", {
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "train", "labels": labels}
    })  # fmt: skip
    return "/api/v1/namespaces/train/pods"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"volumes": [{"name": "a", "hostPath": {"path": "/run/xmig"}}]}, "no folders of the node"),
        ({"hostPID": True}, "namespaces of their own"),
        ({"containers": [{"name": "a", "image": "a", "securityContext": {"privileged": True}}]}, "not privileged"),
        (
            {"containers": [{"name": "a", "image": "a", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
            "not privileged",
        ),
    ],
)
def test_users_of_a_namespace_get_no_more(cluster: Cluster, namespace: str, change: Json, why: str) -> None:
    """With and without the annotation. Without what is refused, the pod is made."""
    spec = {"securityContext": {"runAsNonRoot": True}, "containers": [{"name": "a", "image": "a"}]}
    for annotation in ("false", "true"):
        metadata = {"name": "p", "annotations": {"xmig.io/job": annotation}}
        body: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec | change}
        wait_until(lambda body=body: why in refusal(cluster, namespace, body), why)  # type: ignore[misc]
        assert refusal(cluster, namespace, body | {"spec": spec}) == ""


def refusal(cluster: Cluster, path: str, body: Json) -> str:
    answer = cluster.client.post(path, json=body, params={"dryRun": "All"})
    return "" if answer.is_success else answer.text
