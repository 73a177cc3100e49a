"""$CUDA_VISIBLE_DEVICES: which devices a program gets, what it is sent, and what NVML says beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import harness
from xmigd.client import Refused
from xmigd.demo.node import Node
from xmigd.devices.inventory import Inventory
from xmigd.devices.names import as_one
from xmigd.devices.visible import names_devices, numbered, visible

DEVICES = {0: "cuda:0", 1: "cuda:1", 4: "cuda:4"}
UUIDS = {"cuda:0": "8932f937-d72c", "cuda:1": "89aa0000-0001"}
PROGRAM = """
import ctypes, json, os, pynvml
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, create_string_buffer
cuda, count = ctypes.CDLL("libcuda.so.1"), c_int()
error = cuda.cuInit(0)
cuda.cuDeviceGetCount(byref(count))
uuids = []
for ordinal in range(count.value):
    uuid = create_string_buffer(16)
    cuda.cuDeviceGetUuid_v2(uuid, ordinal)
    uuids.append(uuid.raw.hex())
pynvml.nvmlInit()
reported = {"error": error, "cuda": uuids, "variable": os.environ.get("CUDA_VISIBLE_DEVICES")}
if not error:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    reported["nvml"] = [pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-").replace("-", "") for handle in handles]
    own = handles[reported["nvml"].index(uuids[0])]
    before, context, memory = pynvml.nvmlDeviceGetMemoryInfo(own).free, c_void_p(), c_uint64()
    cuda.cuDevicePrimaryCtxRetain(byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    cuda.cuMemAlloc_v2(byref(memory), c_size_t(1 << 26))
    reported["seen"] = before - pynvml.nvmlDeviceGetMemoryInfo(own).free >= 1 << 26
    reported["others"] = all(pynvml.nvmlDeviceGetMemoryInfo(handle).free > 0 for handle in handles)
print(json.dumps(reported))
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", ["cuda:0"]), ("4,0", ["cuda:4", "cuda:0"]), (" 1 , 0", ["cuda:1", "cuda:0"]), ("0,2,1", ["cuda:0"]),
        ("0,-1,1", ["cuda:0"]), ("-1", []), ("", []), ("none", []), ("1,1", []), ("0,1,0", []), ("9" * 5000, []),
        ("01", ["cuda:1"]),
        ("GPU-8932", ["cuda:0"]), ("GPU-89AA,0", ["cuda:1", "cuda:0"]), ("GPU-89", []), ("GPU-", []), ("GPU-ff", []),
        ("GPU-8932f937-d72c-0", []), ("MIG-8932f937", []), ("0,GPU-8932", []), ("\\u0661", []), ("0x1", []),
    ],
)  # fmt: skip
def test_the_list_is_read_as_the_driver_does(text: str, found: list[str]) -> None:
    assert visible(text, DEVICES, UUIDS.get) == found


@given(st.text(alphabet="0149,- GPUMI8fa", max_size=30))
def test_any_list(text: str) -> None:
    found = visible(text, DEVICES, UUIDS.get)
    assert len(set(found)) == len(found)
    assert set(found) <= set(DEVICES.values())
    assert not found or names_devices(text)


def test_what_numbers_count() -> None:
    assert numbered("cuda:2,0", ["cuda:0", "cuda:1", "cuda:2"]) == {0: "cuda:2", 1: "cuda:0"}
    assert numbered(None, ["cpu:0", "cuda:3", "cuda:5"]) == {3: "cuda:3", 5: "cuda:5"}
    assert numbered(None, ["null:1", "null:0"]) == {1: "null:1", 0: "null:0"}
    assert as_one(["cuda:3", "cuda:0"]) == "cuda:3,0"


def test_uuids_of_gpus_are_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index > 1:
            raise RuntimeError
        return index

    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda index: f"GPU-8932F93{index}-D72C-0000-0000-000000000000",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    inventory = Inventory(0)
    assert inventory.uuid("cuda:1") == "8932f931-d72c-0000-0000-000000000000"
    assert (inventory.uuid("cuda:2"), inventory.uuid("cpu:0")) == (None, None)
    assert visible("GPU-8932F931,0", DEVICES, inventory.uuid) == ["cuda:1", "cuda:0"]


@pytest.fixture(scope="module")
def three(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="null:0,null:1,null:2", device_memory=0, port=-1) as node:
        yield node


def reported(node: Node, device: str | None, variable: str | None) -> tuple[dict[str, object], str | None, list[str]]:
    """What the program found, its device, and what was reported about it."""
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    command = [sys.executable, "-c", PROGRAM]
    program = node.program(command, device=device, environment=environment, stderr=subprocess.PIPE)
    out, err = program.process.communicate(timeout=60)
    assert program.process.returncode == 0, err
    rows = node.client.get("/v1/processes", job=program.job)
    own = [row["device"] for row in rows if row["pid"] == program.process.pid]
    assert err == ""
    return json.loads(out), own[0] if own else None, program.lines()


