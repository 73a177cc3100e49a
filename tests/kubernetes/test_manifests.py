"""The manifests are what Kubernetes 1.37 knows, and allow what the adapter does, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes import contract
from tests.kubernetes.cluster import manifests, role
from xmigd.place import SYSTEM_RUNTIME_DIR
from xmigd.settings import Settings


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}/{each['metadata']['name']}")
def test_kubernetes_knows_it(manifest: dict[str, Any]) -> None:
    contract.check(manifest)


def test_what_is_wrong_is_found() -> None:
    (found,) = (each for each in manifests() if each["kind"] == "DaemonSet")
    found["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(ValueError, match="has no field hostPid"):
        contract.check(found)


def test_the_role_is_for_what_the_adapter_does() -> None:
    """Nothing is read or written but this; no secrets, no pods are changed, nothing is deleted but its own taints."""
    granted = {(verb, each) for rule in role() for each in rule["resources"] for verb in rule["verbs"]}
    assert granted == {
        ("get", "nodes"), ("list", "nodes"), ("watch", "nodes"), ("patch", "nodes"), ("patch", "nodes/status"),
        ("list", "pods"), ("watch", "pods"), ("create", "events"),
        ("list", "resourceslices"), ("watch", "resourceslices"),
        ("list", "devicetaintrules"), ("watch", "devicetaintrules"), ("create", "devicetaintrules"),
        ("patch", "devicetaintrules"), ("delete", "devicetaintrules"),
    }  # fmt: skip


def test_pods_mount_the_folder_of_the_adapter() -> None:
    text = str(next(each for each in manifests() if each["kind"] == "MutatingAdmissionPolicy"))
    assert f"{SYSTEM_RUNTIME_DIR}-pods/client.sock" in text
    assert f"{SYSTEM_RUNTIME_DIR}/{Settings().names_folder.name}" in text
    assert "api.sock" not in text
