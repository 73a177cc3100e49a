"""A cluster of one node without a kubelet: an API server, the adapter, and pods that a test puts programs into.

The API server is the stand-in, or a real one of whoever has one: KUBE_APISERVER and ETCD name the programs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.harness import ROOT, wait_until
from tests.kubernetes.standin import Standin
from xmigd.demo.node import Node

MANIFESTS = ROOT / "packaging" / "kubernetes"
NODE = "n1"
TAINT = "xmig.io/not-ready"
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": True}
Json = dict[str, Any]


def manifests() -> list[Json]:
    return [each for each in yaml.safe_load_all((MANIFESTS / "xmig.yaml").read_text()) if each]


def role() -> list[Json]:
    (found,) = (each for each in manifests() if each["kind"] == "ClusterRole")
    return list(found["rules"])


class Cluster:
    """`token`: of the adapter. `rules`: where DeviceTaintRules are."""

    def __init__(
        self, url: str, admin: str, token: str, folder: Path, *, ca: Path | None = None, standin: Standin | None = None,
        version: str = "v1",
    ) -> None:  # fmt: skip
        self.url = url
        self.folder = folder
        self.ca = ca
        self.standin = standin
        self.rules = f"/apis/resource.k8s.io/{version}/devicetaintrules"
        self.token = folder / "token"
        self.token.write_text(token)
        self.proc = folder / "proc"
        self.proc.mkdir(exist_ok=True)
        self.groups = folder / "groups"
        self.client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {admin}"}, verify=not ca, trust_env=False,
            timeout=60,
        )  # fmt: skip

    def __enter__(self) -> Cluster:
        self.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    # --- the API server -----------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Json | None = None, kind: str = "json", **params: object) -> Json:
        headers = {"Content-Type": f"application/{kind}"} if body is not None else {}
        content = None if body is None else json.dumps(body)
        answer = self.client.request(
            method, path, content=content, headers=headers, params={k: str(v) for k, v in params.items()}
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
        found: Json = answer.json()
        return found

    def get(self, path: str) -> Json:
        return self.request("GET", path)

    def post(self, path: str, body: Json) -> Json:
        return self.request("POST", path, body)

    def patch(self, path: str, body: Json) -> Json:
        return self.request("PATCH", path, body, "merge-patch+json")

    def delete(self, path: str, **params: object) -> Json:
        return self.request("DELETE", path, None, "json", **params)

    # --- the node -----------------------------------------------------------------------------------------------------

    def node(self) -> Json:
        return self.get(f"/api/v1/nodes/{NODE}")

    def condition(self) -> str:
        """Status and reason of the node's."""
        conditions = self.node().get("status", {}).get("conditions", [])
        return next((f"{each['status']} {each['reason']}" for each in conditions if each["type"] == "XmigReady"), "")

    def taints(self) -> dict[str, str]:
        """Their effects by their keys, without those of a node that has no kubelet."""
        found = self.node().get("spec", {}).get("taints", [])
        return {each["key"]: each["effect"] for each in found if not each["key"].startswith("node.kubernetes.io/")}

    def change_taints(self, *taints: Json) -> None:
        """Those of others are these."""
        while True:
            node = self.node()
            ours = [each for each in node.get("spec", {}).get("taints", []) if each["key"] == TAINT]
            body = {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
                    "spec": {"taints": [*ours, *taints]}}  # fmt: skip
            with contextlib.suppress(AssertionError):
                self.patch(f"/api/v1/nodes/{NODE}", body)
                return

    def device_taints(self) -> dict[str, str]:
        """Effects of our rules by what they select."""
        items = self.get(self.rules)["items"]
        ours = (each for each in items if each["metadata"]["name"].startswith("xmig-"))
        return {each["spec"]["deviceSelector"]["device"]: each["spec"]["taint"]["effect"] for each in ours}

    # --- pods ---------------------------------------------------------------------------------------------------------

    def pod(self, name: str, *, grace: int = 120, owner: str = "", place: str = "", **annotations: str) -> Json:
        """On this node, under xMIG. `owner`: uid of its controller. `place`: among the pods of that. `annotations`:
        without xmig.io/, with _ for -."""
        found = {f"xmig.io/{key.replace('_', '-')}": value for key, value in ({"job": "true"} | annotations).items()}
        return self.post("/api/v1/namespaces/default/pods", {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": "default", "annotations": found,
                "labels": {"batch.kubernetes.io/job-completion-index": place} if place else {},
                "ownerReferences": [OWNER | {"uid": owner or str(uuid.uuid4())}],
            },
            "spec": {
                "nodeName": NODE, "terminationGracePeriodSeconds": grace, "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True},
                "containers": [{"name": "main", "image": "train:1", "command": ["python", "train.py"]}],
            },
        })  # fmt: skip

    def put(self, pid: int, pod: Json | str) -> None:
        """A process into the control group of a pod, or into this one."""
        group = pod if isinstance(pod, str) else self.group(pod)
        if not isinstance(pod, str):
            (self.groups / group.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text(f"0::{group}\n")

    @staticmethod
    def group(pod: Json) -> str:
        slice = f"kubepods-burstable-pod{pod['metadata']['uid'].replace('-', '_')}.slice"
        return f"/kubepods.slice/kubepods-burstable.slice/{slice}/cri-containerd-0123.scope"

    def joined(self, pod: Json) -> int | None:
        """The process that was brought into the control group of a pod last. From then on it is in there."""
        try:
            pid = int((self.groups / self.group(pod).lstrip("/") / "cgroup.procs").read_text())
        except (FileNotFoundError, ValueError):
            return None
        self.put(pid, pod)
        return pid

    def annotate(self, pod: str, **annotations: str | None) -> None:
        found = {f"xmig.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.patch(f"/api/v1/namespaces/default/pods/{pod}", {"metadata": {"annotations": found}})

    def end(self, pod: str) -> None:
        """As its kubelet, when its processes have ended."""
        self.delete(f"/api/v1/namespaces/default/pods/{pod}", gracePeriodSeconds=0)

    def events(self, pod: str) -> list[str]:
        items = self.get("/api/v1/namespaces/default/events")["items"]
        return [each["message"] for each in items if each["involvedObject"].get("name") == pod]


class Adapter:
    """xmig-kubernetes beside an xmigd."""

    def __init__(self, cluster: Cluster, xmig: Node, **settings: object) -> None:
        values = {
            "node_name": NODE, "server": cluster.url, "token": cluster.token, "ca": cluster.ca or cluster.token,
            "interval": 0.1, "margin": 0.5, "proc": cluster.proc, "control_groups": cluster.groups,
            "pods_folder": xmig.folder / "pods",
        } | settings  # fmt: skip
        self.log = cluster.folder / "xmig-kubernetes.log"
        self._environment = os.environ | {
            f"XMIG_KUBERNETES_{name.upper()}": str(value) for name, value in values.items()
        }
        self._environment["XMIG_RUNTIME_DIR"] = xmig.environment["XMIG_RUNTIME_DIR"]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Adapter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60) == 0, self.log.read_text()[-3000:]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "xmigd.kubernetes.main"], env=self._environment, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log.read_text()[-3000:]}") from None


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[Cluster]:
    with Standin(role()) as standin, Cluster(standin.url, "admin", "adapter", folder, standin=standin) as cluster:
        yield cluster
