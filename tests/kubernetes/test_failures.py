"""The adapter and the API server fail in every phase; others write at the same time. With the stand-in only: it knows
where a request is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import NODE, TAINT, Adapter, Cluster, stand_in
from tests.kubernetes.standin import Standin
from xmigd.demo.node import Node

OTHER = {"key": "example.com/busy", "value": "yes", "effect": "NoSchedule"}
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
UUID = "0d3c9a52-7c0b-4c39-8d2e-0f5a5d3b6a11"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with stand_in(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


@pytest.fixture
def standin(cluster: Cluster) -> Standin:
    assert cluster.standin is not None
    return cluster.standin


def cordon(xmig: Node, cordoned: bool) -> None:
    xmig.client.patch("/v1/devices/cpu:1", {"cordoned": cordoned, "reason": "a new fan"}, "*")


def ready(cluster: Cluster, adapter: Adapter) -> None:
    adapter.until(lambda: cluster.condition() == "True DevicesReady" and cluster.taints() == {}, "all is well")


def not_ready(cluster: Cluster, adapter: Adapter) -> None:
    adapter.until(
        lambda: cluster.condition() == "False DevicesNotReady" and cluster.taints() == {TAINT: "NoSchedule"},
        "it is not ready",
    )


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("request_", [("PATCH", f"/api/v1/nodes/{NODE}/status"), ("PATCH", f"/api/v1/nodes/{NODE}")])
def test_the_adapter_is_killed(
    xmig: Node, cluster: Cluster, standin: Standin, adapter: Adapter, moment: str, request_: tuple[str, str]
) -> None:
    """At each of its writes, before and after it has its effect: the next one brings it to the same end."""
    ready(cluster, adapter)
    killed: list[tuple[str, ...]] = []

    def kill(*found: str) -> None:
        if found == request_ and not killed:
            adapter.kill()
            killed.append(found)  # from now on the test starts another one

    setattr(standin, moment, kill)
    cordon(xmig, True)
    adapter.until(lambda: bool(killed), "it is killed")
    setattr(standin, moment, None)
    adapter.start()
    not_ready(cluster, adapter)
    cordon(xmig, False)
    ready(cluster, adapter)


def test_somebody_else_is_faster(xmig: Node, cluster: Cluster, standin: Standin, adapter: Adapter) -> None:
    """The node is changed between reading and writing it: both changes are there."""
    ready(cluster, adapter)
    written: list[str] = []

    def write(method: str, path: str) -> None:
        if (method, path) == ("PATCH", f"/api/v1/nodes/{NODE}") and not written:
            written.append(path)
            cluster.change_taints(OTHER)

    standin.before = write
    cordon(xmig, True)
    both = {OTHER["key"]: "NoSchedule", TAINT: "NoSchedule"}
    adapter.until(lambda: bool(written) and cluster.taints() == both, "both taints are there")
    standin.before = None
    cordon(xmig, False)
    adapter.until(lambda: cluster.taints() == {OTHER["key"]: "NoSchedule"}, "that of others stays")
    cluster.change_taints()


@pytest.mark.parametrize("how", ["drop", "forget"])
def test_watches_end(xmig: Node, cluster: Cluster, standin: Standin, adapter: Adapter, how: str) -> None:
    """Their connections are lost, or where they were is forgotten (410): what happened meanwhile is seen."""
    ready(cluster, adapter)
    path, before = f"/api/v1/nodes/{NODE}", standin.watches
    getattr(standin, how)()
    cluster.patch(path, {"spec": {"unschedulable": True}, "metadata": {"annotations": {"xmig.io/drain": "5"}}})
    adapter.until(lambda: all(each["cordoned"] for each in xmig.client.get("/v1/devices")), "the drain is seen")
    cluster.patch(path, {"spec": {"unschedulable": None}, "metadata": {"annotations": None}})
    adapter.until(lambda: not any(each["cordoned"] for each in xmig.client.get("/v1/devices")), "and its end")
    assert standin.watches > before


def test_xmigd_is_gone(xmig: Node, cluster: Cluster, adapter: Adapter) -> None:
    ready(cluster, adapter)
    xmig.stop()
    adapter.until(lambda: cluster.condition() == "False XmigdUnreachable", "the condition says so")
    adapter.until(lambda: cluster.taints() == {TAINT: "NoSchedule"}, "no new pods")
    xmig.start()
    ready(cluster, adapter)


def test_the_api_server_is_gone(xmig: Node, cluster: Cluster, standin: Standin, adapter: Adapter) -> None:
    """While it is, nothing is undone. What has changed is written when it is back."""
    path = f"/api/v1/nodes/{NODE}"
    ready(cluster, adapter)
    cluster.patch(path, {"spec": {"unschedulable": True}, "metadata": {"annotations": {"xmig.io/drain": "5"}}})
    adapter.until(lambda: all(each["cordoned"] for each in xmig.client.get("/v1/devices")), "it is drained")
    standin.leave()
    adapter.until(lambda: "does not answer" in adapter.log.read_text(), "it is gone")
    xmig.client.post("/v1/devices/cpu:1/findings", {"code": "fan", "text": "it is loud", "rung": "report"})
    assert all(each["cordoned"] for each in xmig.client.get("/v1/devices"))
    standin.come_back()
    adapter.until(lambda: cluster.condition() == "True DevicesDegraded", "it is written now")
    cluster.patch(path, {"spec": {"unschedulable": None}, "metadata": {"annotations": None}})
    ready(cluster, adapter)


def test_no_right_is_left_over(standin: Standin, adapter: Adapter, xmig: Node, cluster: Cluster) -> None:
    """What the role allows is what the adapter does."""
    # (test_adapter.py does the rest.)
    assert {("list", "nodes"), ("watch", "nodes"), ("patch", "nodes"), ("patch", "nodes/status")} <= standin.used
    assert standin.refused == []
