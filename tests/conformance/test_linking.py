"""The driver's linker: what a program puts together with cuLink… is the same whichever server was killed meanwhile.

On the null device, whose linker joins texts: the cpu device's images are shared objects, and it has none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from xmigd.demo.node import Node, Program

PROGRAM = r"""
import ctypes, hashlib, json, os, sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, cast, create_string_buffer
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
context = c_void_p()
cuda.cuDevicePrimaryCtxRetain(byref(context), 0)
cuda.cuCtxSetCurrent(context)
sys.stdin.readline()

HEADER = b".version 8.0\n.target sm_90\n.address_size 64\n"
def kernels(name, count):
    return HEADER + b"".join(b".visible .entry %s_%d(.param .u64 p) { ret; }\n" % (name, i) for i in range(count))
def add(link, text, name, kind=1):
    return cuda.cuLinkAddData_v2(link, kind, text, c_size_t(len(text)), name, 0, None, None)
def complete(link):
    image, size = c_void_p(), c_size_t()
    code = cuda.cuLinkComplete(link, byref(image), byref(size))
    return code, image, size.value

reported = {}
log = create_string_buffer(200)
options = (c_int * 4)(5, 6, 0, 12)  # the log of errors and its size, registers, verbose
values = (c_void_p * 4)(cast(log, c_void_p), 200, 32, 1)
link, other = c_void_p(), c_void_p()
reported["create"] = cuda.cuLinkCreate_v2(4, options, values, byref(link))
# Several pieces each way: some of a journal's payloads, and more than one reply of the answer.
reported["add"] = [add(link, kernels(b"large", 4000), b"large"), add(link, kernels(b"small", 3), b"small")]
# Another link in between: the first one's state is not the one that the server has at hand.
reported["between"] = [cuda.cuLinkCreate_v2(0, None, None, byref(other)), add(other, kernels(b"alone", 1), b"alone")]
reported["bad"] = add(link, b".version 8.0\n.entry f(.param .align 3 .b8 x[4]) { ret; }", b"bad")
reported["log"] = [log.value.decode(), values[1]]
path = os.environ["PTX"]
with open(path, "wb") as file:
    file.write(kernels(b"file", 2))
reported["file"] = [cuda.cuLinkAddFile_v2(link, 1, path.encode(), 0, None, None),
                cuda.cuLinkAddFile_v2(link, 1, b"/no/such/file", 0, None, None)]
os.unlink(path)
print("added", flush=True)
sys.stdin.readline()
code, image, size = complete(link)
reported["complete"] = [code, size, hashlib.sha256(ctypes.string_at(image, size)).hexdigest()]
reported["again"] = complete(link)[2] == size
reported["alone"] = complete(other)[::2]
module, function, memory = c_void_p(), c_void_p(), c_uint64()
reported["load"] = cuda.cuModuleLoadData(byref(module), image)
names = (b"large_0", b"large_3999", b"small_2", b"file_1", b"alone_0", b"f")
reported["functions"] = [cuda.cuModuleGetFunction(byref(function), module, name) for name in names]
reported["destroy"] = [cuda.cuLinkDestroy(each) for each in (link, other, link)]
cuda.cuModuleGetFunction(byref(function), module, b"small_1")
cuda.cuMemAlloc_v2(byref(memory), c_size_t(1024))
parameters = (c_void_p * 1)(cast(ctypes.pointer(memory), c_void_p))
for _ in range(50):
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) == 0
reported["end"] = cuda.cuCtxSynchronize()
print(json.dumps(reported))
"""
LOG = "bad: it is PTX with a kernel whose declaration cannot be read"


def start(node: Node, folder: Path) -> Program:
    environment = {"PTX": str(folder / "kernels.ptx")}
    pipe = subprocess.PIPE
    program = node.program(
        [sys.executable, "-c", PROGRAM], environment=environment, stdin=pipe, stdout=pipe, stderr=pipe
    )
    program.until("running")
    return program


LINE = "an input of 57 bytes cannot be linked: CUDA error 218"


def finish(program: Program) -> dict[str, Any]:
    out, err = program.process.communicate("\n\n", timeout=60)
    assert program.process.returncode == 0, err
    out = out.removeprefix("added\n")
    assert err == ""
    assert [line for line in program.lines() if "linked" in line] == [LINE]
    return dict(json.loads(out))


@pytest.fixture(scope="module")
def undisturbed(null_node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return finish(start(null_node, tmp_path_factory.mktemp("undisturbed")))


def test_what_is_linked(undisturbed: dict[str, Any]) -> None:
    reported = dict(undisturbed)
    code, size, _ = reported.pop("complete")
    assert code == 0
    assert size > 3 * (64 << 10)  # so it came in pieces
    code, size = reported.pop("alone")
    assert code == 0
    assert size < 200
    assert reported == {
        "create": 0, "add": [0, 0], "between": [0, 0], "bad": 218, "log": [LOG, len(LOG)], "file": [0, 301],
        "again": True, "load": 0, "functions": [0, 0, 0, 0, 500, 500], "destroy": [0, 0, 400], "end": 0,
    }  # fmt: skip


# The records of the link, one by one, and some of what follows it.
@pytest.mark.parametrize("point", ["record", "replay"])
@pytest.mark.parametrize("part", range(4))
def test_killed_while_it_links(
    null_node: Node, undisturbed: dict[str, Any], tmp_path: Path, point: str, part: int
) -> None:
    for sequence in range(1 + part, 40, 4):
        program = start(null_node, tmp_path)
        program.inject("kill", sequence=sequence)
        if point == "replay":  # the next server, too
            program.inject("kill", point="replay")
        assert finish(program) == undisturbed, sequence
        faults = program.faults()
        assert len(faults) >= 1, sequence
        # None has resumed if the program had its answer, and ended, before the daemon heard of it.
        assert {each["exact"] for each in program.recoveries() if each["outcome"] == "resumed"} <= {True}, sequence


def test_killed_after_a_snapshot_in_the_middle(
    null_node: Node, undisturbed: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """What was added is in no journal any more: the next server has the inputs, and begins again with them."""
    program = start(null_node, tmp_path)
    assert program.process.stdin is not None
    assert program.process.stdout is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    assert program.process.stdout.readline() == "added\n"
    harness.wait_until(lambda: program.position() >= 11, "a snapshot behind what was added")
    harness.kill_server(program)
    harness.wait_until(lambda: any(each["outcome"] == "resumed" for each in program.recoveries()), "it is recovered")
    assert finish(program) == undisturbed


def test_a_mistake_in_an_option(null_node: Node) -> None:
    code = PROGRAM.split("HEADER")[0] + "\n".join((
        "link = c_void_p()",
        "def create(option, value=0):",
        "    return cuda.cuLinkCreate_v2(1, (c_int * 1)(option), (c_void_p * 1)(value), byref(link))",
        "print(create(17), create(99), create(-1), create(0), cuda.cuLinkAddData_v2(link, 1, None, 5, b'', 0, 0, 0),",
        "      cuda.cuLinkAddData_v2(link, 77, b'x', 1, b'', 0, None, None), cuda.cuLinkDestroy(None))",
    ))  # fmt: skip
    program = null_node.program([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    out, err = program.process.communicate(timeout=60)
    assert out == "801 1 1 0 1 1 400\n"
    assert err == ""
    assert program.lines() == ["the linker's option 17 is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED"]
