"""A real API server with etcd, for whoever has the programs: KUBE_APISERVER and ETCD name them. The same tests run
against it, with the manifests as they are: roles, admission policies, and a token that names the adapter's node."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.harness import wait_until
from tests.kubernetes.cluster import NODE, Cluster, Json, manifests
from tests.ports import free_port

ADMIN = "admin-token"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/xmig-system/serviceaccounts",
    "DaemonSet": "/apis/apps/v1/namespaces/xmig-system/daemonsets",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "MutatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings",
}
OPTIONS = (
    "--bind-address=127.0.0.1", "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
    "--service-cluster-ip-range=10.0.0.0/24",
    "--disable-admission-plugins=ServiceAccount,Priority,TaintNodesByCondition",
    "--feature-gates=DRADeviceTaints=true,DRADeviceTaintRules=true", "--runtime-config=resource.k8s.io/v1beta2=true",
    "--allow-privileged=true", "--watch-cache=false",  # etcd 3.4 does not say how far a watch is
)  # fmt: skip


@contextlib.contextmanager
def _running(folder: Path, program: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{program.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
            env=os.environ | {"ETCD_UNSUPPORTED_ARCH": ""},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def real(apiserver: Path, etcd: Path, folder: Path) -> Iterator[Cluster]:
    store, peers, port = free_port(), free_port(), free_port()
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
    url = f"https://127.0.0.1:{port}"
    with (
        _running(
            folder, etcd, f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}", f"--listen-peer-urls=http://127.0.0.1:{peers}",
        ),
        _running(
            folder, apiserver, f"--etcd-servers=http://127.0.0.1:{store}", f"--secure-port={port}",
            f"--cert-dir={folder}/certs", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", f"--token-auth-file={folder}/tokens.csv", *OPTIONS,
        ) as process,
    ):  # fmt: skip

        def ready() -> bool:
            assert process.poll() is None, (folder / f"{apiserver.name}.log").read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/readyz", verify=False, trust_env=False, timeout=5).status_code == 200
            return False

        wait_until(ready, "the API server is ready", timeout=300)
        ca = folder / "certs" / "apiserver.crt"
        with Cluster(url, ADMIN, "", folder, ca=ca, version=_version(url)) as cluster:
            for each in manifests():
                cluster.post(PATHS[each["kind"]], each)
            cluster.token.write_text(_token(cluster))
            yield cluster


def _version(url: str) -> str:
    """Of DeviceTaintRules."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    found = httpx.get(f"{url}/apis/resource.k8s.io/v1", headers=headers, verify=False, trust_env=False).json()
    return "v1" if any(each["name"] == "devicetaintrules" for each in found["resources"]) else "v1beta2"


def _token(cluster: Cluster) -> str:
    """As the kubelet gets it for the adapter's pod: it names the node."""
    pod: Json = cluster.post("/api/v1/namespaces/xmig-system/pods", {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "xmig-kubernetes", "namespace": "xmig-system"},
        "spec": {
            "nodeName": NODE, "serviceAccountName": "xmig-kubernetes",
            "containers": [{"name": "main", "image": "xmig:1"}],
        },
    })  # fmt: skip
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    answer = cluster.post("/api/v1/namespaces/xmig-system/serviceaccounts/xmig-kubernetes/token", {
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound},
    })  # fmt: skip
    return str(answer["status"]["token"])
