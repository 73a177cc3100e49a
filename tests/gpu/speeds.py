"""What the device and its buses can: hashing, and copies between it and host memory that is not page-locked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from tests.gpu.bench import Bench, Failed
from xmigd.measurements import Row
from xmigd.native import find_native_dir

MIB = 8192
WAYS = {
    "to_new_memfds": "from the device to new host memory",
    "to_memfds": "from the device to host memory that has its pages",
    "from_memfds": "from host memory to the device",
}


def measure(bench: Bench) -> Iterator[Row]:
    mib = 64 if bench.rehearsal else MIB
    command = [str(find_native_dir(None) / "xmig-server"), "--measure", f"{bench.kind}:0", str(mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise Failed(f"xmig-server --measure: {done.stderr.strip() or f'exit code {done.returncode}'}")
    said = json.loads(done.stdout)
    size = f"{said['bytes'] / 1e9:.1f} GB"
    yield Row(
        name="content hash", value=round(said["hash_gb_s"], 1), unit="GB/s", target=4500, better="higher",
        conditions=f"XXH3 of chunks of 2 MiB, {size}; median of 5",
    )  # fmt: skip
    yield Row(
        name="a server's driver and context", value=round(said["driver_ms"] + said["context_ms"], 1), unit="ms",
        better="lower", conditions=f"{said['driver_ms']:.1f} for the driver, {said['context_ms']:.1f} for the context",
    )  # fmt: skip
    for way, text in WAYS.items():
        speeds = {int(threads): figures[f"{way}_gb_s"] for threads, figures in said["threads"].items()}
        spent = said["threads"]["16"][f"{way}_thread_ms"]
        others = ", ".join(f"{threads}: {speeds[threads]:.1f}" for threads in sorted(speeds))
        yield Row(
            name=text, value=round(speeds[16], 1), unit="GB/s", target=45, better="higher",
            conditions=f"{size} in memfds of 64 MiB, 16 threads; by number of threads {others}; "
            f"the sixteen spent {spent['kernel']} ms in the kernel, {spent['device']} waiting for the device, "
            f"{spent['buffers']} making buffers",
        )  # fmt: skip
