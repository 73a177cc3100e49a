"""xmigctl with labels and external ids."""

from __future__ import annotations

import json
from typing import Any

from tests.daemon.node import Node, Program

from .conftest import ctl, ctl_process


def jobs(node: Node, *options: str) -> list[dict[str, Any]]:
    listed = ctl(node, "job", "list", "-o", "json", *options)
    assert listed.returncode == 0, listed.stderr
    return list(json.loads(listed.stdout))


def test_a_launcher_names_its_job(node: Node) -> None:
    ran = ctl_process(node, "run", "--label", "queue=night", "--external-id", "slurm:4711", "--", "true")
    assert ran.returncode == 0, ran.stderr
    ran = ctl_process(node, "run", "--", "true", XMIG_LABELS="queue=day team=a", XMIG_EXTERNAL_ID="slurm:4712")
    assert ran.returncode == 0, ran.stderr
    (night,), (day,) = jobs(node, "--label", "queue=night"), jobs(node, "--label", "team", "--sort", "name")
    assert (night["labels"], night["external_id"]) == ({"queue": "night"}, "slurm:4711")
    assert (day["labels"], day["external_id"]) == ({"queue": "day", "team": "a"}, "slurm:4712")
    assert [each["id"] for each in jobs(node, "--external-id", "slurm:4712")] == [day["id"]]
    assert json.loads(ctl(node, "job", "show", "slurm:4711", "-o", "json").stdout)["id"] == night["id"]
    assert "queue=night" in ctl(node, "job", "list").stdout

    changed = ctl(node, "job", "label", "slurm:4711", "queue-", "team=b", "--external-id", "pbs:1")
    assert changed.stdout == "true: team=b, external id pbs:1\n"
    assert [each["id"] for each in jobs(node, "--label", "team", "--sort", "created", "--reverse")] == [
        night["id"], day["id"],
    ]  # fmt: skip
    for wrong in (["job", "label", "pbs:1", "novalue"], ["job", "list", "--label", "=x"]):
        assert ctl(node, *wrong).returncode == 2
    assert ctl_process(node, "run", "--label", "novalue", "--", "true").returncode == 2


def test_programs_of_labelled_jobs(node: Node) -> None:
    with node.http() as http:
        made = [http.post("/v1/jobs", json={"name": name, "labels": {"name": name}}).json() for name in ("b", "a")]
    with (
        Program(node, made[0]["environment"]["XMIG_JOB"]) as first,
        Program(node, made[1]["environment"]["XMIG_JOB"]) as second,
    ):
        first.welcome(), second.welcome()
        listed = json.loads(ctl(node, "ps", "--sort", "name", "-o", "json").stdout)
        assert [each["job_name"] for each in listed] == ["a", "b"]
        listed = json.loads(ctl(node, "ps", "--label", "name=b", "--wide", "-o", "json").stdout)
        assert [(each["job_name"], each["labels"]) for each in listed] == [("b", {"name": "b"})]
        assert "name=b" in ctl(node, "ps", "--wide").stdout
