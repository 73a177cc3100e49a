"""Taints of devices: DeviceTaintRules of dynamic resource allocation (DRA), where the API server has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xmigd import log
from xmigd.kubernetes import decide, view
from xmigd.kubernetes.api import Api, Changed, NotThere
from xmigd.kubernetes.decide import Health
from xmigd.kubernetes.view import Gpu, Rule
from xmigd.kubernetes.watched import Watched

logger = log.get("kubernetes")

GROUP = "/apis/resource.k8s.io"
VERSIONS = ("v1", "v1beta2")  # with DeviceTaintRules: from Kubernetes 1.37, from 1.36


class Rules:
    def __init__(self, api: Api, node: str, changed: Callable[[], None]) -> None:
        self._api = api
        self._node = node
        self._changed = changed
        self._slices = Watched(
            api, f"{GROUP}/v1/resourceslices", changed, fieldSelector=f"spec.nodeName={node}"
        )  # fmt: skip
        self._rules: Watched | None = None
        self._version = ""

    def start(self) -> None:
        self._slices.start()

    @property
    def possible(self) -> bool:
        """Does the API server have them?"""
        return self._rules is not None

    @property
    def known(self) -> Mapping[str, Gpu] | None:
        """This node's devices by their UUIDs. None: they are not known yet."""
        slices = self._slices.objects
        return None if slices is None else view.gpus(slices)

    @property
    def all(self) -> list[Rule] | None:
        """Of all nodes. None: they are not known yet."""
        if self._rules is None:
            return []
        objects = self._rules.objects
        return None if objects is None else [view.rule(each) for each in objects]

    def write(self, health: Health) -> None:
        """Those of this node, as its devices are. Raises ApiError. While xmigd does not answer they stay."""
        known = self.known
        if known is None or health.unreachable or (not known and self._rules is None):
            return
        self._find()
        if self._rules is None or (objects := self._rules.objects) is None:
            return
        now = {
            each["metadata"]["name"]: each
            for each in objects
            if (each["metadata"].get("annotations") or {}).get("xmig.io/node") == self._node and view.rule(each).ours
        }
        wanted = decide.device_rules(self._node, health, known)
        path = f"{GROUP}/{self._version}/devicetaintrules"
        for name, rule in wanted.items():
            before = now.get(name)
            if before is None:
                self._make(path, rule)
            elif view.rule(before) != view.rule(rule):
                self._api.patch(f"{path}/{name}", {"spec": rule["spec"]})
        for name in now.keys() - wanted.keys():
            self._api.delete(f"{path}/{name}")
            logger.info("a device is not tainted any more", rule=name)

    def _make(self, path: str, rule: dict[str, object]) -> None:
        try:
            self._api.post(path, {"apiVersion": f"resource.k8s.io/{self._version}", "kind": "DeviceTaintRule"} | rule)
        except Changed:  # it is there, and not seen yet
            return
        logger.info("a device is tainted", rule=rule["spec"])

    def _find(self) -> None:
        """Which version the API server has; looked for until it has one."""
        if self._rules is not None:
            return
        for version in VERSIONS:
            try:
                resources = self._api.get(f"{GROUP}/{version}").get("resources") or []
            except NotThere:
                continue
            if any(each.get("name") == "devicetaintrules" for each in resources):
                self._version = version
                self._rules = Watched(self._api, f"{GROUP}/{version}/devicetaintrules", self._changed)
                self._rules.start()
                return
