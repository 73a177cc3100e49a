"""What Kubernetes 1.37 knows: its kinds of objects with their fields, and the requests that each takes.

Recorded from its OpenAPI document in the package lightkube-models (MIT), whose classes check types. Fields that a class
does not have are found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from lightkube.resources import (
    admissionregistration_v1,
    apps_v1,
    core_v1,
    rbac_authorization_v1,
    resource_v1,
)

CLASSES: tuple[Any, ...] = (
    core_v1.Event, core_v1.Namespace, core_v1.Node, core_v1.Pod, core_v1.ServiceAccount, apps_v1.DaemonSet,
    rbac_authorization_v1.ClusterRole, rbac_authorization_v1.ClusterRoleBinding, resource_v1.DeviceTaintRule,
    resource_v1.ResourceSlice, admissionregistration_v1.MutatingAdmissionPolicy,
    admissionregistration_v1.MutatingAdmissionPolicyBinding, admissionregistration_v1.ValidatingAdmissionPolicy,
    admissionregistration_v1.ValidatingAdmissionPolicyBinding,
)  # fmt: skip
KINDS = {
    (api.resource.group, api.resource.version, api.resource.kind): each for each in CLASSES if (api := each._api_info)
}
PLURALS = {(api.resource.group, api.resource.version, api.plural): each for each in CLASSES if (api := each._api_info)}


def check(found: Mapping[str, Any]) -> None:
    """Raises ValueError: it is no object of Kubernetes."""
    group, _, version = found.get("apiVersion", "").rpartition("/")
    kind = KINDS.get((group, version, found.get("kind", "")))
    if kind is None:
        raise ValueError(f"there is no {found.get('apiVersion')} {found.get('kind')}")
    try:
        known = kind.from_dict(found).to_dict()
    except msgspec.ValidationError as error:
        raise ValueError(f"{found['kind']}: {error}") from None
    _check_fields(found, known, found["kind"])


def _check_fields(found: Any, known: Any, path: str) -> None:
    if isinstance(found, dict) and isinstance(known, dict):
        for key, value in found.items():
            if value not in (None, {}, []) and key not in known:
                raise ValueError(f"{path} has no field {key}")
            if key in known:
                _check_fields(value, known[key], f"{path}.{key}")
    elif isinstance(found, list) and isinstance(known, list):
        for one, other in zip(found, known, strict=True):
            _check_fields(one, other, f"{path}[]")
