"""A node is drained: its jobs move to another node, or are suspended or checkpoints where that refuses. What a program
writes is what it writes when nobody disturbs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.drains import codes, drain, program, step, takes_programs
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from xmigd.client import Refused

pytestmark = [pytest.mark.criu, needs_networks]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


def test_to_another_node_and_back(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    one, two = nodes
    with program(nodes, native_dir, tmp_path) as (_, storm, output):
        assert (step(one)["how"], codes(step(one))) == ("stuck", {"cordoned"})
        planned = step(one, nodes=["*"])
        assert (planned["how"], planned["target"].partition("/")[0]) == ("transfer", "two")
        assert "two/cpu:" in one.ctl("drain", "--all", "--to", "two", "--dry-run")
        with pytest.raises(Refused) as caught:
            drain(one, nodes=["three"])
        assert caught.value.code == "not_found"
        assert not any(each["cordoned"] for each in one.client.get("/v1/devices"))
        printed = one.ctl("drain", "--all", "--to", "two", "--within", "2m", "--yes")
        assert "1 program(s) were moved; all devices of this node are cordoned" in printed
        assert storm.where() == 1
        wait_for_lines(output, len(output.read_text().splitlines()) + 2)
        # Nothing on the first node takes it now.
        stays = step(two, nodes=["one"], otherwise="either")
        assert (stays["how"], stays["target"], "cordoned" in codes(stays)) == ("host", None, True)
        takes_programs(one)
        job = two.lives()[0]["job_id"]
        two.client.patch(f"/v1/jobs/{job}", {"external_id": "batch:17"}, "*")
        assert (step(two, nodes=["one"])["how"], "scheduled" in codes(step(two, nodes=["one"]))) == ("stuck", True)
        failed = ended(two, drain(two, nodes=["one"]))
        assert (failed["state"], failed["error"]["code"]) == ("failed", "drain_incomplete")
        assert "its scheduler knows it on this node, as batch:17" in failed["error"]["detail"]
        two.client.patch(f"/v1/jobs/{job}", {"external_id": "slurm:17"}, "*")  # by hand neither
        for words in (["--plan"], []):
            refused = two.refused("migrate", job, "--to", "one", *words)
            assert "it is Slurm's job 17, which has no allocation on another node" in refused
            assert "scontrol requeue 17" in refused
        assert storm.where() == 1
        two.client.patch(f"/v1/jobs/{job}", {"external_id": None}, "*")
        done = succeeded(two, drain(two, nodes=["one"]))
        assert (done["result"]["moved"], done["result"]["parts"][0]["how"]) == (1, "transfer")
        assert storm.where() == 0


def test_it_is_refused(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """Then the job is suspended, or a checkpoint, and goes on from there."""
    one, two = nodes
    with program(nodes, native_dir, tmp_path) as (started, _, output):
        takes_programs(two, cordoned=True)
        (part,) = succeeded(one, drain(one, nodes=["two"], otherwise="suspend"))["result"]["parts"]
        assert (part["how"], part["target"]) == ("host", None)
        assert any("two: cpu:0 is cordoned" in each["why"] for each in part["tried"])
        assert one.lives()[0]["state"] == "suspended"
        takes_programs(one)
        succeeded(one, one.client.post(f"/v1/jobs/{started.job}:resume", {}))
        two.stop()
        planned = step(one, nodes=["two"], otherwise="checkpoint")
        assert (planned["how"], "peer_unreachable" in codes(planned)) == ("checkpoint", True)
        (part,) = succeeded(one, drain(one, nodes=["two"], otherwise="checkpoint"))["result"]["parts"]
        assert (part["how"], one.lives()) == ("checkpoint", [])
        takes_programs(one)
        succeeded(one, one.client.post(f"/v1/jobs/{started.job}:continue", {}))
        two.start()
        wait_for_lines(output, len(output.read_text().splitlines()) + 2)
