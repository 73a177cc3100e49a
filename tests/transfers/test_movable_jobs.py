"""Jobs of `xmigctl run --movable` move between nodes with all of their processes, and back: what each of them computes
is what it computes when nobody disturbs it. Daemons die in the middle; the job is on one node."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from tests.transfers.storm import DEATHS, Storm, family_ends
from xmigd.client import Refused
from xmigd.demo.nodes import PORT

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]

FAMILY, SEVERAL = (Path(__file__).with_name(f"{name}.py") for name in ("family", "several"))
WEB = Path(__file__).parents[1] / "criu" / "web.py"
MODULUS = 1_000_003


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@contextlib.contextmanager
def family(nodes: list[TransferNode], native_dir: Path, folder: Path) -> Iterator[Storm]:
    """Two processes with devices, and one without. In the end each has written what it should."""
    output = folder / "steps"
    outputs = output, Path(f"{output}.child")
    command: list[str | Path] = [sys.executable, FAMILY, output, "1000000", "0.01"]
    nodes[0].begin_movable(command, folder / "family.out", KERNELS=str(native_dir / "xmig_kernels.so"))
    for each in outputs:
        wait_for_lines(each, 5)
    yield Storm(nodes, random.Random(0), programs=2)
    for each in outputs:
        wait_for_lines(each, len(each.read_text().splitlines()) + 2)
    family_ends(nodes, native_dir, output)


def test_there_and_back(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """Each node has its own folder mounted where the program finds its daemon: it has to find that of its node."""
    with family(nodes, native_dir, tmp_path) as storm:
        for source, target in (nodes, nodes[::-1]):
            succeeded(source, source.move(source.lives()[0]["job_id"], target.name))
            assert nodes[storm.where()] is target
            assert len(target.lives()) == 2
            for name in ("steps", "steps.child"):
                file = tmp_path / name
                wait_for_lines(file, len(file.read_text().splitlines()) + 5)


def test_a_daemon_dies_at_each_write(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    with family(nodes, native_dir, tmp_path) as storm:
        for death in DEATHS:
            storm.one_dies(*death)


def test_the_target_is_gone(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """At the worst moment, for good as it seems: an operator says that the job goes on here. What the target has made
    of it never runs."""
    with family(nodes, native_dir, tmp_path) as storm:
        one, two = nodes
        two.dies_at("write.begun transfers.going")
        one.move(one.lives()[0]["job_id"], "two")
        wait_until(two.has_died, "the target is gone")
        wait_until(lambda: "waits for two" in one.transfers()[0]["why"], "the source says what it waits for")
        one.client.post(f"/v1/transfers/{one.transfers()[0]['id']}:decide", {"goes_on": "here"})
        wait_for_lines(tmp_path / "steps", len((tmp_path / "steps").read_text().splitlines()) + 5)
        two.starts_again()
        storm.settle()
        assert storm.where() == 0
        assert {node.transfers()[0]["state"] for node in nodes} == {"failed", "dropped"}


def test_a_program_with_helpers(nodes: list[TransferNode], tmp_path: Path) -> None:
    """With a fork server, named semaphores and memory, a pool, a Unix socket, and a connection at an address of the
    first node, which the second one does not have."""
    one, two = nodes
    output = tmp_path / "steps"
    program = one.begin_movable([sys.executable, SEVERAL, output, one.network.address], tmp_path / "several.out")
    wait_for_lines(output, 5)
    assert "nothing stands in the way" in one.ctl("check-movable", program.job)
    for source, target in ((one, two), (two, one)):
        succeeded(source, source.move(source.lives()[0]["job_id"], target.name), timeout=300)
        assert not source.lives()
        wait_for_lines(output, len(output.read_text().splitlines()) + 5)
        # What CRIU has named for the dumps that the program went on after, it does not keep.
        names = shown(target, "ls", "dev/shm")
        assert "psm_" in names
        assert "link_remap" not in names
    output.with_suffix(".stop").touch()
    wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
    written = output.read_text().splitlines()
    assert written == lines_of_several(len(written))
    assert Path(f"{output}.codes").read_text() == "0 0 2"


def lines_of_several(count: int) -> list[str]:
    """What several.py writes."""
    found, content, total = [], 1, 0
    for step in range(count):
        total += step
        parts = (step, content, content, pow(7, step, MODULUS), step * 5 % MODULUS, total, pow(3, step, MODULUS))
        found.append(" ".join(map(str, parts)))
        content = (content * 3 + step) % MODULUS
    return found


def test_its_port_is_published_there(nodes: list[TransferNode], tmp_path: Path) -> None:
    """A server that counts on goes to the other node, where another port leads to it. A port that somebody has is
    refused before anything is stopped."""
    one, two = nodes
    output = tmp_path / "served"
    program = one.begin_movable([sys.executable, WEB, "8000", output], tmp_path / "web.out", "--publish", "7801:8000")
    wait_for_lines(output, 3)
    before = counted(one, 7801)
    taken = f"{two.network.address}:{PORT}:8000"
    for publish, code in ((["192.0.2.1:7802:8000"], "port_in_use"), ([taken], "port_in_use"), (["0:1"], "invalid")):
        with pytest.raises(Refused) as caught:
            one.move(program.job, "two", publish=publish)
        assert caught.value.code == code
    one.ctl("migrate", program.job, "--to", "two", "--publish", f"{two.network.address}:7802:8000")
    assert counted(two, 7802, two.network.address) > before
    wait_for_lines(output, len(output.read_text().splitlines()) + 3)
    values = [json.loads(line)["value"] for line in output.read_text().splitlines()]
    missing = set(range(7, values[-1])) - set(values)
    assert len(missing) == 2, values  # which this test was answered
    assert len(values) == len(set(values))
    job = two.lives()[0]["job_id"]
    with pytest.raises(Refused) as caught:
        two.move(job, "cpu:1", publish=["7803:8000"])
    assert caught.value.code == "invalid"
    two.client.delete(f"/v1/jobs/{job}")
    wait_until(lambda: not two.lives(), "it has ended")


def counted(node: TransferNode, port: int, address: str = "127.0.0.1") -> int:
    """What a request from this node is answered."""
    read = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
    words = [sys.executable, "-c", read, f"http://{address}:{port}/next"]
    asking = node.entering(words, node.environment, stdout=subprocess.PIPE, text=True)
    return int(json.loads(asking.communicate(timeout=120)[0])["value"])


def test_mounts_are_those_of_the_node(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """A node that has nothing mounted there is refused beforehand. One that has is what the job sees."""
    one, two = nodes
    place = tmp_path / "mounted"
    place.mkdir()

    def mount(node: TransferNode) -> None:
        script = 'mount -t tmpfs none "$1" && echo "of $2" > "$1/who"'
        assert node.entering(["sh", "-c", script, "sh", place, node.name], os.environ).wait() == 0

    mount(one)
    with family(nodes, native_dir, tmp_path) as storm:
        assert shown(one, "cat", f"{place}/who") == "of one"
        job = one.lives()[0]["job_id"]
        plan = one.client.post("/v1/migration-plans", {"process": one.lives()[0]["id"], "node": "two"})
        assert {why["code"] for target in plan["targets"] for why in target["reasons"]} == {"mount_missing"}
        with pytest.raises(Refused) as caught:
            one.move(job, "two")
        assert caught.value.code == "mount_missing"
        assert f"nothing is mounted at {place}" in caught.value.message
        mount(two)
        succeeded(one, one.move(job, "two"))
        assert storm.where() == 1
        assert shown(two, "cat", f"{place}/who") == "of two"
    for node in nodes:
        assert node.entering(["umount", place], os.environ).wait() == 0


def test_addresses_of_the_machine(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """Without namespaces a job has those of its node, and a node that lacks one says so before the job stops."""
    one = nodes[0]
    output = tmp_path / "steps"
    listens = (
        "import runpy, socket, sys; listening = socket.create_server((sys.argv.pop(1), 0)); del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command: list[str | Path] = [sys.executable, "-c", listens, one.network.address, FAMILY.with_name("client.py")]
    kernels = str(native_dir / "xmig_kernels.so")
    one.begin([*command, output, "1000000", "0.01"], tmp_path / "listens.out", KERNELS=kernels)
    wait_for_lines(output, 5)
    job = one.lives()[0]["job_id"]
    with pytest.raises(Refused) as caught:
        one.move(job, "two")
    assert caught.value.code == "address_missing"
    assert one.network.address in caught.value.message
    output.with_suffix(".stop").touch()
    wait_until(lambda: not one.lives(), "it has ended")


def shown(node: TransferNode, command: str, path: str) -> str:
    """What a command says of a path as the node's job sees it."""
    root = f"/proc/{node.lives()[0]['pid']}/root"
    asking = node.entering([command, f"{root}/{path.lstrip('/')}"], os.environ, stdout=subprocess.PIPE, text=True)
    return str(asking.communicate(timeout=60)[0]).strip()