@pytest.fixture(scope="module")
def uuids(three: Node) -> list[str]:
    """Of the three devices; once requested, the daemon knows them, too."""
    found = reported(three, "null:0,1,2", None)[0]["cuda"]
    assert isinstance(found, list)
    assert len(set(found)) == 3
    return found


@pytest.mark.parametrize(
    ("job", "variable", "device", "nvml"),
    [
        (None, "1", "null:1", [0, 1, 2]),
        (None, "2,0", "null:2,0", [0, 1, 2]),
        (None, "1,7,0", "null:1", [0, 1, 2]),
        ("null:2,1", "1", "null:1", [2, 1]),
        ("null:2,1", "1,0", "null:1,2", [2, 1]),
        ("null:2,1", None, "null:2,1", [2, 1]),
        ("null:1", "0", "null:1", [1]),
    ],
)
def test_devices_of_a_program(
    three: Node, uuids: list[str], job: str | None, variable: str | None, device: str, nvml: list[int]
) -> None:
    found, own, lines = reported(three, job, variable)
    assert (own, lines) == (device, [])
    assert found["cuda"] == [uuids[int(ordinal)] for ordinal in device.partition(":")[2].split(",")]
    assert found["nvml"] == [uuids[each] for each in nvml]
    assert (found["seen"], found["others"]) == (True, True)


def test_a_device_by_its_uuid(three: Node, uuids: list[str]) -> None:
    found, own, _ = reported(three, None, f"GPU-{uuids[2][:8]}")
    assert (own, found["cuda"]) == ("null:2", [uuids[2]])


@pytest.mark.parametrize("variable", ["7", "1,1", "GPU-ffffffff-ffff", "MIG-0", "1" * 600])
def test_no_such_device(three: Node, uuids: list[str], variable: str) -> None:
    found, own, lines = reported(three, "null:2,1", variable)
    assert (found["error"], own) == (100, None)
    named = "" if len(variable) > 507 else variable
    line = f"CUDA_VISIBLE_DEVICES={named} names no device; the job has 0 (null:2), 1 (null:1)"
    assert f"xmigd refused this process: {line}" in [each.partition(" (hint")[0] for each in lines]


def run(node: Node, *options: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xmigd.cli", "run", *options, "--", sys.executable, "-c", PROGRAM]
    given = node.environment | dict(environment)
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("options", "variable", "device"),
    [((), "1", 1), (("--device", "null:2"), "1", 2), (("--device", "null:2"), "", 2), ((), "2,9", 2)],
)
def test_run_takes_the_variable_for_the_job(
    three: Node, uuids: list[str], options: tuple[str, ...], variable: str, device: int
) -> None:
    done = run(three, *options, environment={"CUDA_VISIBLE_DEVICES": variable})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["cuda"], found["nvml"], found["variable"]) == ([uuids[device]], [uuids[device]], None)


def test_run_hides_or_refuses(three: Node, uuids: list[str]) -> None:
    found = json.loads(run(three, environment={"CUDA_VISIBLE_DEVICES": "-1"}).stdout)
    assert (found["error"], found["variable"]) == (100, "-1")
    done = run(three, environment={"CUDA_VISIBLE_DEVICES": "8"})
    assert done.returncode != 0
    assert done.stderr.splitlines() == [
        "xmigctl: CUDA_VISIBLE_DEVICES=8 names no device", "  this node has 0 (null:0), 1 (null:1), 2 (null:2)"
    ]  # fmt: skip
    with pytest.raises(Refused, match="either `device` or `visible_devices`"):
        three.client.post("/v1/jobs", {"command": "x", "device": "null:0", "visible_devices": "0"})


def test_devices_survive_a_kill(three: Node, uuids: list[str]) -> None:
    """The successor of a server has the same devices, in the same order."""
    code = PROGRAM.replace("print(json", "input(); print(json", 1)
    program = three.program(
        [sys.executable, "-c", code], environment={"CUDA_VISIBLE_DEVICES": "2,0"}, stdin=subprocess.PIPE
    )
    program.until("running")
    assert harness.kill_server(program)
    harness.wait_until(lambda: any(each["outcome"] == "resumed" for each in program.recoveries()), "it is recovered")
    info = program.until("running")
    out, _ = program.process.communicate("\n", timeout=60)
    assert (info["device"], json.loads(out)["cuda"]) == ("null:2,0", [uuids[2], uuids[0]])
