"""Jobs of Slurm's real daemons, under a real xmigd: run, suspended, requeued, on nodes that fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_client_dump import criu_or_skip, let_end, wait_for_lines
from tests.harness import ROOT, wait_until
from tests.slurm.cluster import PYTHON, Cluster

pytestmark = pytest.mark.brought  # Slurm comes over the network
CLIENT = ROOT / "tests" / "criu" / "client.py"
STEPS = 60
WHOLE = "--cpus-per-task=4"  # a node
NOBODY = 65534


def submit(cluster: Cluster, native_dir: Path, steps: Path, *options: str, pause: float = 0.02) -> str:
    """A batch script of three commands; the program is the second one. It ends when `steps` may end."""
    script = f"echo begins\n{PYTHON} {CLIENT} {steps} {STEPS} {pause}\necho ends with $?"
    return cluster.submit(script, "--xmig", *options, KERNELS=str(native_dir / "xmig_kernels.so"))


def completed(cluster: Cluster, job: str) -> None:
    cluster.until(job, "COMPLETED", "FAILED", "CANCELLED")
    assert cluster.job(job)["JobState"] == "COMPLETED", f"{cluster.output(job)}\n{cluster.logs()}"
    assert "ends with 0" in cluster.output(job)


def of_xmig(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """xMIG's jobs, newest first."""
    return list(cluster.xmig.client.get("/v1/jobs", external_id=f"slurm:{job}"))


@pytest.fixture(scope="module")
def expected(cluster: Cluster, native_dir: Path) -> str:
    """What the program writes if nothing happens."""
    steps = cluster.folder / "undisturbed"
    let_end(steps)
    job = submit(cluster, native_dir, steps, "--gres=gpu:1", "--job-name=train", pause=0)
    completed(cluster, job)
    (found,) = of_xmig(cluster, job)
    assert (found["exit_code"], found["device"], found["labels"]) == (0, "cpu:0", {
        "user": "root", "partition": "low", "name": "train", "step": "batch.0", "restarts": "0",
    })  # fmt: skip
    return steps.read_text()


