"""Checkpoints of jobs with ranks on several nodes: all parts are one checkpoint, and what they compute fits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collectives.conftest import PROGRAMS, enough
from tests.harness import found_again, wait_until
from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, several, wait_for_lines
from tests.transfers.ranks import killed
from xmigd.client import Refused

pytestmark = [pytest.mark.criu, needs_networks]

EACH, RANKS = 2, 4
NODES = ["one", "two"]


@pytest.fixture(scope="module")
def mirror() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xmig-mirror-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def three(native_dir: Path, mirror: Path) -> Iterator[list[TransferNode]]:
    with several(3, native_dir, checkpoint_mirror=mirror) as made:
        yield made


class Job:
    """Four ranks, two on each of two nodes. In the end each has done each step once, and seen what it should."""

    def __init__(self, nodes: list[TransferNode], folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        launch: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "steps.py"]
        for number, node in enumerate(nodes):
            part = {"OF_NODE": f"{EACH * number}-{EACH * (number + 1) - 1}", "LOGGED": "1"}
            request = {"name": "steps", "nodes": [one.name for one in nodes]}
            node.begin([*launch, "0"], folder / f"launched.{number}", request=request, **part)
        wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(RANKS)), "all have begun", 60)

    def create(self, *, stop: bool = False) -> dict[str, Any]:
        leader = self.nodes[0]
        body = {"job": leader.lives()[0]["job_id"], "stop": stop}
        operation: dict[str, Any] = leader.client.post("/v1/checkpoints", body)
        return operation

    def created(self) -> str:
        return str(succeeded(self.nodes[0], self.create())["result"]["checkpoint"])

    def end(self, *gone: TransferNode) -> None:
        """With those that have started its ranks, which write a last line when these have ended."""
        there = [(number, node) for number, node in enumerate(self.nodes) if node not in gone]
        for _, node in there:
            for job in {one["job_id"] for one in node.lives()}:
                node.client.delete(f"/v1/jobs/{job}")
        wait_until(lambda: not any(node.lives() for _, node in there), "the job has ended", 60)
        wait_until(lambda: not any(launchers(self, number) for number, _ in there), "nobody writes any more", 60)

    def until_mirrored(self, mirror: Path, checkpoint: str) -> None:
        for node in self.nodes:
            wait_until((mirror / node.name / f"{checkpoint}.json").exists, "it is in the mirror", 60)

    def files(self, checkpoint: str) -> dict[str, int]:
        """That the ranks append to, as they were."""
        found: dict[str, int] = {}
        for node in self.nodes:
            manifest = json.loads((node.folder / "checkpoints" / f"{checkpoint}.json").read_text())
            found |= {each["path"]: each["bytes"] for each in manifest["programs"][0]["files"] if each["writable"]}
        return found

    def steps(self) -> list[str]:
        return [(self.folder / f"steps.{rank}").read_text() for rank in range(RANKS)]

    def is_recovered(self, node: TransferNode) -> None:
        """One of its servers is killed, and all ranks go back to the round."""

        def recoveries() -> dict[str, int]:
            return {each["id"]: each["recoveries"] for one in self.nodes for each in one.lives()}

        before = recoveries()
        killed(node, node.lives()[-1]["server_pid"])
        wait_until(lambda: all(count > before[each] for each, count in recoveries().items()), "all are recovered")
        self.goes_on()

    def goes_on(self) -> None:
        wait_until(self.all_run, "all run", 60)
        for rank in range(RANKS):
            file = self.folder / f"steps.{rank}"
            wait_for_lines(file, len(file.read_text().splitlines()) + 5)

    def all_run(self) -> bool:
        found = [one for node in self.nodes for one in node.lives()]
        return len(found) == RANKS and all(one["state"] == "running" for one in found)

    def check(self) -> None:
        self.goes_on()
        enough(self.folder)
        wait_until(lambda: not any(node.lives() for node in self.nodes), "the job has ended", 120)
        lines = [(self.folder / f"out.{rank}").read_text().splitlines()[-1:] for rank in range(RANKS)]
        assert lines == [["done"]] * RANKS, lines
        for rank in range(RANKS):
            steps = [int(line) for line in (self.folder / f"steps.{rank}").read_text().splitlines()]
            assert steps == list(range(len(steps)))


def back_to(files: dict[str, int]) -> None:
    """As the message of a refusal says."""
    for path, size in files.items():
        os.truncate(path, size)


def in_reach(node: TransferNode, other: str) -> bool:
    return any(one["name"] == other and one["state"] == "connected" for one in node.client.get("/v1/peers"))


def restore(node: TransferNode, checkpoint: str, **instead: str) -> dict[str, Any]:
    operation: dict[str, Any] = node.client.post(f"/v1/checkpoints/{checkpoint}:restore", {"nodes": instead})
    return operation


def restored_while_killed(nodes: list[TransferNode], node: TransferNode, checkpoint: str, at: str) -> dict[str, Any]:
    """Restore it at the first of two nodes; the daemon of one is killed in this phase, or dies at this write."""
    one, two = nodes
    if at.startswith("write."):
        node.dies_at(at)
        operation = restore(one, checkpoint)
        wait_until(node.has_died, "it dies", 60)
    else:
        operation = restore(one, checkpoint)
        wait_until(lambda: phase_of(node, "restoration") == at, f"it is {at}", closely=True)
        node.kill()
    node.starts_again()
    found_again(node)
    over = ended(one, operation)
    wait_until(lambda: not phase_of(two, "restoration"), "it is over there, too", 60)
    return over


@pytest.fixture
def job(three: list[TransferNode], tmp_path: Path) -> Iterator[Job]:
    yield Job(three[:2], tmp_path)
    enough(tmp_path)


def listed(node: TransferNode, checkpoint: str) -> bool:
    return any(one["id"] == checkpoint for one in node.client.get("/v1/checkpoints"))


def test_a_job_goes_on_beside_its_checkpoint(job: Job) -> None:
    one, two = job.nodes
    with pytest.raises(Refused) as caught:
        two.client.post("/v1/checkpoints", {"job": two.lives()[0]["job_id"]})
    assert (caught.value.code, "one leads" in str(caught.value)) == ("other_node_leads", True)
    ways = [preempted(node) for node in job.nodes]
    assert ways == [({"checkpoint"}, set()), ({"stuck"}, {"other_node_leads"})]
    checkpoint = job.created()
    wait_until(lambda: listed(one, checkpoint) and listed(two, checkpoint), "both have it")
    (part,) = two.client.get("/v1/operations", kind="checkpoint")
    wait_until(lambda: two.client.get(f"/v1/operations/{part['id']}")["state"] == "succeeded", "so has its part")
    assert "one,two" in one.ctl("checkpoint", "list")
    job.check()


def preempted(node: TransferNode) -> tuple[set[str], set[str]]:
    """How its ranks would leave their devices, and why not as a checkpoint."""
    devices = [one["device"] for one in node.lives()]
    body = {"devices": devices, "otherwise": "checkpoint"}
    steps = node.client.post("/v1/drain-plans", body)["steps"]
    against = {why["code"] for step in steps for why in step["reasons"] if "making a checkpoint" in why["text"]}
    return {step["how"] for step in steps}, against


def test_a_job_is_restored(job: Job) -> None:
    """Where it was; and is recovered as a group, and is written down once more."""
    one = job.nodes[0]
    checkpoint = job.created()
    with pytest.raises(Refused) as caught:
        restore(one, checkpoint)
    assert caught.value.code == "pid_in_use"
    job.goes_on()
    job.end()
    with pytest.raises(Refused) as caught:
        restore(one, checkpoint)
    assert caught.value.code == "file_changed"
    back_to(job.files(checkpoint))
    result = succeeded(one, restore(one, checkpoint))["result"]
    assert result["nodes"] == NODES
    job.goes_on()
    for node in job.nodes:
        job.is_recovered(node)
    job.goes_on()
    again = job.created()
    job.end()
    back_to(job.files(again))
    succeeded(one, restore(one, again))
    job.check()


PHASES = ["pausing", "dumping", "storing"]
STORED = "write.committed checkpoints.add"
DECISIONS = ["write.begun checkpoints.whole", "write.committed checkpoints.whole"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [*PHASES, STORED, *DECISIONS])
@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_one_is_made(job: Job, which: int, at: str) -> None:
    """The job goes on everywhere. Either both nodes have it, and it is restored, or none has."""
    one, two = job.nodes
    node = job.nodes[which]
    earlier = {each["id"] for each in one.client.get("/v1/checkpoints") + two.client.get("/v1/checkpoints")}
    if at in PHASES:
        operation = job.create()
        wait_until(lambda: phase_of(node, "checkpoint") == at, f"it is {at}", closely=True)
        node.kill()
    else:
        node.dies_at(at)
        operation = job.create()
        wait_until(node.has_died, "it dies")
    node.starts_again()
    found_again(node)
    ended(one, operation)
    job.goes_on()

    def settled() -> bool:
        made = [{each["id"] for each in node.client.get("/v1/checkpoints")} - earlier for node in job.nodes]
        left = [list((node.folder / "checkpoints").glob("*.json")) for node in job.nodes]
        names = [{path.stem for path in each} - earlier for each in left]
        return made[0] == made[1] and names == made

    wait_until(settled, "both have it, or none", 60)
    made = {each["id"] for each in one.client.get("/v1/checkpoints")} - earlier
    assert len(made) == (1 if (at, which) in ((DECISIONS[1], 0), (DECISIONS[0], 1), (DECISIONS[1], 1)) else 0)
    if made:
        job.end()
        back_to(job.files(min(made)))
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        succeeded(one, restore(one, min(made)))
    else:
        assert job.created()
    job.check()


def test_it_is_stopped_and_goes_on(job: Job) -> None:
    """Its files are as they were, so they need nothing; several times. Their first servers reach those of the other
    node: nothing is recovered."""
    one, two = job.nodes
    for _ in range(3):
        checkpoint = succeeded(one, job.create(stop=True))["result"]["checkpoint"]
        wait_until(lambda: not (one.lives() + two.lives()), "it has ended")
        succeeded(one, restore(one, checkpoint))
        job.goes_on()
        assert [each["recoveries"] for each in one.lives() + two.lives()] == [0] * RANKS
    job.check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", DECISIONS)
@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_it_is_stopped(job: Job, which: int, at: str) -> None:
    """The job ends on both nodes, at a checkpoint that both have, or goes on on both, and none has one."""
    one, two = job.nodes
    node = job.nodes[which]
    before = {each["id"] for each in one.client.get("/v1/checkpoints")}
    node.dies_at(at)
    operation = job.create(stop=True)
    wait_until(node.has_died, "it dies")
    node.starts_again()
    found_again(node)
    ended(one, operation)
    wait_until(lambda: not phase_of(two, "checkpoint"), "it is over there, too", 60)
    made = {each["id"] for each in one.client.get("/v1/checkpoints")} - before
    assert bool(made) == ((at, which) in ((DECISIONS[1], 0), (DECISIONS[0], 1), (DECISIONS[1], 1)))
    if made:
        wait_until(lambda: not (one.lives() + two.lives()), "it has ended")
        assert listed(two, min(made))
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        succeeded(one, restore(one, min(made)))
    job.check()


@pytest.mark.parametrize("how", ["", "stop", "stop, restart"])
def test_a_job_ends_while_a_part_is_in_doubt(job: Job, how: str) -> None:
    """The daemon that leads is gone: the operation ends with the job, and the part is kept until the answer, or until
    an operator discards it. `restart`: the other daemon is another one, too."""
    stop = how.startswith("stop")
    one, two = job.nodes
    one.dies_at("write.begun checkpoints.whole")
    job.create(stop=stop)
    wait_until(one.has_died, "it dies")
    (part,) = [each for each in two.client.get("/v1/operations", kind="checkpoint") if each["ended_at"] is None]
    if how.endswith("restart"):
        wait_until(lambda: two.client.get("/v1/checkpoints", in_doubt="true"), "its part is stored")
        two.kill()
        two.starts_again()
        found_again(two)
    job.end(one)
    over = ended(two, part)
    assert (over["state"], over["error"]["code"]) == ("failed", "in_doubt")
    (left,) = set((two.folder / "checkpoints").glob("*.json")) - {
        two.folder / "checkpoints" / f"{each['id']}.json" for each in two.client.get("/v1/checkpoints")
    }
    assert left.stem[:12] in over["error"]["detail"]
    (listed_part,) = two.client.get("/v1/checkpoints", in_doubt="true")
    assert (listed_part["id"], listed_part["nodes"]) == (left.stem, NODES)
    if stop:  # nor does anything stand still for ever
        assert not launchers(job, 1)
    if how.endswith("restart"):
        assert "is removed" in two.ctl("checkpoint", "discard", left.stem[:12], "--yes")
        assert (left.exists(), two.client.get("/v1/checkpoints", in_doubt="true")) == (False, [])
        assert why_not_discarded(two, left.stem) == "not_found"
    one.starts_again()
    found_again(one)
    wait_until(lambda: not left.exists(), "it is forgotten once the answer is there", 60)
    job.end()


def why_not_discarded(node: TransferNode, part: str) -> str:
    with pytest.raises(Refused) as refused:
        node.client.post(f"/v1/checkpoints/{part}:discard")
    return str(refused.value.code)


def launchers(job: Job, node: int) -> list[str]:
    """Processes that have started the ranks of this node."""
    part, found = f"OF_NODE={EACH * node}-{EACH * (node + 1) - 1}".encode(), []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            ours = str(PROGRAMS / "launch.py").encode() in words and str(job.folder).encode() in words
            if ours and part in (each / "environ").read_bytes().split(b"\0"):
                found.append(each.name)
    return found


def test_it_is_verified_and_removed(job: Job) -> None:
    """Also where a node is not in reach, once that is back; and a daemon dies while it notes that."""
    one, two = job.nodes
    checkpoint, other = job.created(), job.created()
    wait_until(lambda: listed(two, other), "both have it")
    assert "is whole" in one.ctl("checkpoint", "verify", other[:12])
    assert "is whole" in two.ctl("checkpoint", "verify", other[:12])
    with pytest.raises(Refused) as caught:
        two.client.delete(f"/v1/checkpoints/{other}")
    assert caught.value.code == "other_node_leads"
    pieces = [path for path in (two.folder / "checkpoints" / "objects").rglob("*") if path.is_file()]
    kept = [path.read_bytes() for path in pieces]
    for path in pieces:
        path.write_bytes(b"damaged")
    over = ended(one, one.client.post(f"/v1/checkpoints/{other}:verify"))
    assert (over["state"], over["error"]["code"], "two" in over["error"]["detail"]) == ("failed", "damaged", True)
    for path, content in zip(pieces, kept, strict=True):
        path.write_bytes(content)
    one.ctl("checkpoint", "rm", "--yes", other)
    wait_until(lambda: not listed(two, other), "it is removed there, too")
    two.kill()
    one.ctl("checkpoint", "rm", "--yes", checkpoint)
    assert not listed(one, checkpoint)
    one.dies_at("write.begun checkpoints.part_removed")
    two.starts_again()
    wait_until(one.has_died, "it hears that it is removed")
    one.starts_again()
    found_again(one)
    wait_until(lambda: not listed(two, checkpoint), "it is removed there, too")
    manifests = [two.folder / "checkpoints" / f"{each}.json" for each in (checkpoint, other)]
    wait_until(lambda: not any(each.exists() for each in manifests), "nothing is left of them")
    job.check()


def test_a_node_that_leads_not_is_refused(job: Job) -> None:
    """Neither does a peer make what is there already its own."""
    one, two = job.nodes
    checkpoint = job.created()
    wait_until(lambda: listed(two, checkpoint), "both have it")
    for node, instead, code in (
        (two, {}, "other_node_leads"),
        (one, {"three": "two"}, "invalid"),
        (one, {"two": "one"}, "exists"),
        (one, {"one": "three"}, "other_node_leads"),
    ):
        with pytest.raises(Refused) as caught:
            restore(node, checkpoint, **instead)
        assert caught.value.code == code, (node.name, instead)
    job.check()


def test_a_server_is_lost_while_one_is_made(job: Job) -> None:
    """All are recovered, whether there is a checkpoint of it or not; the next one, an increment or not, is right."""
    one, two = job.nodes
    for number, phase in enumerate(("pausing", "dumping", "copying", "storing")):
        operation = job.create()
        node = job.nodes[number % 2]
        wait_until(lambda: phase_of(node, "checkpoint") in (phase, ""), f"it is {phase}", closely=True)  # noqa: B023
        job.is_recovered(job.nodes[number // 2])
        ended(one, operation)
        wait_until(lambda: not phase_of(two, "checkpoint"), "it is over there, too", 90)
        job.created()
    succeeded(one, job.create(stop=True))
    wait_until(lambda: not (one.lives() + two.lives()), "it has ended")
    checkpoint = one.client.get("/v1/checkpoints")[0]["id"]
    succeeded(one, restore(one, checkpoint))
    job.check()


@pytest.mark.parametrize("phase", ["pausing", "dumping", "waiting"])
def test_a_node_is_out_of_reach_while_one_is_made(job: Job, phase: str) -> None:
    """For longer than a checkpoint waits, and shorter than collectives do: the job goes on where it is, and nothing is
    left of the checkpoint, unless all of it is there."""
    one, two = job.nodes
    before = {each["id"] for each in one.client.get("/v1/checkpoints")}
    operation = job.create()
    wait_until(lambda: phase_of(one, "checkpoint") in (phase, ""), f"it is {phase}", closely=True)
    with two.network.unplugged():
        over = ended(one, operation)
        # If it has reported that its part is stored, it waits for the answer, however long that takes.
        wait_until(lambda: phase_of(two, "checkpoint") in ("", "waiting"), "it is over there, or in doubt", 90)
    job.goes_on()
    made = {each["id"] for each in one.client.get("/v1/checkpoints")} - before
    assert bool(made) == (over["state"] == "succeeded")
    wait_until(lambda: {each["id"] for each in two.client.get("/v1/checkpoints")} - before == made, "as on the other")
    job.created()
    job.check()


def phase_of(node: TransferNode, kind: str) -> str:
    """Of the last operation of this kind, or "" if it is over: a job has one after the other."""
    last = node.client.get("/v1/operations", kind=kind, limit=1)
    return str(last[0]["phase"]) if last and last[0]["state"] in ("pending", "running") else ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "at", ["restoring", "resuming", "write.begun operations.decide", "write.committed operations.decide"]
)
@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_one_is_restored(job: Job, which: int, at: str) -> None:
    """All of it goes on, or nothing of it has run, and it is restored the next time."""
    one, two = job.nodes
    node = job.nodes[which]
    checkpoint = job.created()
    job.end()
    back_to(job.files(checkpoint))
    before = job.steps()
    over = restored_while_killed(job.nodes, node, checkpoint, at)
    goes_on = at == "write.committed operations.decide" and which == 0
    assert (over["state"] == "succeeded") == goes_on
    if not goes_on:
        wait_until(lambda: not (one.lives() + two.lives()), "nothing is left of it")
        assert job.steps() == before
        succeeded(one, restore(one, checkpoint))
    job.check()


@pytest.mark.parametrize("by", ["mirror", "export"])
def test_a_node_is_gone_for_good(native_dir: Path, tmp_path: Path, by: str) -> None:
    """Another one, which takes programs from the one that leads, gets its part: from the mirror, or an export of it."""
    with (
        tempfile.TemporaryDirectory(prefix="xmig-mirror-") as mirror,
        several(3, native_dir, checkpoint_mirror=mirror if by == "mirror" else "") as nodes,
    ):
        one, two, three = nodes
        job = Job([one, two], tmp_path)
        checkpoint = job.created()
        if by == "mirror":
            job.until_mirrored(Path(mirror), checkpoint)
        else:
            wait_until(lambda: listed(two, checkpoint), "it has its part")
            two.ctl("checkpoint", "export", checkpoint)
            exported = three.folder / "checkpoints" / "exported"
            exported.mkdir(parents=True, exist_ok=True)
            shutil.copy(two.folder / "checkpoints" / "exported" / f"{checkpoint}.xmig", exported)
        files = job.files(checkpoint)
        two.close()
        job.end(two)
        wait_until(lambda: not one.reaches(two), "it is not in reach")
        back_to(files)
        with pytest.raises(Refused) as caught:
            restore(one, checkpoint)
        assert (caught.value.code, "two" in str(caught.value)) == ("peer_unreachable", True)
        for allowed, code in (("two", "peer_not_allowed"), ("one", "no_such_part")):
            three.environment["XMIG_PROGRAMS_FROM"] = allowed
            three.kill()
            three.starts_again()
            wait_until(lambda: one.reaches(three), "it is in reach")
            if by == "export" or code == "peer_not_allowed":
                failed = ended(one, restore(one, checkpoint, two="three"))
                assert (failed["state"], failed["error"]["code"]) == ("failed", code)
                assert not (one.lives() + three.lives())
        if by == "export":
            three.ctl("checkpoint", "import", f"{checkpoint}.xmig")
        assert "steps goes on" in one.ctl("restore", checkpoint[:12], "--node", "two=three")
        job.nodes = [one, three]
        job.is_recovered(three)
        job.check()


def test_the_node_that_leads_is_gone_for_good(native_dir: Path, tmp_path: Path) -> None:
    """The other one that gets its part leads then."""
    with (
        tempfile.TemporaryDirectory(prefix="xmig-mirror-") as mirror,
        several(3, native_dir, checkpoint_mirror=mirror) as nodes,
    ):
        one, two, three = nodes
        job = Job([one, two], tmp_path)
        checkpoint = job.created()
        job.until_mirrored(Path(mirror), checkpoint)
        files = job.files(checkpoint)
        one.close()
        job.end(one)
        back_to(files)
        with pytest.raises(Refused) as caught:
            restore(two, checkpoint, one="three")
        assert (caught.value.code, "three leads" in str(caught.value)) == ("other_node_leads", True)
        three.ctl("restore", checkpoint, "--node", "one=three")
        job.nodes = [three, two]
        job.is_recovered(two)
        again = job.created()
        job.end()
        back_to(job.files(again))
        succeeded(three, restore(three, again))
        job.check()
