"""A small program under xMIG: shim, server and daemon have to agree for it to end well."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from xmigd.client import Client
from xmigd.doctor.system import Finding
from xmigd.errors import XmigError
from xmigd.settings import Settings

PATIENCE = 120.0  # seconds; the first context on a GPU takes some

# Calls of the driver interface as any program makes them. What fails is printed with its CUresult.
PROGRAM = """
import ctypes as c, os, sys
cuda = c.CDLL("libcuda.so.1")
def check(name, *arguments):
    if error := getattr(cuda, name)(*arguments):
        sys.exit(f"{name} returned {error}")
bytes_ = 1 << 20
data = os.urandom(bytes_)
back = c.create_string_buffer(bytes_)
context, at = c.c_void_p(), c.c_uint64()
check("cuInit", 0)
check("cuDevicePrimaryCtxRetain", c.byref(context), 0)
check("cuCtxSetCurrent", context)
check("cuMemAlloc_v2", c.byref(at), c.c_size_t(bytes_))
check("cuMemcpyHtoD_v2", at, data, c.c_size_t(bytes_))
check("cuMemcpyDtoH_v2", back, at, c.c_size_t(bytes_))
check("cuMemFree_v2", at)
if back.raw != data:
    sys.exit("what was copied to the device came back as something else")
"""


def try_program(settings: Settings) -> list[Finding]:
    """Run it under the local daemon. One finding."""
    client = Client(settings)
    try:
        job = client.post("/v1/jobs", {"name": "doctor", "command": "xmigctl doctor --try"})
    except XmigError as error:
        return [Finding("a program", "failing", error.message, error.hint)]
    finally:
        client.close()
    environment = job["defaults"] | os.environ | job["environment"] | {"LD_PRELOAD": job["preload"]}
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=PATIENCE, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return [Finding("a program", "failing", f"it did not end within {PATIENCE:.0f} s", "see xmigd's log")]
    if done.returncode != 0:
        reported = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [
            Finding("a program", "failing", reported[0], "xmigd's log says why; docs/gpu.md has the errors' meanings")
        ]
    return [Finding("a program", "ok", f"it computed under xMIG, {time.monotonic() - started:.1f} s with its start")]