def test_options(cluster: Cluster) -> None:
    """A job without the option is not under xMIG. What is wrong is refused before it is queued."""
    assert "LD_PRELOAD" not in cluster.command("srun", "env")
    for wrong, why in (
        ("--xmig=other", "write --xmig or --xmig=strict"), ("--xmig-checkpoint", "needs --xmig"),
        ("--xmig-checkpoint=soon", "seconds"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=why):
            cluster.submit("true", wrong)


def test_a_step_of_two_tasks(cluster: Cluster) -> None:
    """Each is a job of xMIG's, on the device that Slurm gave it, and ends as its task does."""
    with pytest.raises(AssertionError, match="xited with exit code 3"):
        cluster.command("srun", "--xmig", "--gres=gpu:1", "--ntasks=2", "sh", "-c", "exit $((SLURM_PROCID * 3))")
    found = cluster.xmig.client.get("/v1/jobs", label="name=sh")
    assert {(each["labels"]["step"], each["exit_code"], each["device"]) for each in found} == {
        ("0.0", 0, "cpu:0"), ("0.1", 3, "cpu:0"),
    }  # fmt: skip


def test_a_job_is_suspended_for_another_one(cluster: Cluster, native_dir: Path, expected: str) -> None:
    """Its device memory is in host memory before the other one begins, on the same device."""
    low, high = cluster.folder / "low", cluster.folder / "high"
    client = cluster.xmig.client
    client.patch("/v1/devices/cpu:1", {"cordoned": True}, "*")
    first = submit(cluster, native_dir, low, WHOLE, "--nodelist=n1")
    wait_for_lines(low, STEPS // 4)
    second = submit(cluster, native_dir, high, WHOLE, "--nodelist=n1", "--partition=high")
    wait_for_lines(high, STEPS // 4)
    before = low.read_text()
    assert cluster.job(first)["JobState"] == "SUSPENDED"
    assert [each["state"] for each in (*of_xmig(cluster, first), *of_xmig(cluster, second))] == ["suspended", "running"]
    assert of_xmig(cluster, second)[0]["device"] in (None, "cpu:0")
    let_end(high)
    let_end(low)
    completed(cluster, second)
    assert low.read_text() == before
    completed(cluster, first)
    assert (low.read_text(), high.read_text()) == (expected, expected)
    client.patch("/v1/devices/cpu:1", {"cordoned": False}, "*")


@pytest.mark.criu
def test_a_job_is_requeued_for_another_one(cluster: Cluster, native_dir: Path, expected: str) -> None:
    """It goes on from its checkpoint, in the middle of its script."""
    criu_or_skip()
    low, high = cluster.folder / "spot", cluster.folder / "higher"
    first = submit(
        cluster, native_dir, low, WHOLE, "--nodelist=n1", "--gres=gpu:2", "--partition=spot", "--xmig-checkpoint"
    )
    wait_for_lines(low, STEPS // 4)
    let_end(high)
    second = submit(cluster, native_dir, high, WHOLE, "--nodelist=n1", "--gres=gpu:2", "--partition=high", pause=0)
    completed(cluster, second)
    assert len(low.read_text().splitlines()) < STEPS
    let_end(low)
    completed(cluster, first)
    assert cluster.job(first)["Restarts"] == "1"
    assert cluster.output(first).count("begins") == 1
    assert (low.read_text(), high.read_text()) == (expected, expected)
    restored, before = of_xmig(cluster, first)
    assert restored["restored_from"] == before["id"]
    wait_until(lambda: not cluster.xmig.client.get("/v1/checkpoints"), "the epilog has removed its checkpoints")


@pytest.mark.criu
def test_a_node_fails(cluster: Cluster, native_dir: Path, expected: str) -> None:
    """The job is requeued, and goes on from the last checkpoint by the clock."""
    criu_or_skip()
    steps, client = cluster.folder / "lost", cluster.xmig.client
    job = submit(
        cluster, native_dir, steps, "--nodelist=n2", "--gres=gpu:1", "--partition=spot", "--xmig-checkpoint=2",
        pause=0.1,
    )  # fmt: skip
    wait_for_lines(steps, STEPS // 4)
    wait_until(lambda: bool(client.get("/v1/checkpoints")), "there is a checkpoint")
    cluster.lose_node("n2", job)
    # It is back before Slurm notes it: what Slurm sends to a node that does not answer comes when the job runs again.
    cluster.start_node("n2")
    cluster.command("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    cluster.until(job, "PENDING")
    let_end(steps)
    cluster.resume("n2")
    completed(cluster, job)
    assert cluster.output(job).count("begins") == 1
    assert steps.read_text() == expected


@pytest.fixture
def user(cluster: Cluster) -> Path:
    """A folder of an ordinary user's, who reaches the daemon's socket."""
    home = cluster.folder / "nobody"
    home.mkdir(exist_ok=True)
    os.chown(home, NOBODY, NOBODY)
    for each in (cluster.folder, Path(cluster.xmig.environment["XMIG_RUNTIME_DIR"])):
        each.chmod(0o755)
    if not all(each.stat().st_mode & 0o5 == 0o5 for each in (*CLIENT.parents, Path(PYTHON).resolve().parent)):
        pytest.skip("the source tree is closed to other users")
    return home


def has_cap_sys_resource() -> bool:
    """CRIU needs it for programs of other users; containers often lack it."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 24 & 1)


def submit_as_user(cluster: Cluster, native_dir: Path, user: Path, steps: Path, *options: str) -> str:
    return submit(
        cluster, native_dir, steps, WHOLE, "--nodelist=n1", "--gres=gpu:1", f"--uid={NOBODY}", f"--gid={NOBODY}",
        f"--output={user}/out-%j", f"--chdir={user}", *options,
    )  # fmt: skip


def completed_as_user(cluster: Cluster, job: str, user: Path) -> str:
    """What it printed."""
    cluster.until(job, "COMPLETED", "FAILED", "CANCELLED")
    output = (user / f"out-{job}").read_text()
    assert (cluster.job(job)["JobState"], "ends with 0" in output) == ("COMPLETED", True), f"{output}\n{cluster.logs()}"
    return output


def test_an_ordinary_users_job_is_suspended(cluster: Cluster, native_dir: Path, expected: str, user: Path) -> None:
    steps = user / "suspended"
    job = submit_as_user(cluster, native_dir, user, steps)
    wait_for_lines(steps, STEPS // 4)
    cluster.command("scontrol", "suspend", job)
    wait_until(lambda: [each["state"] for each in of_xmig(cluster, job)] == ["suspended"], "it is suspended")
    cluster.command("scontrol", "resume", job)
    let_end(steps)
    completed_as_user(cluster, job, user)
    assert steps.read_text() == expected
    (found,) = of_xmig(cluster, job)
    assert (found["uid"], found["exit_code"], found["labels"]["user"]) == (NOBODY, 0, "nobody")


@pytest.mark.criu
def test_an_ordinary_users_job_is_requeued(cluster: Cluster, native_dir: Path, expected: str, user: Path) -> None:
    """It goes on from its checkpoint, as the user. Where no checkpoint can be made, it begins anew, and says why."""
    criu_or_skip()
    steps, high = user / "requeued", cluster.folder / "over-user"
    job = submit_as_user(cluster, native_dir, user, steps, "--partition=spot", "--xmig-checkpoint")
    wait_for_lines(steps, STEPS // 4)
    let_end(high)
    second = submit(cluster, native_dir, high, WHOLE, "--nodelist=n1", "--gres=gpu:2", "--partition=high", pause=0)
    completed(cluster, second)
    let_end(steps)
    output = completed_as_user(cluster, job, user)
    assert steps.read_text() == expected
    last, before = of_xmig(cluster, job)
    assert (last["uid"], before["uid"], cluster.job(job)["Restarts"]) == (NOBODY, NOBODY, "1")
    if has_cap_sys_resource():
        assert (last["restored_from"], output.count("begins")) == (before["id"], 1)
    else:
        assert "no checkpoint was made" in output
        assert ("CAP_SYS_RESOURCE" in output, output.count("begins")) == (True, 2)
    wait_until(lambda: not cluster.xmig.client.get("/v1/checkpoints"), "the epilog has removed its checkpoints")


@pytest.fixture
def checked(cluster: Cluster) -> Iterator[Path]:
    """While this file is there, Slurm checks its nodes' health every 3 seconds."""
    file = cluster.folder / "checked"
    yield file
    if (reason := cluster.reason("n1")).startswith("xmig-drain"):  # so that no check drains the device again
        cluster.command("scontrol", "update", "NodeName=n1", "State=DRAIN", f"Reason=xmig: no {reason}")
    file.touch()
    for device in ("cpu:0", "cpu:1"):
        cordon(cluster, device, False)
    cluster.until_idle()
    file.unlink()


def cordon(cluster: Cluster, device: str, cordoned: bool) -> None:
    cluster.xmig.client.patch(f"/v1/devices/{device}", {"cordoned": cordoned, "reason": "a new fan"}, "*")


def test_the_node_is_as_its_devices_are(cluster: Cluster, checked: Path) -> None:
    checked.touch()
    cordon(cluster, "cpu:1", True)
    wait_until(lambda: all("DRAIN" in cluster.state(node) for node in cluster.nodes), "both are drained")
    assert cluster.reason("n1") == "xmig: cpu:1 is cordoned: a new fan"
    cordon(cluster, "cpu:1", False)
    cluster.until_idle()


def test_a_device_is_emptied_by_the_reason_of_a_drain(
    cluster: Cluster, native_dir: Path, expected: str, checked: Path
) -> None:
    steps = cluster.folder / "moves"
    job = submit(cluster, native_dir, steps, "--nodelist=n1", "--gres=gpu:1")
    wait_for_lines(steps, STEPS // 4)
    cluster.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=xmig-drain cpu:0")
    checked.touch()
    (found,) = of_xmig(cluster, job)

    def device() -> str:
        (process,) = cluster.xmig.client.get("/v1/processes", job=found["id"])
        return str(process["device"])

    wait_until(lambda: device() == "cpu:1", "it has left the device")
    let_end(steps)
    completed(cluster, job)
    assert steps.read_text() == expected


def test_a_job_does_not_begin_on_a_node_that_is_not_healthy(
    cluster: Cluster, native_dir: Path, expected: str, checked: Path
) -> None:
    """Its prolog fails: Slurm drains the node, and queues the job again."""
    steps = cluster.folder / "refused"
    let_end(steps)
    cordon(cluster, "cpu:0", True)
    job = submit(cluster, native_dir, steps, "--nodelist=n1", "--gres=gpu:1", pause=0)
    # Slurm has noted that the prolog failed: otherwise it would drain the node once more, for a reason of its own.
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "it is queued again")
    assert cluster.reason("n1") == "xmig: cpu:0 is cordoned: a new fan"
    assert not steps.exists()
    checked.touch()
    cordon(cluster, "cpu:0", False)
    wait_until(lambda: "DRAIN" not in cluster.state("n1"), "the drain is taken back")
    completed(cluster, job)
    assert steps.read_text() == expected
